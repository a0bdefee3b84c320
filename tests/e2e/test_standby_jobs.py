"""`--standby`: a process that waits at the wrapped call takes the place of a lost rank."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.replacing import Launch, Training
from helpers.processes import alive, wait_until

SCRIPT = """
import json, os, time
from datetime import timedelta
from pathlib import Path
import regrow
from regrow.inprocess import CallWrapper, Wrapper

print("the script begins", flush=True)
early = os.environ.get("EARLY") and int(os.environ.get(os.environ["EARLY"], 0))
finish = Path(os.environ["FOLDER"]) / "finish"

def say(*words):
    head = [os.environ["RANK"], os.environ["REGROW_ATTEMPT"]]
    incarnation = os.environ.get("REGROW_INCARNATION") or 0
    line = " ".join(map(str, (*head, incarnation, os.getpid(), *words)))
    with open(os.environ["REPORTS"], "w") as reports:
        reports.write(line + "\\n")

@Wrapper(
    replace=True,
    **{name: timedelta(seconds=s) for name, s in json.loads(os.environ["TIMEOUTS"]).items()},
)
def train(call: CallWrapper):
    regrow.step(call.iteration)
    replaced = ",".join(map(str, call.replaced)) or "-"
    where = os.environ["RANK"], os.environ["WORLD_SIZE"]
    say("called", call.iteration, *where, int(call.joined), replaced)
    print("rank", os.environ["RANK"], "runs in", os.getpid(), flush=True)
    while not finish.exists():
        time.sleep(0.01)
        call.ping()

train()
say("returns")
"""

Start = Callable[..., Training]


@pytest.fixture
def start(launch: Launch, tmp_path: Path) -> Start:
    """Return a function that starts a job of two ranks and one standby."""

    def start(*flags: str, early: str = "") -> Training:
        env = {"EARLY": early}
        flags = ("--standby=1", "--max-restarts=3", "--redirects=3", *flags)
        return Training(launch, tmp_path, *flags, script=SCRIPT, env=env, size=2, prelude="")

    return start


def standby_of(training: Training, *but: int) -> int:
    """Wait until a standby is ready; return its pid."""
    event = training.job.await_event("standby.ready", lambda event: event["pid"] not in but)
    pid: int = event["pid"]
    return pid


def sources(training: Training) -> list[tuple[int, str]]:
    return [
        (event["rank"], event["started_from"]) for event in training.job.events("worker.replaced")
    ]


def test_a_standby_takes_the_place_of_a_lost_rank_and_another_one_stands_by(start: Start) -> None:
    training = start()
    before = training.await_all()
    standby = standby_of(training)
    training.kill(before, 1)
    after = training.await_all(rank_1=1)
    assert (after[0].pid, after[1].pid) == (before[0].pid, standby)
    assert (after[1].rank, after[1].joined) == (1, True)
    next_standby = standby_of(training, standby)
    training.kill(after, 0)
    last = training.await_all(rank_0=1, rank_1=1)
    assert {rank: call.pid for rank, call in last.items()} == {0: next_standby, 1: standby}
    assert training.finish() == 0, training.job.output
    assert sources(training) == [(1, "standby"), (0, "standby")]
    (origin,), _ = [event["origins"] for event in training.job.events("inprocess.restarted")]
    assert origin.startswith(f"pid {before[1].pid} on {socket.gethostname()} ended by SIGKILL")
    assert origin.endswith(f"; pid {standby} started as a standby at the wrapped call")
    story = " ".join(training.job.stderr.split())
    assert f"pid {standby}, a standby at the wrapped call, took its place" in story
    assert "a standby (--standby) took" in story
    (log,) = training.job.log_dir.glob("*/attempt_0/1/stdout.log")
    lines = log.read_text().splitlines()
    assert lines == [
        "the script begins",
        f"rank 1 runs in {before[1].pid}",
        *[f"rank 1 runs in {standby}"] * 2,
    ]


def test_a_script_that_needs_its_rank_too_early_runs_without_standbys(start: Start) -> None:
    training = start(early="RANK")
    before = training.await_all()
    gone = training.job.await_event("standby.gone")
    assert "the script reads RANK before its wrapped call" in gone["reason"]
    assert gone["is_final"]
    training.kill(before, 1)
    training.await_all(rank_1=1)
    assert training.finish() == 0, training.job.output
    assert sources(training) == [(1, "exec")]
    assert len(training.job.events("standby.gone")) == 1
    story = " ".join(training.job.stderr.split())
    assert "no standby (--standby) from then on: StandbyError: the script reads RANK" in story
    (log,) = training.job.log_dir.glob("*/standby.log")
    assert "StandbyError" in log.read_text()


def test_a_standby_that_is_killed_is_followed_by_another_one(start: Start) -> None:
    training = start()
    before = training.await_all()
    standby = standby_of(training)
    os.kill(standby, signal.SIGKILL)
    assert training.job.await_event("standby.gone")["pid"] == standby
    training.kill(before, 0)
    training.await_all(rank_0=1)
    next_standby = standby_of(training, standby)
    assert training.finish() == 0, training.job.output
    assert sources(training) == [(0, "exec")]
    wait_until(lambda: not alive(next_standby), "it has ended with the job")


def test_the_standbys_of_an_attempt_end_with_it(start: Start) -> None:
    training = start()
    training.await_all()
    standby = standby_of(training)
    os.kill(training.job.await_event("attempt.started")["pids"]["0"], signal.SIGSTOP)
    training.job.signal(signal.SIGTERM)
    assert training.end() == 143, training.job.output
    assert not alive(standby)
