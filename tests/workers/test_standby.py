"""Standbys: processes that wait at the wrapped call, and become a worker when one is needed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import EventQueue, alive, wait_until
from regrow.utils import PortReservation
from regrow.workers import Guardian
from regrow.workers.guardian.client import WorkerSetup
from regrow.workers.guardian.events import Exited, Gone, HelperChanged, Started

SCRIPT = """
import os, sys, time
import regrow
from regrow.inprocess import Wrapper

print("prologue", flush=True)
os.environ["MINE"] = "of the script"
if os.environ.get("EARLY"):
    eval(os.environ["EARLY"])

@Wrapper()
def train():
    mine = os.environ["REGROW_WORKER_PID"] == str(os.getpid())
    print("rank", os.environ["RANK"], os.environ["MINE"], mine, "REGROW_STANDBY" in os.environ)

train()
sys.exit(3)
"""


class Bench:
    """A guardian, a standby, and a worker that may take its place."""

    def __init__(self, folder: Path) -> None:
        self.guardian = Guardian()
        self.changes = EventQueue()
        self.guardian.on_standby = self.changes
        self.output = folder / "standby.log"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self._command = [sys.executable, "-u", str(script)]

    def stand_by(self, **more: str | None) -> HelperChanged:
        """Start a standby of an attempt; return its first change."""
        number = self.start(**more)
        change = self.changes.next(HelperChanged)
        assert change.number == number
        return change

    def start(self, **more: str | None) -> int:
        """Start a standby with changes of its environment; None removes a variable."""
        env = {"WORLD_SIZE": "1", **os.environ, "REGROW_STANDBY": "3", "RANK": None, **more}
        given = {name: value for name, value in env.items() if value is not None}
        with self.output.open("ab") as file:
            return self.guardian.stand_by(self._command, given, file.fileno())

    def run(self) -> tuple[Started, int | None, str]:
        """Run a worker to its end; return its start, exit code and output."""
        reader, writer = os.pipe()
        events = EventQueue()
        with PortReservation() as port:
            rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            env = {**os.environ, **rank, "MASTER_PORT": str(port.port)}
            setup = WorkerSetup(env, events, fds={1: writer, 2: writer})
            self.guardian.spawn(self._command, setup)
            os.close(writer)
            with open(reader) as output:
                text = output.read()
        started, code = events.next(Started), events.next(Exited).code
        events.next(Gone)
        return started, code, text


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.guardian.close(30)


def test_a_standby_becomes_the_worker_with_its_rank_and_streams(bench: Bench) -> None:
    standby = bench.stand_by()
    assert (standby.helper, standby.kind) == ("standby", "ready")
    assert standby.resident > 1 << 20
    started, code, text = bench.run()
    assert (started.source, started.pid, code) == ("standby", standby.pid, 3)
    assert text == "rank 0 of the script True False\n", "the rest went to the standby's own file"
    assert bench.output.read_text() == "prologue\n"
    taken = bench.changes.next(HelperChanged)
    assert (taken.kind, taken.pid) == ("taken", standby.pid)
    assert bench.run()[0].source == "exec", "there was one standby"


@pytest.mark.parametrize(
    ("early", "why"),
    [
        ('os.environ["RANK"]', "the script reads RANK before its wrapped call"),
        ('os.environ.get("LOCAL_RANK", 0)', "the script reads LOCAL_RANK before its wrapped call"),
        ('"GROUP_RANK" in os.environ', "the script reads GROUP_RANK before its wrapped call"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit(0)", "the script has ended without a call of a wrapped function"),
    ],
)
def test_a_script_that_does_not_reach_its_wrapped_call_is_no_standby(
    bench: Bench, early: str, why: str
) -> None:
    change = bench.stand_by(EARLY=early)
    assert change.kind == "unfit"
    assert why in change.why
    assert bench.run()[0].source == "exec"


def test_a_standby_that_is_killed_costs_the_worker_its_start(bench: Bench) -> None:
    standby = bench.stand_by()
    os.kill(standby.pid, signal.SIGKILL)
    started, code, _ = bench.run()
    assert (started.source, code) == ("exec", 3)
    gone = bench.changes.next(HelperChanged)
    assert (gone.kind, gone.pid) == ("gone", standby.pid)
    # The guardian may ask it before it sees its end.
    assert gone.why in ("it has ended", "it cannot be asked: [Errno 32] Broken pipe")


def test_a_standby_that_is_suspended_is_given_up(bench: Bench) -> None:
    standby = bench.stand_by()
    os.kill(standby.pid, signal.SIGSTOP)
    started, code, _ = bench.run()
    assert (started.source, code) == ("exec", 3)
    gone = bench.changes.next(HelperChanged)
    assert (gone.kind, gone.why) == ("gone", "it did not answer in time")
    wait_until(lambda: not alive(standby.pid), "the suspended standby has ended")


def test_standbys_are_dismissed_without_a_report(bench: Bench) -> None:
    first, second = bench.stand_by(), bench.stand_by()
    bench.guardian.dismiss()
    wait_until(lambda: not alive(first.pid) and not alive(second.pid), "both have ended")
    assert bench.run()[0].source == "exec"
    third = bench.stand_by()
    assert third.kind == "ready"
    assert [change.kind for change in bench.changes.all if isinstance(change, HelperChanged)] == [
        "ready"
    ] * 3


def test_only_standbys_that_have_not_come_to_their_wrapped_call_are_dismissed(
    bench: Bench, tmp_path: Path
) -> None:
    ready = bench.stand_by()
    started = tmp_path / "started"
    bench.start(EARLY=f"open({str(started)!r}, 'w').write(str(os.getpid())), time.sleep(3600)")
    pid = wait_until(lambda: int(started.read_text() or 0) if started.exists() else 0, "a pid")
    bench.guardian.dismiss(only_starting=True)
    wait_until(lambda: not alive(pid), "it has ended")
    assert bench.run()[0].pid == ready.pid


def test_a_standby_of_a_waiting_host_takes_its_place_in_the_first_round(bench: Bench) -> None:
    standby = bench.stand_by(WORLD_SIZE=None, EARLY='os.environ.get("LOCAL_WORLD_SIZE")')
    assert standby.kind == "ready"
    started, code, text = bench.run()
    assert (started.source, started.pid, code) == ("standby", standby.pid, 3)
    assert text == "rank 0 of the script True False\n"


@pytest.mark.parametrize(
    ("early", "what"),
    [
        ('os.environ.get("WORLD_SIZE", 1)', "reads WORLD_SIZE"),
        ('"MASTER_ADDR" in os.environ', "reads MASTER_ADDR"),
        ('__import__("regrow.store").store.worker_store()', "uses worker_store()"),
        ('os.environ["RANK"]', "reads RANK"),
    ],
)
def test_a_script_that_needs_its_round_is_no_standby_of_a_waiting_host(
    bench: Bench, early: str, what: str
) -> None:
    change = bench.stand_by(WORLD_SIZE=None, EARLY=early)
    assert change.kind == "unfit"
    assert f"the script {what} before its wrapped call" in change.why


def test_a_process_that_a_standby_starts_is_none(bench: Bench) -> None:
    code = "import regrow; print('a child without a socket')"
    child = f"__import__('subprocess').run([sys.executable, '-c', {code!r}], check=True)"
    assert bench.stand_by(EARLY=child).kind == "ready"
    assert "a child without a socket" in bench.output.read_text()


def test_a_standby_ends_with_its_guardian(bench: Bench) -> None:
    standby = bench.stand_by()
    assert bench.guardian.close(30)
    assert not alive(standby.pid)
