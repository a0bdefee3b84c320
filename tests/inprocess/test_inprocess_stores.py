"""The stores of the wrapper: barriers and records over any store, and the address of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import regrow.store as stores
from helpers.stores.storing import PATIENCE, Background, ServerThread
from regrow.inprocess.attribution import Interruption, InterruptionRecord
from regrow.inprocess.ranks.assignment import RankAssignmentCtx
from regrow.inprocess.ranks.rank_exchange import Exchange
from regrow.inprocess.state import State
from regrow.inprocess.store import BarrierOverflow, BarrierTimeout, PrefixStore, TCPStore
from regrow.store import MemoryStore, make_token, start_server
from regrow.store.limits import CLOSE_S

LONG = timedelta(seconds=PATIENCE)
TORCH_STORES = Path(__file__).parents[1] / "helpers" / "stores" / "torch_stores.py"


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore(0, MemoryStore())


@pytest.mark.parametrize(
    "name", ["initial_barrier", "iteration_barrier", "completion_barrier", "termination_barrier"]
)
def test_a_barrier_opens_when_all_ranks_are_there(store: PrefixStore, name: str) -> None:
    barrier: Callable[..., None] = getattr(store, name)
    early = [Background(barrier, rank=rank, rendezvous_count=3, timeout=LONG) for rank in (0, 1)]
    assert all(call.running() for call in early)
    barrier(rank=2, rendezvous_count=3, timeout=LONG)
    assert [call.result() for call in early] == [None, None]


@pytest.mark.parametrize("come", [{"rank": 2}, {"ranks": [2]}, {"ranks": [2, 2]}])
@pytest.mark.parametrize("name", ["barrier", "reentrant_barrier"])
def test_code_of_both_generations_comes_to_a_barrier(
    store: PrefixStore, name: str, come: dict[str, Any]
) -> None:
    barrier: Callable[..., None] = getattr(store, name)
    barrier([0, 1], "here", 3, timedelta())  # arguments for other libraries; they do not wait
    barrier(group_name="here", rendezvous_count=3, timeout=LONG, timeout_chunk=LONG, **come)


def test_a_barrier_of_all_ranks_names_the_missing_ranks(store: PrefixStore) -> None:
    with pytest.raises(BarrierTimeout, match=r"^1 of 3 ranks \(1\) did not arrive"):
        store.iteration_barrier(ranks=(0, 2), rendezvous_count=3, timeout=0.02)


def test_a_barrier_of_some_ranks_names_the_ranks_that_arrived(store: PrefixStore) -> None:
    message = r"^1 of 3 ranks did not arrive at the barrier 'here' within 0\.02 s; 5, 7 arrived$"
    with pytest.raises(BarrierTimeout, match=message):
        store.barrier(ranks=(7, 5), group_name="here", rendezvous_count=3, timeout=0.02)


def test_the_wait_of_a_barrier_may_be_without_a_bound(store: PrefixStore) -> None:
    early = Background(store.iteration_barrier, 0, 2, timedelta.max)
    store.iteration_barrier(1, 2, timedelta.max)
    early.result()


def test_ranks_that_number_themselves_name_the_living_that_are_missing(store: PrefixStore) -> None:
    ctx = RankAssignmentCtx(State(rank=3, world_size=5), store, {0, 1})
    with pytest.raises(BarrierTimeout, match=r"2 of 3 ranks \(2, 4\) did not arrive"):
        Exchange(ctx, "keys", timedelta(seconds=0.02)).gather("")


def test_a_barrier_takes_no_rank_twice_and_none_too_many(store: PrefixStore) -> None:
    store.barrier(0, "here", 1, LONG)
    with pytest.raises(BarrierOverflow, match="rank 0 arrived at the barrier 'here' a second time"):
        store.barrier(0, "here", 1, LONG)
    with pytest.raises(
        BarrierOverflow, match="2 ranks arrived at the barrier 'here', which is for 1 ranks"
    ):
        store.barrier(1, "here", 1, LONG)


def test_a_reentrant_barrier_counts_a_rank_once(store: PrefixStore) -> None:
    for _ in range(2):
        with pytest.raises(BarrierTimeout):
            store.reentrant_barrier(0, "here", 2, 0.02)
    assert not store.is_rank_at_reentrant_barrier(1, "here")
    store.reentrant_barrier(1, "here", 2, LONG)
    store.reentrant_barrier(0, "here", 2, LONG)
    assert store.is_rank_at_reentrant_barrier(1, "here")


def test_what_is_recorded_is_read_by_all_and_by_this_iteration_alone() -> None:
    shared = MemoryStore()
    store, same, next = (PrefixStore(iteration, shared) for iteration in (0, 0, 1))
    records = [
        InterruptionRecord(1, Interruption.EXCEPTION),
        InterruptionRecord(2, Interruption.HARD_TIMEOUT),
    ]
    store.record_interrupted(records[0])
    store.record_interrupted(records[1:])
    store.record_interrupted([])
    store.record_terminated_rank(2)
    store.record_terminated_ranks({4, 5})
    store.set_initial_rank(0, 7)
    store.send_heartbeat(1)
    store.record_completed()
    assert same.get_interruption_records() == records
    assert same.is_any_rank_interrupted()
    assert same.get_terminated_ranks() == {2, 4, 5}
    assert same.get_initial_rank(0) == 7
    assert same.get_initial_ranks([0]) == [7]
    same.wait_for_interrupted(LONG)
    same.wait_for_completed(LONG)
    assert same.get_heartbeats([0, 1]) == [0, 1]
    assert same.is_any_rank_completed()
    assert next.get_interruption_records() == []
    assert next.get_terminated_ranks() == set()
    assert not next.is_any_rank_interrupted()
    assert not next.is_any_rank_completed()


def test_an_interruption_can_be_recorded_without_a_reason() -> None:
    store = PrefixStore(0, MemoryStore())
    store.record_interrupted()
    assert store.is_any_rank_interrupted()
    assert store.get_interruption_records() == []


def test_ranks_that_are_through_are_counted_and_none_has_to_wait_for_that() -> None:
    store = PrefixStore("base", MemoryStore())
    for rank in range(3):
        store.record_base_terminated_rank(rank)
    assert store.get_base_terminated_count() == 3
    assert store.critical_ranks == ()


def test_the_agents_store_needs_no_argument_and_forgets_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ServerThread()
    monkeypatch.setenv("REGROW_STORE", server.endpoint)
    monkeypatch.setenv("REGROW_STORE_TOKEN", server.token.decode())
    store, other = TCPStore(), TCPStore(timeout=LONG)
    store.set("key", b"value")
    assert other.get("key") == b"value"
    assert other.timeout == LONG
    assert server.connect().get("inprocess/key") == b"value"
    for iteration in (1, 11):
        PrefixStore(iteration, store).record_terminated_ranks({1, 2})
    for _ in range(2):
        store.forget(1)
    assert PrefixStore(1, other).get_terminated_ranks() == set()
    assert PrefixStore(11, other).get_terminated_ranks() == {1, 2}
    for each in (store, other):
        each.close()
    server.stop()


@pytest.mark.parametrize(
    ("environ", "given", "port"),
    [
        ({"MASTER_PORT": "29500"}, {}, 29500),
        ({"MASTER_PORT": "29500"}, {"port": 4000}, 4000),
        ({"MASTER_PORT": "29500", "REGROW_STORE_PORT": "4001"}, {}, None),
        ({"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}, {}, None),
        ({"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, 29500),
        ({"MASTER_PORT": "29500", "REGROW_STORE": "unix:/x"}, {}, None),
        ({"MASTER_PORT": "29500", "REGROW_STORE": "unix:/x"}, {"host_name": "here"}, 29500),
        ({}, {}, None),
    ],
)
def test_without_an_agent_the_store_has_master_port_unless_torchrun_holds_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], given: dict[str, Any], port: int
) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        def set_timeout(self, timeout: timedelta) -> None:
            pass

    def worker_store(**options: Any) -> Client:
        asked.append(options)
        return Client()

    for name in ("REGROW_STORE", "REGROW_STORE_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "worker_store", worker_store)
    TCPStore(**given, rank=1, world_size=2).session(5.0)
    assert [options["port"] for options in asked] == [port, port]
    assert [options["timeout"] for options in asked] == [300.0, 5.0]


@pytest.mark.training
def test_torchs_stores_have_our_barrier_and_their_ranks_meet(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TORCH_STORES), str(tmp_path / "store")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert done.stdout.split() == ["barrier", "records", "TCPStore", "FileStore"], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_store_is_abandoned_without_an_answer_of_its_server() -> None:
    """The host of the server may be lost, and its connection still count as alive."""
    with start_server(token=(token := make_token())) as server:
        host, port = server.endpoint.rsplit(":", 1)
        store = TCPStore(host, int(port), rank=1, world_size=2, token=token)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            store.abandon()
            assert time.monotonic() - begun < CLOSE_S / 2
        finally:
            os.kill(server.pid, signal.SIGCONT)
