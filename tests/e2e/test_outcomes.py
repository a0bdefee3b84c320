"""A job's exit code agrees with its results, for every way in which one rank ends or hangs.

Three ranks make two calls of a wrapped function. One of them ends or hangs at one place. Every
such job must end, and it may end with 0 only if each worker that ended with 0 has its results. A
rank that ends otherwise may be lost, and the others may still succeed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

SCRIPT = """
import threading
from datetime import timedelta
from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.completion import Completion
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.initialize import Initialize
from regrow.inprocess.rank_assignment import ShiftRanks
from regrow.inprocess.terminate import Terminate

PLACE, HOW = os.environ["PLACE"], os.environ["HOW"]
AFTER_A_FAULT = ("abort", "finalize", "health check", "rank assignment")
met, results = [], []

class Leaves(BaseException):
    pass

def act(place):
    if RANK != 1 or place != PLACE or met:
        return
    if place == "completion" and not results:  # of the last call, after which no rank waits
        return
    met.append(place)
    report("acts")
    match HOW:
        case "exit 0":
            sys.exit()
        case "exit 1":
            sys.exit(1)
        case "_exit 0":
            os._exit(0)
        case "raise":
            raise ValueError("a mistake")
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case "loop":
            while True:
                time.sleep(0.02)

def plugin(base, place):
    def call(self, state):
        act(f"first {place}" if place == "health check" and not failed else place)
        return state
    return type("Acting", (base,), {"__call__": call})()

class Assignment(ShiftRanks):
    def __call__(self, ctx):
        act("rank assignment" if failed else "first rank assignment")
        return super().__call__(ctx)

failed = []

def seconds(number):
    return timedelta(seconds=number)

@Wrapper(
    initialize=plugin(Initialize, "initialize"),
    abort=plugin(Abort, "abort"),
    finalize=plugin(Finalize, "finalize"),
    health_check=plugin(HealthCheck, "health check"),
    rank_assignment=Assignment(),
    completion=plugin(Completion, "completion"),
    terminate=plugin(Terminate, "terminate"),
    soft_timeout=seconds(1.5),
    hard_timeout=seconds(3),
    heartbeat_timeout=seconds(5),
    barrier_timeout=seconds(6),
    completion_timeout=seconds(3),
    last_call_wait=seconds(0.5),
    termination_grace_time=seconds(0.5),
    monitor_thread_interval=seconds(0.3),
    monitor_process_interval=seconds(0.3),
    progress_watchdog_interval=seconds(0.3),
)
def train(call: CallWrapper):
    act("function")
    if PLACE in AFTER_A_FAULT and call.iteration == 0 and not failed:
        failed.append(True)
        if RANK == 2:
            raise ValueError("the fault")
        time.sleep(60)
    if PLACE == "terminate" and RANK == 1 and not met:
        raise Leaves
    if PLACE == "waiting" and call.iteration == 0 and not met:
        if RANK != 1:
            time.sleep(0.5)
        threading.Timer(0.2, act, [PLACE]).start()
    return True

act("before")
results.append(train())
act("between")
results.append(train())
if results == [True, True]:
    report("result")
act("after")
"""

PLUGINS = (
    "initialize",
    "first health check",
    "first rank assignment",
    "abort",
    "finalize",
    "health check",
    "rank assignment",
    "completion",
    "terminate",
)
PLACES = ("before", "function", "waiting", "between", "after", *PLUGINS)
ENDS = ("exit 0", "exit 1", "_exit 0", "raise", "signal")
HOWS = ("return", *ENDS, "stop", "hang", "loop")

WITH_0 = {"exit 0", "_exit 0"}
FAILS = {
    "before": {*HOWS} - {"return"},
    "between": {*HOWS} - {"return"},
    "after": {*HOWS} - {"return", *WITH_0},
    "completion": {*HOWS} - {"return", "raise"},
    "abort": {"_exit 0"},
    "waiting": {"_exit 0"},
    # The others wait until `barrier_timeout` for a rank that makes progress and never arrives.
    "first rank assignment": {*WITH_0, "loop"},
    "finalize": {*WITH_0, "loop"},
    "health check": {*WITH_0, "loop"},
    "rank assignment": {*WITH_0, "loop"},
}
"""By place: ends and hangs of one rank that fail the job; elsewhere only an exit with 0 does."""

FAST = {("function", "_exit 0"), ("completion", "signal")}
IN_A_THREAD = {"_exit 0", "signal", "stop"}
"""Ends and hangs that another thread can cause while the main thread waits."""


def combinations() -> list[Any]:
    found = []
    for place, how in product(PLACES, HOWS):
        if place != "waiting" or how in IN_A_THREAD:
            marks = [] if (place, how) in FAST else [pytest.mark.thorough]
            found.append(pytest.param(place, how, marks=marks))
    return found


@pytest.mark.parametrize(("place", "how"), combinations())
def test_a_job_ends_with_0_only_if_each_worker_that_ended_with_0_has_its_results(
    launch: Launch, place: str, how: str
) -> None:
    job = launch(
        SCRIPT,
        "--nproc-per-node=3",
        "--max-restarts=0",
        "--shutdown-timeout=1",
        env={"PLACE": place, "HOW": how},
    )
    if place == "after" and how in ("stop", "hang", "loop"):  # no bound is printed for these
        results = [words[2] for words in job.reports(4)]
        assert sorted(results) == ["acts", "result", "result", "result"]
        job.signal(signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM, job.output
        return
    code = job.finish()
    reports = job.unread_reports()
    with_results = {int(rank) for rank, _, word in reports if word == "result"}
    lost = {event["rank"] for event in job.events("inprocess.lost") if event["exitcode"] != 0}
    if code == 0:
        assert with_results | lost == {0, 1, 2}, job.output
        assert with_results, job.output
    assert (code != 0) == (how in FAILS.get(place, WITH_0)), job.output
    assert how == "return" or ["1", "0", "acts"] in reports, job.output
