"""Ranks that call a wrapped function, as processes without torch, in the cases named below.

As a script it loads the package once. Then it reads one line of JSON per case,
`[name, number of ranks]`, and forks the ranks. It answers with one object per rank. `calls` has
iteration, RANK and WORLD_SIZE of each call of the function; it is missing if a signal ends the
rank. The other keys are `value`, or `raised` with its `text` and `cause`, or `signal`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from regrow.inprocess.monitor_thread import RankShouldRestart

from regrow._progress import INCARNATION_ENV
from regrow.inprocess import CallWrapper, Compose, FrozenState, State, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.call import call as _call
from regrow.inprocess.call import restart
from regrow.inprocess.call.follower import IterationFollower
from regrow.inprocess.completion import Completion
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.group.group_messages import Faults
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.health_check import FaultCounter, HealthCheck
from regrow.inprocess.initialize import Initialize, RetryController
from regrow.inprocess.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
)
from regrow.inprocess.store import StoreMixin
from regrow.inprocess.terminate import Terminate
from regrow.inprocess.watchdog.rank_progress import SoftWatch
from regrow.store import (
    SERVICES,
    STORE_ENV,
    STORE_TOKEN_ENV,
    PrefixStore,
    make_token,
    start_server,
    worker_store,
)
from regrow.utils import repr_of, str_of

LOADED = (IterationFollower, SoftWatch, ServiceLink)
"""Modules that the wrapper loads at its call; they are loaded once, before the fork."""
MANY = 100_000
"""A number of objects; more than a process without torch has."""
LONG = 60.0
"""Duration in seconds of a call that the wrapper must end; the test kills the ranks before."""


CALLED = mmap.mmap(-1, 64)
"""Number of calls of the function by each rank; all ranks of a case share it."""


class Played(Exception):
    """An exception that a rank raises on purpose."""


class Rank:
    """One rank in a case, as the function and plug-ins see it."""

    def __init__(self, rank: int) -> None:
        self.initial = rank
        self.calls: list[tuple[int, str, str]] = []
        self.seen: list[Any] = []

    def called(self, call: CallWrapper) -> int:
        """Record a call of the function; return its iteration when all ranks are in that call.

        A rank that is notified of a fault before the call skips the call.
        """
        self.calls.append((call.iteration, os.environ["RANK"], os.environ["WORLD_SIZE"]))
        CALLED[self.initial] = call.iteration + 1
        while sum(calls > call.iteration for calls in CALLED[:]) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.001)
        return call.iteration

    def wrapped(
        self, first: Callable[[CallWrapper], Any], **arguments: Any
    ) -> Callable[[], int | None]:
        """Return a function that runs `first` in its first call and returns its iteration later."""

        @Wrapper(**arguments)
        def function(call: CallWrapper) -> int:
            if self.called(call) == 0:
                first(call)
            return call.iteration

        return function  # type: ignore[return-value] # the wrapper fills in the argument

    def failing(self, rank: int, error: BaseException, **arguments: Any) -> int | None:
        """Let one rank raise in the first call, while the others compute."""

        def first(call: CallWrapper) -> None:
            if self.initial == rank:
                raise error
            compute()

        return self.wrapped(first, **arguments)()


def compute(seconds: float = LONG) -> None:
    """Execute Python code repeatedly, with little computing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.002)


def count_up() -> None:
    """Compute without a pause."""
    while True:
        sum(range(100))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plugin(base: type, act: Callable[..., Any]) -> Any:
    """Return a plug-in of a base class that runs `act` and passes the state on."""

    def call(self: object, state: FrozenState) -> FrozenState:
        act(state)
        return state

    return type(f"Played{base.__name__}", (base,), {"__call__": call})()


def on(rank: int, act: Callable[[], Any], iteration: int = 0) -> Callable[[FrozenState], None]:
    """Return a function that runs `act` on one initial rank in one iteration only."""

    def maybe(state: FrozenState) -> None:
        if (state.initial_rank, state.iteration) == (rank, iteration):
            act()

    return maybe


