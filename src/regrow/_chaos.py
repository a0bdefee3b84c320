"""Injects faults into this worker by order of its agent (`regrow run --chaos`).

Some faults need the worker's own interpreter: an exception, a hang, a held GIL, slow Python, a
segmentation fault. `import regrow` connects the worker to its agent if the job runs with `--chaos`;
a thread then waits for orders. The agent knows the worker by its process id, which the kernel adds
to the connection, so no other process gets orders.

An order is one line of JSON: `fault`, `for_s` (None: without end) and `slowdown`. The agent records
the fault before it sends the order. The worker answers with one line, the reason, if it cannot
inject the fault.

`raise` and `hang` are injected by a signal, because they concern the main thread, also while it
sleeps. They begin at the next place where an interrupt does no lasting harm
(`regrow.inprocess.interrupt.no_interrupt_zones`), and never in regrow's own code.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regrow._progress import CHAOS_ENV
from regrow.inprocess.interrupt.no_interrupt_zones import InterruptCheck, free_signal
from regrow.utils import start_thread

if TYPE_CHECKING:
    from types import FrameType

TURN_S = 0.04
"""Seconds of one turn of a slow worker: it runs in a part, and holds the GIL in the rest."""
REPEAT_S = 0.02
"""Seconds between two attempts to raise; the main thread may be in code that is not interrupted."""
RAISE_S = 60.0
"""Seconds for which `raise` and `hang` are tried."""
_LONGEST_HOLD_S = 3600.0
_WAITING = {"threading", "selectors", "socket", "queue"}
"""Modules of Python's library in which regrow waits."""


class InjectedFault(RuntimeError):
    """The exception of the fault `raise`."""

    def __init__(self) -> None:
        super().__init__("injected by regrow run --chaos")


class _MainThread:
    """Injects faults into the main thread, in the handler of a signal."""

    def __init__(self, signum: int) -> None:
        self._signum = signum
        self._thread = threading.main_thread().ident or 0
        self._one = threading.Lock()  # one order at a time
        self._order: dict[str, Any] | None = None
        self._check: InterruptCheck | None = None
        signal.signal(signum, self._handle)

    def inject(self, order: dict[str, Any]) -> str:
        """Have the handler inject a fault; return why that was not possible, or ""."""
        with self._one:
            self._check = InterruptCheck(time.monotonic, wakes=True)
            self._order = order
            deadline = time.monotonic() + RAISE_S
            while time.monotonic() < deadline:
                signal.pthread_kill(self._thread, self._signum)
                time.sleep(REPEAT_S)
                if self._order is not order:  # the handler has taken it
                    return ""
            self._order = None
        return f"the main thread was in code that is not interrupted, for {RAISE_S:g} s"

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        order = self._order
        if order is None or frame is None or not self._may_interrupt(frame):
            return
        self._order = None
        if order["fault"] == "raise":
            raise InjectedFault
        _injected_hang(order["for_s"])

    def _may_interrupt(self, top: FrameType) -> bool:
        if _is_regrows(top) or self._check is None:
            return False
        guard = top
        while guard.f_back is not None:
            guard = guard.f_back
        return top is guard or self._check.at(top, guard, sys.exception())


def _is_regrows(top: FrameType) -> bool:
    """Return whether regrow's own code runs, or waits, in this frame."""
    frame: FrameType | None = top
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module not in _WAITING:
            return module.partition(".")[0] == "regrow"
        frame = frame.f_back
    return False


def _injected_hang(seconds: float | None) -> None:
    """Do not return for some seconds (None: at all); Python runs in the other threads."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        time.sleep(3600.0 if end is None else max(0.0, end - time.monotonic()))


def _hold_gil(seconds: float | None) -> None:
    """Let no Python code run in this process for some seconds (None: at all)."""
    poll = ctypes.PyDLL(None).poll  # a PyDLL keeps the GIL during a call
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        left = _LONGEST_HOLD_S if end is None else min(end - time.monotonic(), _LONGEST_HOLD_S)
        poll(None, 0, max(1, int(left * 1000)))


def _slow_down(seconds: float | None, slowdown: float) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    free = TURN_S / slowdown
    while end is None or time.monotonic() < end:
        _hold_gil(TURN_S - free)
        time.sleep(free)


def _inject(order: dict[str, Any], main: _MainThread | None) -> str:
    """Inject a fault; return why that was not possible, or ""."""
    match order["fault"]:
        case "raise" | "hang":
            if main is None:
                return "regrow was imported outside the main thread, or no signal is free"
            return main.inject(order)
        case "gil":
            _hold_gil(order["for_s"])
        case "slow":
            _slow_down(order["for_s"], order["slowdown"])
        case "segfault":
            ctypes.string_at(0)
        case fault:
            return f"this release does not know the fault {fault!r}"
    return ""


def _obey(connection: socket.socket, main: _MainThread | None) -> None:
    # A signal for the process must not end a call that holds the GIL.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    with suppress(OSError), connection, connection.makefile("rb") as orders:
        for line in orders:
            order = json.loads(line)

            def run(order: dict[str, Any] = order) -> None:
                if why := _inject(order, main):
                    with suppress(OSError):
                        connection.sendall(
                            json.dumps({"id": order["id"], "why": why}).encode() + b"\n"
                        )

            start_thread(run, "regrow-chaos-fault")  # inherits the blocked signals


def arm() -> None:
    """Connect to the agent, and wait for orders in a thread; no effect if the agent has gone."""
    name = os.environ.get(CHAOS_ENV, "")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        return
    main: _MainThread | None = None
    signum = free_signal()
    if signum is not None and threading.current_thread() is threading.main_thread():
        main = _MainThread(signum)
    start_thread(lambda: _obey(connection, main), "regrow-chaos")
