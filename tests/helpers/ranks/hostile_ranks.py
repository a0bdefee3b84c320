"""Ranks with user code that raises at unexpected places; run like `wrapped_ranks`."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.ranks.wrapped_ranks import LONG, SOFT, Played, Rank, compute, main, plugin
from helpers.unspeakable import Classless, Sealed, Unspeakable
from regrow.inprocess import CallWrapper, Compose, FrozenState, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.completion import Completion
from regrow.inprocess.exception import BarrierTimeout, RestartAbort
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.health_check import FaultCounter, HealthCheck
from regrow.inprocess.initialize import Initialize, RetryController
from regrow.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, ShiftRanks
from regrow.store import worker_store
from regrow.workers.errors import record


class UnspeakableEnd(BaseException):
    """An `Unspeakable` that ends its rank."""

    def __repr__(self) -> str:
        raise SystemExit("the text ends the process")

    __str__ = __repr__


class ClasslessEnd(BaseException):
    """A `Classless` that ends its rank."""

    @property  # type: ignore[misc] # as it should not be
    def __class__(self) -> Any:
        raise RuntimeError("no class is known")


class Incomparable(Exception):
    """An exception that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = Exception.__hash__


class Unnotable(Exception):
    """An exception that accepts no notes."""

    __notes__ = 3  # type: ignore[assignment] # as it should not be


@dataclass(frozen=True)
class Frozen(BaseException):
    """An exception with attributes that cannot be set."""

    code: int


def raises_what_cannot_be_shown(me: Rank) -> Any:
    return me.failing(1, Unspeakable())


def raises_what_cannot_be_inspected(me: Rank) -> Any:
    return me.failing(1, Sealed())


def raises_what_has_no_class(me: Rank) -> Any:
    return me.failing(1, Classless())


def raises_what_has_a_strange_cause(me: Rank) -> Any:
    class Strange(Exception):
        __cause__ = "a text"  # type: ignore[assignment]
        __context__ = 3  # type: ignore[assignment]
        __traceback__ = "a text"  # type: ignore[assignment]

    return me.failing(1, Strange())


