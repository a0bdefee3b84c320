"""A job's exit code agrees with its results, for every way in which one rank ends or hangs.

Three ranks make two calls of a wrapped function. One of them ends or hangs at one place. Every
such job must end within the time that the documentation promises (`bound`). It may end with 0 only
if each worker that ended with 0 has its results. A rank that ends otherwise may be lost, and the
others may still succeed.

`TOGETHER` are jobs in which several ranks end or hang, each at another place. With them and with
`FAST`, the tests that are not `thorough` reach every place and every manner.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

SCRIPT = """
import json
import threading
from datetime import timedelta
from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.completion import Completion
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.initialize import Initialize
from regrow.inprocess.rank_assignment import ShiftRanks
from regrow.inprocess.rank_filter import MaxActiveWorldSize
from regrow.inprocess.store import TCPStore
from regrow.inprocess.terminate import Terminate

ACTS, FAULT_ON = json.loads(os.environ["ACTS"]), int(os.environ["FAULT_ON"])
TIMEOUTS = json.loads(os.environ["TIMEOUTS"])
mine = [act for act in ACTS if act[0] == RANK]
after_a_fault, results = [], []

class Leaves(BaseException):
    pass

def is_due(place):
    return any(act[1] == place for act in mine)

def act(place):
    if not is_due(place):
        return
    if place == "completion" and not results:  # of the last call, after which no rank waits
        return
    found = next(act for act in mine if act[1] == place)
    mine.remove(found)
    report("acts", time.monotonic())
    match found[2]:
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

def store(**arguments):
    act("store factory")
    return TCPStore(**arguments)

def before_or_after_a_fault(place):
    return place if after_a_fault else f"first {place}"

class Start(Initialize):
    def __call__(self, state):
        after_a_fault.clear()
        act("later initialize" if state.iteration else "initialize")
        if results:
            act("second initialize")
        return state

class End(Abort):
    def __call__(self, state):
        act("abort")
        return state

class CleanUp(Finalize):
    def __call__(self, state):
        after_a_fault.append(True)
        act("finalize")
        return state

class Check(HealthCheck):
    def __call__(self, state):
        act(before_or_after_a_fault("health check"))
        return state

class Assignment(ShiftRanks):
    def __call__(self, ctx):
        act(before_or_after_a_fault("rank assignment"))
        return super().__call__(ctx)

class Filter(MaxActiveWorldSize):
    def __call__(self, state):
        act(before_or_after_a_fault("rank filter"))
        return super().__call__(state)

class Completed(Completion):
    def __call__(self, state):
        act("completion")
        return state

class Leave(Terminate):
    def __call__(self, state):
        act("terminate")
        return state

@Wrapper(
    store_factory=store,
    initialize=Start(),
    abort=End(),
    finalize=CleanUp(),
    health_check=Check(),
    rank_assignment=Assignment(),
    rank_filter=Filter(),
    completion=Completed(),
    terminate=Leave(),
    **{name: timedelta(seconds=seconds) for name, seconds in TIMEOUTS.items()},
)
def train(call: CallWrapper):
    act("function")
    if FAULT_ON >= 0 and call.iteration == 0 and not results:
        if RANK == FAULT_ON:
            raise ValueError("the fault")
        while True:
            time.sleep(0.02)
    if is_due("terminate"):
        raise Leaves
    if call.iteration == 0 and not results and any(act[1] == "waiting" for act in ACTS):
        if is_due("waiting"):
            threading.Timer(0.2, act, ["waiting"]).start()
        else:
            time.sleep(0.5)
    return True

report("starts", time.monotonic())
act("before")
results.append(train())
act("between")
results.append(train())
if results == [True, True]:
    report("result")
