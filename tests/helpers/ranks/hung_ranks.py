"""Ranks that hang in a wrapped function, as processes without torch, in the cases named below.

As a script it loads the package once. Then it reads one line of JSON per case,
`[name, number of ranks, folder]`, and forks the ranks. It answers with one object per rank: its
`signal` or `exit`, and the lines of its file `rank.<rank>` in the folder.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from helpers.processes import GROUP_SIGNALS
from regrow.inprocess import CallWrapper, Compose, FrozenState, Mode, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.call.follower import IterationFollower
from regrow.inprocess.completion import Completion
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.initialize import Initialize
from regrow.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, ShiftRanks
from regrow.inprocess.store import StoreMixin
from regrow.inprocess.terminate import Terminate
from regrow.store import PrefixStore, worker_store

LOADED = (IterationFollower, ServiceLink)
"""Modules that the wrapper loads at its call; they are loaded once, before the fork."""
LONG = 60.0
"""Duration in seconds of a call that the wrapper or the monitor must end."""


class Rank:
    """One rank of a case."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.initial = rank
        self.folder = folder
        self.notes = (folder / f"rank.{rank}").open("a")

    def note(self, what: object) -> None:
        print(what, file=self.notes, flush=True)

    def monitor(self) -> int:
        """Wait for this rank's monitor and return its pid."""
        text = ""
        while not text.endswith("\n"):
            with suppress(FileNotFoundError):
                text = (self.folder / f"monitor.{self.initial}.pid").read_text()
            time.sleep(0.002)
        return int(text)

    def wrapped(
        self,
        first: Callable[[CallWrapper], Any],
        grace: float = LONG,
        hard: float = 0.7,
        others: Callable[[], Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Call a function that runs `first` on rank 1 in its first call, while other ranks compute.

        With `others`, the other ranks run that function instead.
        """

        @Wrapper(
            soft_timeout=timedelta(seconds=0.6),
            hard_timeout=timedelta(seconds=hard),
            progress_watchdog_interval=timedelta(seconds=0.05),
            monitor_thread_interval=timedelta(seconds=0.05),
            monitor_process_interval=timedelta(seconds=0.05),
            termination_grace_time=timedelta(seconds=grace),
            monitor_process_logfile=str(self.folder / "monitor.{rank}.log"),
            monitor_process_pidfile=str(self.folder / "monitor.{rank}.pid"),
            **arguments,
        )
        def function(call: CallWrapper) -> None:
            self.note(f"called in a world of {os.environ['WORLD_SIZE']}")
            if call.iteration == 0:
                if self.initial == 1:
                    first(call)
                else:
                    (others or compute)()

        function()  # type: ignore[call-arg]
        self.note("returned")


def compute(seconds: float = LONG) -> None:
    """Execute Python code repeatedly, with little computing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.002)


def hold_the_lock() -> None:
    """Block in native code with the GIL held; no signal handler and no other thread can run."""
    native = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)


# --------------------------------------------------------------------------- the cases


def holds_the_lock(me: Rank) -> None:
    me.wrapped(lambda _: hold_the_lock(), hard=2.7)


def holds_the_gil_and_ignores_signals(me: Rank) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    me.wrapped(lambda _: hold_the_lock(), grace=0.1)


def stop(_: CallWrapper) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped(me: Rank) -> None:
    me.wrapped(stop, hard=2.7)


class Foreign(PrefixStore, StoreMixin):
    """A store class from outside the package."""


def foreign() -> Foreign:
    return Foreign("foreign", worker_store())


def holds_the_lock_with_a_store_of_the_users(me: Rank) -> None:
    me.wrapped(lambda _: hold_the_lock(), hard=2.7, store_factory=foreign)


class Continue(Finalize):
    """Resumes the stopped rank once the others restart."""

    def __init__(self, me: Rank) -> None:
        self.me = me

    def __call__(self, state: Any) -> Any:
        if self.me.initial == 0:
            os.kill(int((self.me.folder / "stopped").read_text()), signal.SIGCONT)
        return state


def is_stopped_until_the_others_restart(me: Rank) -> None:
    def first(call: CallWrapper) -> None:
        (me.folder / "stopped").write_text(str(os.getpid()))
        stop(call)

    me.wrapped(first, hard=LONG, finalize=Continue(me))


def get_stuck(*_: object) -> None:
    """Block in native code without the GIL; the call continues after an interrupt."""
    mutex = ctypes.create_string_buffer(64)
    native = ctypes.CDLL(None)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)


def is_stuck_where_an_exception_does_not_arrive(me: Rank) -> None:
    me.wrapped(get_stuck)


def is_stuck_between_two_calls(me: Rank, name: str, base: type) -> None:
    def call(self: Any, given: Any) -> Any:
        if me.initial == 1 and failed:
            get_stuck()
        return ShiftRanks()(given) if base is RankAssignment else given

    def fail(_: CallWrapper) -> None:
        failed.append(True)
        raise OSError

    failed: list[bool] = []
    # A longer time-out, so that the log of the first fault is written before the second.
    me.wrapped(fail, hard=1.5, **{name: type("Plugin", (base,), {"__call__": call})()})


def is_stuck_in_the_abort(me: Rank) -> None:
    is_stuck_between_two_calls(me, "abort", Abort)