def throw(error: BaseException) -> Callable[..., Any]:
    def act(*_: object) -> None:
        raise error

    return act


# --------------------------------------------------------------------------- the cases


def completes(me: Rank) -> Any:
    return me.wrapped(lambda _: None)()


def completes_its_second_call(me: Rank) -> Any:
    """Rank 1 replaced another process in the first call, which is over."""
    if me.initial == 1:
        os.environ[INCARNATION_ENV] = "1"
    return me.wrapped(lambda call: me.seen.append([call.joined, list(call.replaced)]))()


def raises(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            raise Played("a mistake")
        count_up()

    return me.wrapped(first)()


def is_killed(me: Rank) -> Any:
    return me.wrapped(lambda _: die() if me.initial == 0 else compute())()


def exits(me: Rank) -> Any:
    return me.failing(1, SystemExit(3))


def gets_sigint(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 0:
            signal.raise_signal(signal.SIGINT)
        time.sleep(LONG)

    return me.wrapped(first)()


def gets_sigint_in_a_pause(me: Rank) -> Any:
    """Use a store that does not report a rank that left an iteration after its end."""

    def interrupt(seconds: float) -> None:
        if me.initial == 0:
            signal.raise_signal(signal.SIGINT)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupt)
    with mock.patch.object(restart, "FREE", 0), mock.patch.object(_call, "time", clock):
        return meets_in_any_store(me)


def fails_in_finalize(me: Rank) -> Any:
    return me.failing(
        0, Played("the root"), finalize=plugin(Finalize, on(1, throw(Played("untidy"))))
    )


def dies_in_finalize(me: Rank) -> Any:
    return me.failing(0, Played("the root"), finalize=plugin(Finalize, on(1, die)))


def fails_in_initialize(me: Rank) -> Any:
    return me.wrapped(
        lambda _: compute(), initialize=plugin(Initialize, on(1, throw(Played("not yet"))))
    )()


def exits_in_initialize(me: Rank) -> Any:
    return me.wrapped(
        lambda _: compute(), initialize=plugin(Initialize, on(1, throw(SystemExit(4))))
    )()


def is_unhealthy_after_a_fault(me: Rank) -> Any:
    counter = FaultCounter(max_rank_faults=0)
    return me.failing(1, Played("the last straw"), health_check=counter)


def is_unhealthy_at_first(me: Rank) -> Any:
    sick = [Played("cold")]

    def check() -> None:
        if sick:
            raise sick.pop()

    return me.wrapped(lambda _: compute(), health_check=plugin(HealthCheck, on(1, check)))()


def all_are_unhealthy(me: Rank) -> Any:
    def check(state: FrozenState) -> None:
        if me.calls:
            raise Played("sick")

    return me.failing(2, Played("the root"), health_check=plugin(HealthCheck, check))


def fails_in_abort(me: Rank) -> Any:
    return me.failing(0, Played("the root"), abort=plugin(Abort, on(1, throw(Played("stuck")))))


def two_at_once(me: Rank) -> Any:
    counter = FaultCounter()

    def first(call: CallWrapper) -> None:
        if me.initial < 2:
            raise Played("both")
        compute()

    value = me.wrapped(first, health_check=counter)()
    me.seen.append(counter.faults_count)
    return value


def fails_when_another_is_done(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            # Rank 0 has completed by then; the server reports this only to ranks in reserve.
            raise Played("late")

    return me.wrapped(first)()


def dies_when_the_others_are_done(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            time.sleep(0.1)
            die()

    return me.wrapped(first)()


def fails_when_the_call_is_over(me: Rank) -> Any:
    """Raise like a signal handler that runs while the rank waits for the end."""
    real = ServiceLink.confirm

    def confirm(link: ServiceLink, iteration: int) -> Faults | None:
        ended = real(link, iteration)
        if me.initial == 1:
            raise Played("too late")
        return ended

    with mock.patch.object(ServiceLink, "confirm", confirm):
        return me.wrapped(lambda _: None)()


def is_never_done(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            compute()

    return me.wrapped(first, completion_timeout=timedelta(seconds=0.5))()


def fails_while_restarting(me: Rank) -> Any:
    class Fragile(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            if me.initial == 2 and me.calls:
                raise Played("cannot count")
            return ctx

    return me.failing(0, Played("the root"), rank_assignment=Compose(ShiftRanks(), Fragile()))


def is_discarded(me: Rank) -> Any:
    class Pick(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            if not me.calls:
                return ctx
            if ctx.state.rank == 2:
                raise RankDiscarded("no place")
            ctx.state = replace(ctx.state, world_size=2)
            return ctx

    return me.failing(0, Played("the root"), rank_assignment=Compose(ActivateAllRanks(), Pick()))


def gives_up_after_three(me: Rank) -> Any:
    @Wrapper(initialize=RetryController(max_iterations=3))
    def function(call: CallWrapper) -> None:
        me.called(call)
        if me.initial == 1:
            raise Played("again")
        compute()

    return function()  # type: ignore[call-arg]


def has_a_reserve(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 0:
            die()
        compute()

    assignment = Compose(MaxActiveWorldSize(2), ShiftRanks())
    function = me.wrapped(first, rank_assignment=assignment)
    return function()


def is_in_a_section(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        with worker_store() as store:
            if me.initial == 0:
                store.wait(["inside 1", "inside 2"], LONG)
                raise Played("the root")
            with call.atomic():
                store.set(f"inside {me.initial}", "")
                compute(0.3)
                me.seen.append("whole")
            compute()

    return me.wrapped(first)()


SOFT = {
    "soft_timeout": timedelta(seconds=0.4),
    "progress_watchdog_interval": timedelta(seconds=0.02),
    "monitor_thread_interval": timedelta(seconds=0.02),
    "monitor_process_interval": timedelta(seconds=0.02),
}


def sleeps_too_long(me: Rank) -> Any:
    return me.wrapped(lambda _: time.sleep(LONG) if me.initial == 1 else compute(), **SOFT)()


def stops_pinging(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        call.ping()
        while me.initial == 0:
            call.ping()
            time.sleep(0.01)
        compute()

    return me.wrapped(first, **SOFT)()


def takes_its_time(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        call.ping()
        with call.disable_hang_protection():
            time.sleep(0.6)

    return me.wrapped(first, **SOFT)()


def uses_both_generations(me: Rank) -> Any:
    class OldFinalize(Finalize):
        def __call__(self, state: Any, train_ex: Any = None) -> Any:
            me.seen.append(["old finalize", repr(train_ex)])
            return state, train_ex

    class OldAssignment(RankAssignment):
        def __call__(self, state: State, terminated: set[int]) -> Any:  # type: ignore[override]
            me.seen.append(["old assignment", sorted(terminated)])
            return state, terminated

    today = plugin(Finalize, lambda state: me.seen.append(["finalize", repr(state.fn_exception)]))
    return me.failing(
        0,
        Played("x"),
        finalize=Compose(today, OldFinalize()),
        rank_assignment=Compose(ShiftRanks(), OldAssignment()),
    )


def ends(me: Rank) -> Any:
    def note(name: str) -> Callable[[FrozenState], None]:
        return lambda state: me.seen.append([name, state.mode.name])

    return me.failing(
        1,
        SystemExit(1),
        completion=plugin(Completion, note("completion")),
        terminate=plugin(Terminate, note("terminate")),
    )


def fails_at_its_end(me: Rank) -> Any:
    return me.failing(
        1,
        SystemExit(3),
        completion=plugin(Completion, throw(Played("of what is done"))),
        terminate=plugin(Terminate, throw(Played("of the rank"))),
    )


def swallows(me: Rank) -> Any:
    """Run user code that catches everything, and a function that cleans up."""

    def first(call: CallWrapper) -> None:
        if me.initial == 0:
            raise Played("the root")
        try:
            compute()
        except BaseException as error:  # noqa: BLE001 - as it should not be done
            me.seen.append(isinstance(error, RankShouldRestart))
        time.sleep(LONG)

    return me.wrapped(first)()


def meets_in_any_store(me: Rank) -> Any:
    class Foreign(PrefixStore, StoreMixin):
        """A store class from outside the package."""

    return me.failing(
        1, Played("a mistake"), store_factory=lambda: Foreign("foreign", worker_store())
    )


def writes_into_the_store(me: Rank) -> Any:
    class Writes(ShiftRanks):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            assert ctx.store is not None
            ctx.store.set(f"rank {me.initial}", b"")
            return super().__call__(ctx)

    @Wrapper(rank_assignment=Writes())
    def function(call: CallWrapper) -> None:
        if call.iteration < 2:
            raise Played
        with closing(worker_store()) as store:
            if store.add("arrived", 1) == int(os.environ["WORLD_SIZE"]):
                store.set("keys", str(store.delete_prefix("inprocess/")))
            store.wait(["keys"], LONG)
            me.seen.append(int(store.get("keys")))

    function()  # type: ignore[call-arg]


def calls_within_a_call(me: Rank) -> Any:
    """Call another wrapped function in each iteration; interrupted calls do not count."""
    inner = me.wrapped(lambda _: None)

    @Wrapper()
    def outer(call: CallWrapper) -> int | None:
        me.called(call)
        return inner()

    return outer()  # type: ignore[call-arg]


def calls_one_after_the_other(me: Rank) -> Any:
    first = me.failing(1, Played("x"))
    return [first, me.wrapped(lambda _: None)()]


def in_another_thread(me: Rank) -> Any:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(me.failing(1, Played("x"))))
    thread.start()
    thread.join()
    return values


def loses_its_store(me: Rank) -> Any:
    token = make_token()
    server = start_server(token=token, on_demand=SERVICES)
    os.environ.update({STORE_ENV: server.endpoint, STORE_TOKEN_ENV: token.decode()})

    def first(call: CallWrapper) -> None:
        os.kill(server.pid, signal.SIGKILL)
        time.sleep(LONG)

    return me.wrapped(first)()


def forks(me: Rank) -> Any:
    """Fork a child that leaves the function by an exception, as a library's worker may."""

    def first(call: CallWrapper) -> None:
        parent = os.getpid()
        if os.fork() == 0:
            raise Played("in the child")
        os.wait()
        me.seen.append(os.getpid() == parent)

    parent = os.getpid()
    try:
        return me.wrapped(first)()
    finally:
        if os.getpid() != parent:
            os._exit(0)


class Big:
    """An object in a function, in a reference cycle, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def leaves_something_behind(me: Rank) -> Any:
    left: list[weakref.ref[Big]] = []

    @Wrapper()
    def function(call: CallWrapper) -> None:
        me.seen.append([reference() is None for reference in left])
        big = Big()
        left.append(weakref.ref(big))
        me.called(call)
        if call.iteration < 2:
            if me.initial == call.iteration:
                raise Played("x")
            time.sleep(LONG)

    gc.disable()
    return function()  # type: ignore[call-arg]


def loads_much_in_the_function(me: Rank) -> Any:
    """Keep many objects of the first iteration; record what the collector scans later."""
    kept: list[list[None]] = []
    left: list[weakref.ref[Big]] = []

    @Wrapper()
    def function(call: CallWrapper) -> None:
        me.seen.append([len(gc.get_objects()) > MANY, [each() is None for each in left]])
        if not kept:
            kept.extend([] for _ in range(MANY))
        left.append(weakref.ref(Big()))
        if call.iteration < 3:
            raise Played("x")

    function()  # type: ignore[call-arg]
    return gc.get_freeze_count()


def calls_again_and_again(me: Rank) -> Any:
    for number in range(6):
        me.wrapped(lambda _: None)()
        if number in (0, 5):
            me.seen.append([len(os.listdir("/proc/self/fd")), threading.active_count()])


def restarts_twenty_times(me: Rank) -> Any:
    return restarts(me, 20)


def restarts_a_thousand_times(me: Rank) -> Any:
    with mock.patch.object(restart, "FREE", 1000):  # otherwise it takes a thousand seconds
        return restarts(me, 1000)


def restarts_more_often_than_is_free(me: Rank) -> Any:
    """Raise at once, more often than restarts are free of a pause; record the log."""
    logged: list[str] = me.seen
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("regrow.inprocess.call.call")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with mock.patch.object(restart, "FREE", 2):

        @Wrapper()
        def function(call: CallWrapper) -> int:
            if call.iteration < 5:
                raise Played("x")
            return call.iteration

        return function()  # type: ignore[call-arg]


def restarts(me: Rank, count: int) -> Any:
    """Fail on a random rank at a random moment; record resources after ten restarts and last."""
    faulthandler.dump_traceback_later(40 + count / 5, exit=True)

    @Wrapper()
    def function(call: CallWrapper) -> int:
        # A fault may interrupt a rank before this point of its tenth call, so later calls check
        # too.
        if call.iteration == count or (call.iteration >= 10 and not me.seen):
            gc.collect()
            held = len(os.listdir("/proc/self/fd")), threading.active_count()
            me.seen.append([*held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])
        if call.iteration < count:
            chance = random.Random(call.iteration)  # the same on all ranks
            fails = chance.randrange(3) == me.initial
            computes = chance.random() < 0.5
            at = time.monotonic() + chance.choice([0.0, 1e-4, 1e-3, 1e-2])
            while not fails or time.monotonic() < at:
                if computes:
                    sum(range(100))
                else:
                    time.sleep(0.005 if fails else LONG)
            raise Played("x")
        return call.iteration

    logging.disable()
    return function()  # type: ignore[call-arg]


# -------------------------------------------------------------------------- processes


def child(case: str, act: Callable[[Rank], Any], rank: int, size: int, answer: int) -> None:
    faulthandler.dump_traceback_later(40, exit=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID=case)
    me = Rank(rank)
    result: dict[str, Any] = {}
    try:
        result["value"] = act(me)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        notes = getattr(error, "__notes__", [])
        texts = [str_of(error), *(notes if isinstance(notes, list) else [])]
        result |= {"raised": type(error).__name__, "text": "\n".join(texts)}
        result["cause"] = repr_of(error.__cause__)
    os.write(answer, json.dumps(result | {"calls": me.calls, "seen": me.seen}).encode())


def play(case: str, act: Callable[[Rank], Any], size: int) -> list[dict[str, Any]]:
    """Fork the ranks of a case; return each rank's result."""
    CALLED[:] = bytes(len(CALLED))
    started = []
    for rank in range(size):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reads)
                child(case, act, rank, size, writes)
            finally:
                os._exit(0)
        os.close(writes)
        started.append((pid, reads))
    return [fate(pid, reads) for pid, reads in started]


def fate(pid: int, reads: int) -> dict[str, Any]:
    with os.fdopen(reads, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    result: dict[str, Any] = json.loads(text) if text else {"exit": os.WEXITSTATUS(status)}
    return result


def main(cases: Mapping[str, Any]) -> None:
    """Run the cases named on standard input.

    Args:
        cases: functions with a `Rank` as argument, by name.
    """
    for line in sys.stdin:
        case, size = json.loads(line)
        print(json.dumps(play(case, cases[case], size)), flush=True)


if __name__ == "__main__":
    main(globals())
