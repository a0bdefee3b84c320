"""The monitor ends ranks that cannot act, and the other ranks continue."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.stores.storing import ServerThread
from regrow.inprocess.group.group_service import InprocessService
from regrow.inprocess.watchdog.monitor import Monitor
from regrow.inprocess.watchdog.monitor_client import (
    monitor_job,
    monitor_name,
)
from regrow.store import STORE_ENV, STORE_TOKEN_ENV

SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "hung_ranks.py"

Fates = list[dict[str, Any]]
Play = Callable[[str], Fates]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    server = ServerThread(services={"inprocess": InprocessService()})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def script(server: ServerThread) -> Iterator[subprocess.Popen[str]]:
    unwanted = ("REGROW_", "TORCHELASTIC_", "SLURM_", "LOCAL_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: server.token.decode()}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate()


@pytest.fixture
def play(script: subprocess.Popen[str], tmp_path: Path) -> Play:
    """Runs a case with three ranks; the files of the monitor are in `tmp_path`."""

    def play(case: str) -> Fates:
        asks, answers = script.stdin, script.stdout
        assert asks is not None
        assert answers is not None
        asks.write(json.dumps([case, 3, str(tmp_path)]) + "\n")
        asks.flush()
        fates: Fates = json.loads(answers.readline())
        return fates

    return play


def continued(fate: dict[str, Any]) -> bool:
    """Whether a rank has called the function again, without the rank that hung."""
    notes = [note for note in fate["notes"] if not note.startswith("log: ")]
    twice = ["called in a world of 3", "called in a world of 2", "returned"]
    # A rank that is notified of the fault before its first call skips that call.
    return fate.get("exit") == 0 and notes in (twice, twice[1:])


def log_with(folder: Path, part: str) -> str:
    """Wait until the monitor's thread has written `part` to the log of rank 1; return the log."""
    path = folder / "monitor.1.log"
    wait_until(lambda: path.exists() and part in path.read_text(), f"the monitor notes {part!r}")
    return path.read_text()


def causes(fates: Fates) -> list[str]:
    """Return the logged causes of the restarts."""
    notes = [note for fate in fates for note in fate["notes"]]
    return [
        note.split("after ")[1].split(";")[0] for note in notes if "restarts the function" in note
    ]


def test_a_rank_that_holds_the_interpreters_lock_is_ended_and_its_place_is_logged(
    play: Play, tmp_path: Path
) -> None:
    fates = play("holds_the_lock")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    kinds = causes(fates)
    assert kinds
    seen = "SOFT_TIMEOUT on initial rank 1: no progress for 0.6 s: in hold_the_lock"
    assert all(cause.startswith(seen) for cause in kinds)
    log = log_with(tmp_path, " is ended: no progress for 2.7 s: in hold_the_lock")
    overdue, ended = log.split(" does not answer: no progress for 0.6 s: in hold_the_lock")
    assert "initial rank 1 (process" in overdue
    assert " is ended: no progress for 2.7 s: in hold_the_lock" in ended
    assert ended.count(" in hold_the_lock\n") == 2  # the stack was taken each time
    assert "is killed" not in log
    assert len((tmp_path / "monitor.0.log").read_text().splitlines()) == 1  # its start


def test_a_rank_that_hangs_is_ended_where_the_user_has_handed_in_a_store(play: Play) -> None:
    fates = play("holds_the_lock_with_a_store_of_the_users")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    assert any(cause.startswith("SOFT_TIMEOUT on initial rank 1") for cause in causes(fates))


def test_a_rank_that_is_stopped_is_continued_and_ended(play: Play) -> None:
    fates = play("is_stopped")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    assert any("stopped by a signal" in cause for cause in causes(fates))


def test_the_others_restart_at_the_soft_time_out_of_a_rank_that_is_stopped_and_it_may_come_back(
    play: Play, tmp_path: Path
) -> None:
    fates = play("is_stopped_until_the_others_restart")
    for fate in fates:
        notes = [note for note in fate["notes"] if not note.startswith("log: ")]
        assert fate.get("exit") == 0
        assert notes[-2:] == ["called in a world of 3", "returned"]
    kinds = causes(fates)
    assert kinds
    assert all(cause.startswith("SOFT_TIMEOUT on initial rank 1: no progress") for cause in kinds)
    assert log_with(tmp_path, "does not answer")


@pytest.mark.thorough
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(play: Play, tmp_path: Path) -> None:
    fates = play("holds_the_gil_and_ignores_signals")
    assert fates[1]["signal"] == signal.SIGKILL
    assert continued(fates[0])
    assert continued(fates[2])
    assert log_with(tmp_path, "has not ended within 0.1 s of SIGTERM, and is killed")


