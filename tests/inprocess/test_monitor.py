"""Ranks that can do nothing about it any more are ended from outside, and the others go on."""

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
from processes import wait_until
from storing import ServerThread

from regrow.inprocess._monitor import Monitor
from regrow.inprocess._monitor_start import monitor_name
from regrow.inprocess._service import InprocessService
from regrow.store import STORE_ENV, STORE_TOKEN_ENV

SCRIPT = Path(__file__).parents[1] / "helpers" / "hung_ranks.py"

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
    """Plays a case with three ranks; what the monitor writes is in `tmp_path`."""

    def play(case: str) -> Fates:
        asks, answers = script.stdin, script.stdout
        assert asks is not None
        assert answers is not None
        asks.write(json.dumps([case, 3, str(tmp_path)]) + "\n")
        asks.flush()
        fates: Fates = json.loads(answers.readline())
        return fates

    return play


def went_on(fate: dict[str, Any]) -> bool:
    """Whether a rank has called the function again, without the one that hung."""
    notes = [note for note in fate["notes"] if not note.startswith("log: ")]
    twice = ["called in a world of 3", "called in a world of 2", "returned"]
    # Whoever hears of it before it has come to the first call does not make it.
    return fate.get("exit") == 0 and notes in (twice, twice[1:])


def causes(fates: Fates) -> list[str]:
    """What the restarts are said to have been for."""
    notes = [note for fate in fates for note in fate["notes"]]
    return [
        note.split("after ")[1].split(";")[0] for note in notes if "restarts the function" in note
    ]


def test_a_rank_that_holds_the_interpreters_lock_is_ended_and_it_is_known_where_it_stood(
    play: Play, tmp_path: Path
) -> None:
    fates = play("holds_the_lock")
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])
    kinds = causes(fates)
    assert kinds
    seen = "SOFT_TIMEOUT on initial rank 1: no progress for 0.6 s: in hold_the_lock"
    assert all(cause.startswith(seen) for cause in kinds)
    log = (tmp_path / "monitor.1.log").read_text()
    told, ended = log.split(" does not answer: no progress for 0.6 s: in hold_the_lock")
    assert "initial rank 1 (process" in told
    assert " is ended: no progress for 2.7 s: in hold_the_lock" in ended
    assert ended.count(" in hold_the_lock\n") == 2  # the stack was taken each time
    assert "is killed" not in log
    assert not (tmp_path / "monitor.0.log").exists()


def test_ranks_beside_it_tell_the_others_where_the_monitor_cannot_speak_to_their_store(
    play: Play,
) -> None:
    fates = play("holds_the_lock_with_a_store_of_torchs_kind")
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])
    assert any(cause.startswith("SOFT_TIMEOUT on initial rank 1") for cause in causes(fates))


def test_a_rank_that_is_stopped_is_continued_and_ended(play: Play) -> None:
    fates = play("is_stopped")
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])
    assert any("stopped by a signal" in cause for cause in causes(fates))


@pytest.mark.parametrize(
    "case",
    ["is_stopped_until_the_others_restart", "is_stopped_so_with_a_store_of_torchs_kind"],
)
def test_the_others_restart_at_the_soft_time_out_of_a_rank_that_is_stopped_and_it_may_come_back(
    play: Play, tmp_path: Path, case: str
) -> None:
    fates = play(case)
    for fate in fates:
        notes = [note for note in fate["notes"] if not note.startswith("log: ")]
        assert fate.get("exit") == 0
        assert notes[-2:] == ["called in a world of 3", "returned"]
    kinds = causes(fates)
    assert kinds
    assert all(cause.startswith("SOFT_TIMEOUT on initial rank 1: no progress") for cause in kinds)
    assert "does not answer" in (tmp_path / "monitor.1.log").read_text()


@pytest.mark.thorough
def test_a_rank_that_does_not_heed_sigterm_is_killed_after_the_grace(
    play: Play, tmp_path: Path
) -> None:
    fates = play("holds_it_and_heeds_no_signal")
    assert fates[1]["signal"] == signal.SIGKILL
    assert went_on(fates[0])
    assert went_on(fates[2])
    assert (
        "has not ended within 0.1 s of SIGTERM, and is killed"
        in (tmp_path / "monitor.1.log").read_text()
    )


@pytest.mark.parametrize(
    "case",
    ["is_stuck_where_an_exception_does_not_arrive", "is_stuck_so_with_a_store_of_torchs_kind"],
)
def test_a_rank_whose_restart_cannot_begin_is_ended_as_well(play: Play, case: str) -> None:
    fates = play(case)
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])
    # Its own thread had said that it makes no progress; it did not come to the barrier.
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
    assert went_on(fates[0])
    assert went_on(fates[2])
    # By the latter where the others had met it already, and waited for it to enter.
    kinds = ("EXCEPTION on initial rank 1", "HARD_TIMEOUT on initial rank 1")
    assert all(cause.startswith(kinds) for cause in causes(fates))
    assert "no progress for 1.5 s: " in (tmp_path / "monitor.1.log").read_text()
    log = "\n".join(fates[1]["notes"])  # of all threads, since the abort is in one of its own
    assert "no automatic progress for 0.6 s; the restart stands here" in log
    assert "in get_stuck" in log.split("the restart stands here")[1]


@pytest.mark.thorough
def test_a_rank_that_hangs_as_it_leaves_is_ended(play: Play) -> None:
    fates = play("is_stuck_as_it_leaves")
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])


def test_a_monitor_that_was_killed_is_started_again_and_keeps_the_time_out(play: Play) -> None:
    fates = play("loses_its_monitor")
    assert "another monitor: True" in fates[1]["notes"]
    assert fates[1]["signal"] == signal.SIGTERM
    assert went_on(fates[0])
    assert went_on(fates[2])
    warnings = [[note for note in fate["notes"] if "started again" in note] for fate in fates]
    assert [len(each) for each in warnings] == [1, 1, 1]


def test_a_monitor_is_light_spares_who_is_not_to_be_judged_and_ends_with_its_ranks(
    play: Play, server: ServerThread, tmp_path: Path
) -> None:
    fates = play("is_not_to_be_judged")
    assert [fate.get("exit") for fate in fates] == [0, 0, 0]
    notes = fates[1]["notes"]
    assert "has slept" in notes
    assert "torch: False" in notes
    assert next(int(note.split()[1]) for note in notes if note.startswith("kB: ")) < 25_000

    def is_gone() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
            return nobody.connect_ex(monitor_name(server.endpoint)) != 0

    wait_until(is_gone, "the monitor lets go of its socket")
    wait_until(lambda: not list(tmp_path.glob("*.pid")), "the monitor removes its pid files")


def test_a_process_that_has_ended_before_it_said_anything_is_nothing_to_speak_of(
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