def is_stuck_in_finalize(me: Rank) -> None:
    is_stuck_between_two_calls(me, "finalize", Finalize)


def is_stuck_in_the_health_check(me: Rank) -> None:
    is_stuck_between_two_calls(me, "health_check", HealthCheck)


class Stuck:
    """Garbage with a finalizer that never returns."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        get_stuck()


def is_stuck_in_a_finalizer(me: Rank) -> None:
    def fail(_: CallWrapper) -> None:
        gc.disable()
        Stuck()
        raise OSError

    me.wrapped(fail, hard=1.5)


def is_stuck_where_ranks_are_assigned(me: Rank) -> None:
    is_stuck_between_two_calls(me, "rank_assignment", RankAssignment)


def is_stuck_as_it_leaves(me: Rank) -> None:
    def leave(_: CallWrapper) -> None:
        raise SystemExit

    me.wrapped(leave, terminate=type("Plugin", (Terminate,), {"__call__": get_stuck})())


def stop_soon() -> None:
    """Stop this process when its main thread waits for the others."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def is_stopped_when_it_is_done(me: Rank) -> None:
    me.wrapped(lambda _: stop_soon())


def is_stopped_in_reserve(me: Rank) -> None:
    """Stop rank 1, which is in reserve, and let another rank fail later."""

    def fail() -> None:
        compute(1.0)
        raise OSError

    class InReserve(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            mode = Mode.INACTIVE if me.initial == 1 else Mode.ACTIVE
            ctx.state = replace(ctx.state, mode=mode)
            return ctx

    def initialize(self: Initialize, state: FrozenState) -> FrozenState:
        if me.initial == 1:
            stop_soon()
        return state

    plugins = {
        "initialize": type("Plugin", (Initialize,), {"__call__": initialize})(),
        "rank_assignment": Compose(InReserve(), ShiftRanks()),
    }
    me.wrapped(stop, hard=2.0, others=fail, **plugins)


def is_stuck_at_the_end(me: Rank, act: Callable[[], Any], **arguments: Any) -> None:
    """Run `act` in `completion`, on rank 1."""

    def complete(self: Completion, state: FrozenState) -> FrozenState:
        if me.initial == 1:
            act()
        return state

    plugin = type("Plugin", (Completion,), {"__call__": complete})()
    me.wrapped(lambda _: None, others=lambda: None, completion=plugin, **arguments)


def is_stuck_in_completion(me: Rank) -> None:
    is_stuck_at_the_end(me, get_stuck)


def is_stopped_in_completion(me: Rank) -> None:
    is_stuck_at_the_end(me, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def never_returns_from_completion(me: Rank) -> None:
    is_stuck_at_the_end(me, compute, completion_timeout=timedelta(seconds=1.0))


def never_returns_from_terminate(me: Rank) -> None:
    def leave(_: CallWrapper) -> None:
        raise KeyboardInterrupt

    def terminate(self: Terminate, state: FrozenState) -> FrozenState:
        compute()
        return state

    me.wrapped(leave, terminate=type("Plugin", (Terminate,), {"__call__": terminate})())


def loses_its_monitor(me: Rank) -> None:
    def first(call: CallWrapper) -> None:
        before = me.monitor()
        os.kill(before, signal.SIGKILL)
        with call.disable_hang_protection():  # a busy host takes its time
            while (after := me.monitor()) == before:
                pass
        me.note(f"another monitor: {after != before}")
        hold_the_lock()

    me.wrapped(first)


def is_not_to_be_judged(me: Rank) -> None:
    def first(call: CallWrapper) -> None:
        monitor = Path(f"/proc/{me.monitor()}")
        me.note(f"kB: {int((monitor / 'status').read_text().split('VmRSS:')[1].split()[0])}")
        me.note(f"torch: {'torch' in (monitor / 'maps').read_text()}")
        for signum in GROUP_SIGNALS:
            os.kill(int(monitor.name), signum)
        with call.disable_hang_protection():
            time.sleep(1.5)
        me.note("has slept")
        me.note(f"the same monitor: {me.monitor() == int(monitor.name)}")
        raise OSError

    me.wrapped(first)


# -------------------------------------------------------------------------- processes


def child(case: str, rank: int, size: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID=case)
    me = Rank(rank, folder)
    log = logging.StreamHandler(me.notes)
    logging.basicConfig(handlers=[log], level=logging.INFO, force=True, format="log: %(message)s")
    globals()[case](me)


def play(case: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """Fork the ranks of a case; return each rank's result."""
    started = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                child(case, rank, size, folder)
            except BaseException as error:  # noqa: BLE001 - printed on stderr
                print(f"rank {rank}: {error!r}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        started.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in started]
    ends = [
        {"signal": os.WTERMSIG(each)} if os.WIFSIGNALED(each) else {"exit": os.WEXITSTATUS(each)}
        for each in statuses
    ]
    return [
        end | {"notes": (folder / f"rank.{rank}").read_text().splitlines()}
        for rank, end in enumerate(ends)
    ]


if __name__ == "__main__":
    for line in sys.stdin:
        name, number, where = json.loads(line)
        print(json.dumps(play(name, number, Path(where))), flush=True)