def test_a_rank_whose_restart_cannot_begin_is_ended_as_well(play: Play) -> None:
    fates = play("is_stuck_where_an_exception_does_not_arrive")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    # Its own thread reports that it makes no progress; it does not reach the barrier.
    assert all(cause.startswith(("SOFT_TIMEOUT", "HARD_TIMEOUT")) for cause in causes(fates))


@pytest.mark.parametrize(
    "case",
    [
        "is_stuck_in_the_abort",
        pytest.param("is_stuck_in_finalize", marks=pytest.mark.thorough),
        pytest.param("is_stuck_in_the_health_check", marks=pytest.mark.thorough),
        pytest.param("is_stuck_in_a_finalizer", marks=pytest.mark.thorough),
        pytest.param("is_stuck_where_ranks_are_assigned", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_hangs_between_two_calls_is_ended_and_not_waited_for(
    play: Play, case: str, tmp_path: Path
) -> None:
    fates = play(case)
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    # It is HARD_TIMEOUT if the others had met it already, and waited until it enters.
    kinds = ("EXCEPTION on initial rank 1", "HARD_TIMEOUT on initial rank 1")
    assert all(cause.startswith(kinds) for cause in causes(fates))
    abort = case == "is_stuck_in_the_abort"  # limited with or without progress of the main thread
    assert log_with(tmp_path, "no return in time: " if abort else "no progress for 1.5 s: ")
    log = "\n".join(fates[1]["notes"])  # of all threads, because the abort has its own
    assert "no automatic progress for 0.6 s; stack of the restart" in log
    assert "in get_stuck" in log.split("stack of the restart")[1]


@pytest.mark.thorough
def test_a_rank_that_hangs_as_it_leaves_is_ended(play: Play) -> None:
    fates = play("is_stuck_as_it_leaves")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])


def test_a_rank_that_is_stopped_while_it_waits_is_ended_and_the_others_continue(play: Play) -> None:
    fates = play("is_stopped_when_it_is_done")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])


@pytest.mark.thorough
def test_a_reserve_rank_that_is_stopped_does_not_keep_the_others_from_restarting(
    play: Play,
) -> None:
    fates = play("is_stopped_in_reserve")
    assert fates[1]["signal"] == signal.SIGTERM
    for fate in (fates[0], fates[2]):
        assert fate["exit"] == 0
        assert fate["notes"][-2:] == ["called in a world of 2", "returned"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("is_stuck_in_completion", "no progress for 0.7 s: in get_stuck"),
        ("never_returns_from_completion", "no return in time: in compute"),
        pytest.param("is_stopped_in_completion", "no progress", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_hangs_in_completion_is_ended(
    play: Play, tmp_path: Path, case: str, why: str
) -> None:
    fates = play(case)
    assert fates[1]["signal"] == signal.SIGTERM
    assert [fates[rank]["notes"][-1] for rank in (0, 2)] == ["returned"] * 2
    assert log_with(tmp_path, f" is ended: {why}")


def test_a_rank_that_makes_progress_in_terminate_has_to_return_from_it_in_time(
    play: Play, tmp_path: Path
) -> None:
    fates = play("never_returns_from_terminate")
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    assert log_with(tmp_path, " is ended: no return in time: in compute")


def test_a_monitor_that_was_killed_is_started_again_and_keeps_the_time_out(play: Play) -> None:
    fates = play("loses_its_monitor")
    assert "another monitor: True" in fates[1]["notes"]
    assert fates[1]["signal"] == signal.SIGTERM
    assert continued(fates[0])
    assert continued(fates[2])
    warnings = [
        [note for note in fate["notes"] if "starting another one" in note] for fate in fates
    ]
    assert [len(each) for each in warnings] == [1, 1, 1]


def test_a_monitor_is_light_ignores_group_signals_and_ends_with_its_ranks(
    play: Play, server: ServerThread, tmp_path: Path
) -> None:
    fates = play("is_not_to_be_judged")
    assert [fate.get("exit") for fate in fates] == [0, 0, 0]
    notes = fates[1]["notes"]
    assert "has slept" in notes
    assert "torch: False" in notes
    assert "the same monitor: True" in notes
    assert next(int(note.split()[1]) for note in notes if note.startswith("kB: ")) < 25_000

    def is_gone() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(monitor_name(job)) != 0

    job = monitor_job(server.endpoint, server.token)
    wait_until(is_gone, "the monitor lets go of its socket")
    assert len({path.read_text() for path in tmp_path.glob("monitor.?.pid")}) == 1


def test_a_process_that_ended_before_its_first_packet_is_not_reported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = f"\0regrow-test-{os.getpid()}"
    connect = f"socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({name!r})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        subprocess.run([sys.executable, "-S", "-c", f"import socket; {connect}"], check=True)
        Monitor(listener).run()
    assert capfd.readouterr() == ("", "")
