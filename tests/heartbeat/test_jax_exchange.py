"""Heartbeats over JAX's coordination service: in memory always, and by a real job with JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from regrow.heartbeat.jax_exchange import JaxExchange
from regrow.heartbeat.vector_exchange import MissingRanks
from regrow.utils import PortReservation

HELPER = Path(__file__).parent.parent / "helpers" / "heartbeats" / "jax_beats.py"
ALIVE = 30.0
DEAD = 0.05


class Coordination:
    """The key-value calls of JAX's client, as its service answers them, in memory."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.key_value_set_bytes(key, value.encode(), allow_overwrite)

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.keys and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.keys[key] = value
            self._changed.notify_all()

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            count = int(self.keys.get(key, b"0")) + increment
            self.keys[key] = str(count).encode()
            return count

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.keys, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.keys[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(name, value) for name, value in self.keys.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.keys = {k: value for k, value in self.keys.items() if not k.startswith(key)}


class Job:
    """Some processes, each a thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.service = Coordination()
        self.exchanges = [self.process(rank) for rank in range(size)]

    def process(self, rank: int) -> JaxExchange:
        return JaxExchange(self.service, rank=rank, world_size=self.size)

    def beat(self, ranks: Sequence[int] | None = None, timeout: float = ALIVE) -> list[Any]:
        """Let some ranks exchange at the same time; return the results by rank."""

        def one(rank: int) -> Any:
            vector = [0] * self.size
            vector[rank] = -(2**60) + rank
            try:
                return self.exchanges[rank].all_reduce(vector, timeout)
            except MissingRanks as error:
                return error.missing

        ranks = range(self.size) if ranks is None else ranks
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, ranks))

    @property
    def sums(self) -> list[list[int]]:
        """The sums if all processes take part."""
        return [[-(2**60) + rank for rank in range(self.size)]] * self.size


def test_numbers_of_64_bits_are_summed_over_all_processes() -> None:
    job = Job(3)
    assert [job.beat() for _ in range(3)] == [job.sums] * 3


@pytest.mark.parametrize("misses", [1, 2])
def test_failed_exchanges_name_the_missing_ranks(misses: int) -> None:
    job = Job(3)
    for _ in range(misses):
        assert job.beat([0, 1], DEAD) == [(2,), (2,)]
    assert job.beat() == job.sums
    assert job.beat() == job.sums


def test_a_process_that_missed_rounds_joins_the_current_round() -> None:
    job = Job(2)
    job.beat()
    late = job.exchanges[1]
    for _ in range(3):
        assert job.beat([0], DEAD) == [(1,)]
    assert job.beat() == job.sums
    assert late.round == job.exchanges[0].round


def test_a_new_process_of_a_rank_meets_the_others() -> None:
    job = Job(2)
    job.beat()
    assert job.beat([1], DEAD) == [(0,)]
    job.exchanges[1] = job.process(1)
    assert job.beat() == job.sums


def test_a_new_process_ignores_the_numbers_of_a_killed_one() -> None:
    job = Job(2)
    job.service.key_value_set_bytes("regrow/heartbeat/0/beat/1", b"")
    job.service.key_value_increment("regrow/heartbeat/0/count", 1)
    assert job.beat([1], DEAD) == [(0,)]
    assert job.beat() == job.sums


def test_a_void_round_succeeds_for_no_process() -> None:
    job = Job(2)
    assert job.beat([0], DEAD) == [(1,)]
    assert job.beat([1], DEAD) == [(0,)]
    assert job.beat() == job.sums


def test_only_processes_that_never_arrived_are_missing() -> None:
    job = Job(3)
    with ThreadPoolExecutor(1) as pool:
        longer = pool.submit(job.beat, [0], 20 * DEAD)
        assert job.beat([1], DEAD) in ([(2,)], [(0, 2)])
        assert longer.result() in ([(2,)], [(1, 2)])


def test_old_rounds_are_removed() -> None:
    job = Job(3)
    for _ in range(2):
        job.beat()
    kept = len(job.service.keys)
    job.beat([0, 1], DEAD)
    for _ in range(20):
        job.beat()
    assert len(job.service.keys) == kept


def test_vectors_of_different_lengths_are_refused() -> None:
    job = Job(2)
    with ThreadPoolExecutor(2) as pool:
        longer = pool.submit(job.exchanges[1].all_reduce, [1] * 3, 1.0)
        job.service.blocking_key_value_get_bytes("regrow/heartbeat/0/beat/1", 30_000)
        with pytest.raises(RuntimeError, match="process 1 sent numbers for more workers"):
            job.exchanges[0].all_reduce([1] * 2, ALIVE)
        assert longer.exception() is not None


@pytest.mark.training
def test_a_job_of_jax_beats_through_failures_and_beside_a_stuck_collective() -> None:
    if find_spec("jax") is None:
        if os.environ.get("REGROW_TEST_ALL") == "1":
            pytest.fail("REGROW_TEST_ALL is 1, but jax is not installed: it is in the dev extra")
        pytest.skip("jax is not installed")
    with PortReservation() as reservation:
        port = reservation.port
    processes = [
        subprocess.Popen(
            [sys.executable, str(HELPER), str(port), str(rank), "2"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    found = [json.loads(text.splitlines()[-1]) for text in outputs]  # gloo's own lines come before
    sums = [2**40, 2**40 + 1]
    for each in found:
        assert each["first"] == each["after"] == each["while the training is stuck"] == sums
        assert each["stuck"] is False
    assert [found[0][f"miss {miss}"][1:] for miss in range(2)] == [[1], [1]]
