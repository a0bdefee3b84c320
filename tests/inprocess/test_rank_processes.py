"""Ranks as processes without torch and without an agent: effects of their deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from helpers.stores.storing import PATIENCE, master_port

SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "restarting_rank.py"


class Process:
    """A rank, and its events."""

    def __init__(self, rank: int, size: int, port: int, home: Path) -> None:
        unwanted = ("REGROW_", "TORCHELASTIC_", "SLURM_", "LOCAL_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def receive(self) -> list[Any]:
        event: list[Any] = json.loads(self._lines.get(timeout=PATIENCE))
        return event

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Process]]:
    with master_port() as port:
        ranks = [Process(rank, 4, port, tmp_path) for rank in range(4)]
        assert [rank.receive() for rank in ranks] == [["running", 0, []]] * 4
        yield ranks
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def test_the_death_of_rank_0_which_started_the_store_is_one_like_any_other(
    ranks: list[Process],
) -> None:
    ranks[0].process.send_signal(signal.SIGKILL)
    living = ranks[1:]
    assert [rank.receive() for rank in living] == [["faults", [["TERMINATED", 0]]]] * 3
    assert [rank.receive() for rank in living] == [["running", 1, [0]]] * 3
    living[1].process.send_signal(signal.SIGKILL)
    living = [ranks[1], ranks[3]]
    assert [rank.receive() for rank in living] == [["faults", [["TERMINATED", 2]]]] * 2
    assert [rank.receive() for rank in living] == [["running", 2, [1]]] * 2
    for rank in living:
        rank.send("done")
    assert [rank.receive() for rank in living] == [["over"]] * 2


def test_a_fault_restarts_all_and_one_that_leaves_is_not_waited_for(ranks: list[Process]) -> None:
    ranks[2].send("report")
    assert [rank.receive() for rank in ranks] == [["faults", [["EXCEPTION", 2]]]] * 4
    assert [rank.receive() for rank in ranks] == [["running", 1, []]] * 4
    ranks[1].send("leave")
    ranks[1].process.wait(PATIENCE)
    living = [ranks[0], ranks[2], ranks[3]]
    assert [rank.receive() for rank in living] == [["faults", [["BASE_EXCEPTION", 1]]]] * 3
    assert [rank.receive() for rank in living] == [["running", 2, [1]]] * 3
    for rank in living:
        rank.send("done")
    assert [rank.receive() for rank in living] == [["over"]] * 3