def fails_while_others_handle_a_ring_of_exceptions(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            raise Played("a mistake")
        error = Played("the first")
        error.__context__ = Played("the second")
        error.__context__.__context__ = error
        try:
            raise error
        except Played:
            compute()

    return me.wrapped(first, **SOFT, hard_timeout=timedelta(seconds=5))()


def raises_what_takes_too_long_to_show(me: Rank) -> Any:
    class Slow(Exception):
        def __repr__(self) -> str:
            time.sleep(LONG)
            return "late"

    return me.failing(1, Slow(), **SOFT, hard_timeout=timedelta(seconds=0.8))


def ends_by_what_cannot_be_shown(me: Rank) -> Any:
    return me.failing(1, UnspeakableEnd())


def ends_by_what_has_no_class(me: Rank) -> Any:
    return me.failing(1, ClasslessEnd())


def leaves_a_failed_group_by_what_cannot_be_shown(me: Rank) -> Any:
    def refuse(*args: Any, **more: Any) -> Any:
        raise BarrierTimeout("the group has failed")

    ServiceLink.terminated = refuse  # type: ignore[method-assign]
    return me.failing(0, UnspeakableEnd())


def raises_what_cannot_be_compared(me: Rank) -> Any:
    error = Incomparable()
    error.__cause__ = Incomparable()
    return me.failing(1, error)


def ends_by_what_is_frozen(me: Rank) -> Any:
    return me.failing(1, Frozen(3))


def fails_in_finalize_and_takes_no_note(me: Rank) -> Any:
    def tidy(state: FrozenState) -> None:
        if me.initial == 1:
            raise Unnotable

    return me.failing(0, Played("the root"), finalize=plugin(Finalize, tidy))


def counts_faults_that_cannot_be_shown(me: Rank) -> Any:
    return me.failing(1, Unspeakable(), health_check=FaultCounter(max_rank_faults=0))


def has_a_health_check_that_raises_what_cannot_be_shown(me: Rank) -> Any:
    def check(state: FrozenState) -> None:
        if me.calls and me.initial == 1:
            raise Unspeakable

    return me.failing(0, Played("the root"), health_check=plugin(HealthCheck, check))


def has_a_log_handler_that_raises(me: Rank) -> Any:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            me.seen.append(record.getMessage())
            raise OSError("the collector of logs is gone")

    logging.getLogger().addHandler(Broken())
    return me.failing(1, Played("a mistake"))


def has_a_log_handler_that_exits(me: Rank) -> Any:
    class Exits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit("an error was logged")

    def fails(_: FrozenState) -> None:
        raise Played("the abort")

    if me.initial == 0:
        logging.getLogger().addHandler(Exits(logging.ERROR))
    return me.failing(1, Played("a mistake"), abort=plugin(Abort, fails))


def has_a_plugin_that_cannot_be_shown(me: Rank) -> Any:
    class Shy(Initialize):
        def __call__(self, state: FrozenState) -> Any:
            return None

        def __repr__(self) -> str:
            raise RuntimeError("no")

    return me.wrapped(lambda _: None, initialize=Compose(Shy(), Shy()))()


def raises_a_restart(me: Rank) -> Any:
    return me.failing(1, RankShouldRestart())


def raises_a_restart_with_a_cause(me: Rank) -> Any:
    def first(call: CallWrapper) -> None:
        if me.initial == 1:
            raise RankShouldRestart from Played("the cause")
        compute()

    note = plugin(Finalize, lambda state: me.seen.append(repr(state.fn_exception)))
    return me.wrapped(first, finalize=note)()


def has_plugins_that_return_something_else(me: Rank) -> Any:
    def strange(base: type) -> Any:
        return type(f"Strange{base.__name__}", (base,), {"__call__": lambda self, state: True})()

    class Strange(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> Any:
            ShiftRanks()(ctx)
            return True

    return me.failing(
        1,
        Played("a mistake"),
        initialize=Compose(strange(Initialize), strange(Initialize)),
        health_check=strange(HealthCheck),
        finalize=strange(Finalize),
        abort=strange(Abort),
        completion=strange(Completion),
        rank_assignment=Strange(),
    )


def has_an_assignment_with_numbers_of_its_own(me: Rank) -> Any:
    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    class Own(ShiftRanks):
        def __call__(self, ctx: RankAssignmentCtx) -> Any:
            state = super().__call__(ctx).state
            state.world_size = Number(state.world_size)  # type: ignore[assignment]
            return ctx

    return me.failing(1, Played("a mistake"), rank_assignment=Own())


def names_files_of_the_monitor(me: Rank) -> Any:
    folder = Path(tempfile.mkdtemp())
    for number in range(2):
        me.wrapped(
            lambda _: None,
            monitor_process_logfile=str(folder / f"{number}.{{rank}}.log"),
            monitor_process_pidfile=str(folder / f"{number}.{{rank}}.pid"),
        )()
        me.seen += sorted(path.name for path in folder.glob(f"{number}.*") if path.read_text())
    shutil.rmtree(folder)
    return me.seen


def swallows_a_restart(me: Rank) -> Any:
    def loses(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - as it should not be done
            return

    return _listening(me, loses, lambda: compute())


def swallows_a_restart_and_returns(me: Rank) -> Any:
    def loses(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - as it should not be done
            return

    return _listening(me, loses, lambda: None)


def takes_its_time_to_clean_up(me: Rank) -> Any:
    def cleans(work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            compute(0.5)

    return _listening(me, cleans, lambda: None)


def _listening(
    me: Rank, act: Callable[[Callable[[], None]], None], after: Callable[[], None]
) -> Any:
    """Run `act` on ranks 1 and 2 when rank 0 fails; record what they log.

    Rank 0 fails when both ranks are in the work that `act` receives. So a restart always finds them
    there.
    """

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "swallowed" in record.getMessage():
                me.seen.append(record.getMessage())

    logging.getLogger().addHandler(Notes())

    case = os.environ["TORCHELASTIC_RUN_ID"]
    with worker_store() as store:

        def work() -> None:
            store.set(f"{case} {me.initial}", "")
            compute()

        def first(call: CallWrapper) -> None:
            if me.initial == 0:
                store.wait([f"{case} 1", f"{case} 2"], LONG)
                raise Played("the root")
            act(work)
            after()

        return me.wrapped(first)()


def gives_up_and_is_recorded(me: Rank) -> Any:
    return _gives_up(me, lambda: Played("again"))


def gives_up_by_what_holds_more(me: Rank) -> Any:
    return _gives_up(me, lambda: Played(me))


def _gives_up(me: Rank, error: Callable[[], Exception]) -> Any:
    """Fail on rank 1 until no restart is left; record the cause of the final error."""
    left = Path(tempfile.mkdtemp()) / "error.json"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(left)

    @record
    @Wrapper(initialize=RetryController(max_iterations=2))
    def function(call: CallWrapper) -> None:
        held = Held()
        me.called(call)
        if me.initial == 1:
            raise error()
        compute()
        del held

    gc.disable()
    try:
        function()  # type: ignore[call-arg]
    except RestartAbort as abort:
        cause = abort.__cause__
        lines = traceback.format_exception(cause)
        me.seen += [repr(cause), "raise error()" in "".join(lines)]
        me.seen.append(json.loads(left.read_text())["message"]["extraInfo"]["py_callstack"])
        del cause
        abort.__cause__ = None
    return Held.living


class Held:
    """A value in a local variable of a function; the class counts its living instances."""

    living = 0

    def __init__(self) -> None:
        Held.living += 1

    def __del__(self) -> None:
        Held.living -= 1


def logs_at(me: Rank, level: int) -> Any:
    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("restarts the function|begins iteration 1", record.getMessage()):
                me.seen.append(record.levelname)

    logging.basicConfig(level=level, handlers=[Notes()])
    return me.failing(1, Played("a mistake"))


def has_a_log_handler_for_everything(me: Rank) -> Any:
    return logs_at(me, logging.DEBUG)


def has_a_log_handler_for_information(me: Rank) -> Any:
    return logs_at(me, logging.INFO)


def has_a_log_handler_for_warnings(me: Rank) -> Any:
    return logs_at(me, logging.WARNING)


if __name__ == "__main__":
    main(globals())