act("after")
"""

TIMEOUTS = {
    "soft_timeout": 1.8,
    "hard_timeout": 3.8,
    "heartbeat_timeout": 7.0,
    "barrier_timeout": 8.0,
    "completion_timeout": 6.0,
    "last_call_wait": 0.2,
    "termination_grace_time": 0.2,
    "monitor_thread_interval": 0.2,
    "monitor_process_interval": 0.2,
    "progress_watchdog_interval": 0.2,
}
"""Durations of the wrapper in seconds, so far apart that a wrong one exceeds the bound of a job."""

OUTSIDE = ("before", "store factory", "between")
"""Places before a call, at which no rank takes part in it."""
IN_FUNCTION = (
    "function",
    "initialize",
    "later initialize",
    "second initialize",
    "first health check",
)
"""Places from which a rank can be interrupted: the function and the plug-ins just before it."""
OWN_PART = (
    "first rank assignment",
    "first rank filter",
    "finalize",
    "health check",
    "rank assignment",
    "rank filter",
)
"""Places between two calls of the function, at which a rank does something by itself."""
PLACES = (*OUTSIDE, *IN_FUNCTION, "waiting", *OWN_PART, "abort", "completion", "terminate", "after")
AFTER_A_FAULT = {
    "later initialize",
    "finalize",
    "health check",
    "rank assignment",
    "rank filter",
    "abort",
}
WITH_0 = {"exit 0", "_exit 0"}
HANGS = {"stop", "hang", "loop"}
HOWS = ("return", "exit 0", "exit 1", "_exit 0", "raise", "signal", "stop", "hang", "loop")
"""Manners. A script that ends without a call of the function is an "exit 0" before the call."""

FAILS = {
    "before": {*HOWS} - {"return"},
    "store factory": {*HOWS} - {"return"},
    "between": {*HOWS} - {"return"},
    "after": {*HOWS} - {"return", *WITH_0},
    "completion": {*HOWS} - {"return", "raise"},
    "abort": {"_exit 0"},
    "waiting": {"_exit 0"},
    # The others wait until `barrier_timeout` for a rank that makes progress and never arrives.
    **{place: {*WITH_0, "loop"} for place in OWN_PART},
}
"""By place: ends and hangs of one rank that fail the job; elsewhere only an exit with 0 does."""

IN_A_THREAD = {"_exit 0", "signal", "stop"}
"""Ends and hangs that another thread can cause while the main thread waits."""


class Act(NamedTuple):
    """What a rank does once."""

    rank: int
    place: str
    how: str

    @property
    def fails(self) -> bool:
        """Whether the job must not end with 0."""
        return self.how in FAILS.get(self.place, WITH_0)


FAST = {
    ("before", "raise"),
    ("store factory", "exit 1"),
    ("between", "stop"),
    ("after", "exit 1"),
    ("function", "_exit 0"),
    ("first rank assignment", "exit 0"),
    ("completion", "signal"),
    ("waiting", "signal"),
}
TOGETHER = {
    "before the function": (
        Act(1, "first rank assignment", "exit 1"),
        Act(2, "first rank filter", "raise"),
        Act(3, "first health check", "raise"),
        Act(0, "initialize", "hang"),
        Act(0, "second initialize", "raise"),
        Act(0, "completion", "raise"),
        Act(3, "terminate", "return"),
    ),
    "in one restart": (
        Act(1, "finalize", "exit 1"),
        Act(2, "health check", "raise"),
        Act(3, "rank assignment", "signal"),
        Act(4, "rank filter", "stop"),
        Act(0, "abort", "raise"),
        Act(0, "later initialize", "loop"),
        Act(5, "second initialize", "return"),
    ),
}
"""Jobs of several acts, after which the last ranks still succeed."""


def bound(act: Act, promised: Mapping[str, float]) -> float | None:
    """Return how many seconds after an act the job has to end, as documented; None: no promise.

    What the other ranks still compute takes almost no time. The terms are these; the guide to
    in-process restarts explains the time-outs.

    - failure: an attempt has failed. The agent acts on the end of a worker, and stops the other
      workers. It prints and records both times.
    - restart: the other ranks restart without a rank that ended, or with a rank that raised. They
      wait for each other's faults, at most for `last_call_wait`.
    - missing: the ranks wait `barrier_timeout` for a rank that never comes. They then leave with an
      error.
    - interrupted: a rank without progress in the function restarts after `soft_timeout`. The rank
      looks for progress at intervals.
    - ended: a rank that cannot restart is ended after `hard_timeout` without progress, or in the
      abort or in `terminate`. It may take `termination_grace_time` more.
    - late: a rank that makes progress and is not done restarts `completion_timeout` after the first
      one was done. `completion` itself may take as long, or `hard_timeout` if that is longer.

    Args:
        act: what a rank does.
        promised: bounds of the agent, from its event `regrow.job.started`.
    """
    seconds, (_, place, how) = TIMEOUTS.__getitem__, act
    interval, grace = seconds("progress_watchdog_interval"), seconds("termination_grace_time")
    failure = promised["a dead worker is acted on"] + promised["workers that are stopped are gone"]
    restart = seconds("last_call_wait")
    missing = seconds("barrier_timeout") + failure
    interrupted = seconds("soft_timeout") + interval + restart
    ended = seconds("hard_timeout") + interval + grace + (failure if act.fails else restart)
    late = seconds("completion_timeout") + restart
    if how == "return":
        return 0.0
    if place in OUTSIDE:
        return missing if how in WITH_0 | HANGS else failure
    if how not in HANGS:
        return failure if act.fails else restart
    if place == "after":
        return None
    if place == "completion" and how == "loop":
        return max(seconds("completion_timeout"), seconds("hard_timeout")) + grace + failure
    if place in IN_FUNCTION and how != "stop":
        return interrupted if how == "hang" else late
    if place in OWN_PART and how == "loop":
        return missing
    return ended


def combinations() -> list[Any]:
    found = []
    for place, how in product(PLACES, HOWS):
        if place != "waiting" or how in IN_A_THREAD:
            marks = [] if (place, how) in FAST else [pytest.mark.thorough]
            found.append(pytest.param([Act(1, place, how)], id=f"{place}-{how}", marks=marks))
    return found


def slack(start: float) -> float:
    """Return how many seconds a job may take beyond its bound, for what is not a wait.

    These are the restart, the second call, and the ends of the processes. They take 0.2 to 0.4 s on
    a quiet machine of 2 cores, where a job starts within 0.45 s. With 7 test processes at once they
    took up to 1.5 s, and the start up to 3 s. In no job did they take 0.2 s longer than its start.

    Args:
        start: seconds from the command to the start of the last worker's script, in the same job.
    """
    return start + 1.0


def test_each_place_and_each_manner_is_reached_without_the_thorough_tests() -> None:
    reached = FAST | {(act.place, act.how) for acts in TOGETHER.values() for act in acts}
    assert {place for place, _ in reached} == {*PLACES}
    assert {how for _, how in reached} == {*HOWS}


@pytest.mark.parametrize(
    ("act", "other"),
    [
        (Act(1, "function", "raise"), "soft_timeout"),
        (Act(1, "function", "exit 0"), "hard_timeout"),
        (Act(1, "function", "hang"), "hard_timeout"),
        (Act(1, "function", "stop"), "completion_timeout"),
        (Act(1, "function", "loop"), "barrier_timeout"),
        (Act(1, "finalize", "hang"), "completion_timeout"),
        (Act(1, "terminate", "loop"), "completion_timeout"),
    ],
)
def test_a_job_that_waits_for_another_time_out_exceeds_its_bound(act: Act, other: str) -> None:
    promised = {"a dead worker is acted on": 0.1, "workers that are stopped are gone": 1.1}
    within = bound(act, promised)
    assert within is not None
    assert within + slack(0.45) < TIMEOUTS[other]


@pytest.mark.parametrize(
    "acts", [*combinations(), *(pytest.param(acts, id=name) for name, acts in TOGETHER.items())]
)
def test_a_job_ends_with_0_only_if_each_worker_that_ended_with_0_has_its_results(
    launch: Launch, acts: Sequence[Act]
) -> None:
    ranks = {0, 1, 2} | {act.rank for act in acts}
    after_a_fault = any(act.place in AFTER_A_FAULT for act in acts)
    launched = time.monotonic()
    job = launch(
        SCRIPT,
        "--max-restarts=0",
        "--shutdown-timeout=1",
        nproc=len(ranks),
        env={
            "ACTS": json.dumps(acts),
            "FAULT_ON": str(max(ranks) if after_a_fault else -1),
            "TIMEOUTS": json.dumps(TIMEOUTS),
        },
    )
    terminated, reports = 0.0, list[list[str]]()
    if any(act.place == "after" and act.how in HANGS for act in acts):  # nothing else ends it
        reports = job.reports(2 * len(ranks) + 1)
        terminated = time.monotonic()
        job.signal(signal.SIGTERM)
    code = job.finish()
    ended = time.monotonic()

    reports += job.unread_reports()
    results = {int(words[0]) for words in reports if words[2] == "result"}
    lost = {event["rank"] for event in job.events("inprocess.lost") if event["exitcode"] != 0}
    if terminated:
        assert code == 128 + signal.SIGTERM, job.output
        assert results == ranks, job.output
    elif code == 0:
        assert results | lost == ranks, job.output
        assert results, job.output
    assert (code != 0) == any(act.fails for act in acts), job.output

    starts = [float(words[3]) for words in reports if words[2] == "starts"]
    acted = [float(words[3]) for words in reports if words[2] == "acts"]
    assert len(acted) == len(acts), job.output
    promised = job.events("job.started")[0]["bounds"]
    bounds = [bound(act, promised) for act in acts]
    within = sum(
        promised["workers that are stopped are gone"] if each is None else each for each in bounds
    )
    # The start of the processes is not part of the bound. One act may come after the other.
    began = max(terminated, acted[0], *starts)
    assert ended - began <= within + slack(max(starts) - launched), (
        f"{ended - began:.2f} s, not {within:.2f} s; {job.output}"
    )
