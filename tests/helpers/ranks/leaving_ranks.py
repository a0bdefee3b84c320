"""Ranks that call a wrapped function, and then look for objects that the wrapper has left.

Run like `wrapped_ranks`. Garbage collection is off, so that reference cycles are found as well.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.ranks.wrapped_ranks import Played, Rank, main, plugin
from regrow.inprocess import CallWrapper, Compose, Wrapper
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.initialize import Initialize, RetryController
from regrow.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, ShiftRanks
from regrow.inprocess.store import StoreMixin
from regrow.inprocess.terminate import Terminate
from regrow.store import (
    SERVICES,
    STORE_ENV,
    STORE_TOKEN_ENV,
    PrefixStore,
    make_token,
    start_server,
    worker_store,
)

WATCHED = ("regrow.inprocess", "regrow.store", "regrow.timer")
"""Packages with objects that must be freed with the call."""
SHELL: tuple[str, ...] = ("CallWrapper", "Atomic", "Pauses", "State", "FrozenState")
SHELL += ("Wrapper", "AbortTorchDistributed", "ShiftRanks")
SHELL += ("PrefixStore", "_Gone", "Heap", "RankAssignmentCtx")
"""Inactive objects that frames of the user's code keep while they hold an exception."""


def living() -> Counter[str]:
    """Count the objects of the wrapper's classes, the threads and the log handlers."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith(WATCHED):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    names = ["", *logging.Logger.manager.loggerDict]
    found.update(f"{name}: {h}" for name in names for h in logging.getLogger(name).handlers)
    return found


def left_by(call: Callable[[], object]) -> list[Any]:
    """Return the objects that a call has left.

    Returns:
        How the call ended; active objects while its exception is held; and objects after that.
    """
    gc.collect()
    gc.disable()
    before = living()
    held: BaseException | None = None
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - inspected while it is held
        held = error
    ended = type(held).__qualname__
    there = (living() - before).elements()
    live = [name for name in there if name.rpartition(".")[2] not in (*SHELL, ended)]
    held = None
    return [ended, sorted(live), sorted((living() - before).elements())]


def record_leftovers(me: Rank, act: Callable[..., Any]) -> Any:
    """Call twice; record what the second call leaves, because the first call loads modules."""
    left_by(act)
    me.calls.clear()
    me.seen = left_by(act)
    return len(me.calls)


def fails(text: str) -> Any:
    raise Played(text)


def ends() -> None:
    raise SystemExit(4)


def failing(me: Rank, error: type[BaseException], **arguments: Any) -> None:
    """Raise in the first call of the function; only the traceback holds the exception."""

    def first(call: CallWrapper) -> None:
        raise error("x")

    me.wrapped(first, **arguments)()


def completes(me: Rank) -> Any:
    return record_leftovers(me, lambda: me.wrapped(lambda _: None)())


def restarts(me: Rank) -> Any:
    return record_leftovers(me, lambda: failing(me, Played))


def raises_and_leaves(me: Rank) -> Any:
    return record_leftovers(me, lambda: failing(me, SystemExit))


def gives_up(me: Rank) -> Any:
    @Wrapper(initialize=RetryController(max_iterations=2))
    def function(call: CallWrapper) -> None:
        raise Played("again")

    return record_leftovers(me, function)


def ends_in_initialize(me: Rank) -> Any:
    initialize = plugin(Initialize, lambda _: ends())
    return record_leftovers(me, me.wrapped(lambda _: None, initialize=initialize))


def ends_in_finalize(me: Rank) -> Any:
    finalize = plugin(Finalize, lambda _: fails("untidy"))
    return record_leftovers(me, lambda: failing(me, Played, finalize=finalize))


def is_unhealthy(me: Rank) -> Any:
    check = plugin(HealthCheck, lambda state: me.calls and fails("sick"))
    return record_leftovers(me, lambda: failing(me, Played, health_check=check))


def fails_in_terminate(me: Rank) -> Any:
    terminate = plugin(Terminate, lambda *_: fails("of the rank"))
    return record_leftovers(me, lambda: failing(me, SystemExit, terminate=terminate))


def cannot_be_assigned(me: Rank) -> Any:
    class Broken(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            raise Played("no")

    return record_leftovers(me, me.wrapped(lambda _: None, rank_assignment=Broken()))


def cannot_be_assigned_again(me: Rank) -> Any:
    class Broken(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            if me.calls:
                raise Played("no")
            return ctx

    assignment = Compose(ShiftRanks(), Broken())
    return record_leftovers(me, lambda: failing(me, Played, rank_assignment=assignment))


def has_no_store(me: Rank) -> Any:
    return record_leftovers(
        me, me.wrapped(lambda _: None, store_factory=lambda *_: fails("no store"))
    )


def is_called_with_the_wrong_arguments(me: Rank) -> Any:
    return record_leftovers(me, lambda: me.wrapped(lambda _: None)(3, 4))  # type: ignore[call-arg]


def raises_a_restart(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        try:
            raise Played("x")
        except Played:
            raise RankShouldRestart from None

    return record_leftovers(me, me.wrapped(first))


def uses_another_store(me: Rank) -> Any:
    class Foreign(PrefixStore, StoreMixin):
        """A store class from outside the package."""

    made: list[Any] = []

    def factory() -> Any:
        made.append(worker_store())
        return Foreign("foreign", made[-1])

    def act() -> None:
        try:
            failing(me, Played, store_factory=factory)
        finally:
            while made:  # they are the user's
                made.pop().close()

    return record_leftovers(me, act)


def runs_in_another_thread(me: Rank) -> Any:
    def call() -> None:
        thread = threading.Thread(target=lambda: failing(me, Played))
        thread.start()
        thread.join()

    return record_leftovers(me, call)


def loses_its_store_and_leaves(me: Rank) -> Any:
    """Leave by an exception of its own when the loss of the store interrupts the function."""

    def first(call: CallWrapper) -> None:
        os.kill(int(os.environ["SERVER"]), signal.SIGKILL)
        with suppress(RankShouldRestart):
            time.sleep(60)
        raise SystemExit(3)

    def act() -> None:
        token = make_token()
        server = start_server(token=token, on_demand=SERVICES)
        os.environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: token.decode()}
        os.environ["SERVER"] = str(server.pid)
        del server  # otherwise the frame of this function would hold it
        me.wrapped(first)()

    return record_leftovers(me, act)


def waits_until_the_time_out(me: Rank) -> Any:
    os.environ["WORLD_SIZE"] = "2"
    short = {f"{name}_timeout": timedelta(seconds=s) for name, s in SHORT.items()}
    intervals = dict.fromkeys(INTERVALS, timedelta(seconds=0.01))
    return record_leftovers(me, me.wrapped(lambda _: None, **short, **intervals))


SHORT = {"soft": 0.1, "hard": 0.2, "heartbeat": 0.2, "barrier": 0.3}
INTERVALS = (
    *("monitor_thread_interval", "monitor_process_interval", "progress_watchdog_interval"),
    "heartbeat_interval",
)


if __name__ == "__main__":
    main(globals())
