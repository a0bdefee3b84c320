"""One queue that everything the agent must hear of is put into, and what feeds it.

The agent's main thread does nothing but take the next message and act on it. What takes time runs
in an `Operations` thread, one after the other, and is heard of when it is done; signals are turned
into messages by handlers that do nothing else, so they are safe at any point of the program.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

from regrow.agent._words import Signaled


@dataclass(frozen=True, slots=True)
class Done:
    """An operation has ended."""

    operation: object  # what `submit` returned for it
    result: Any
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Probe:
    """Somebody asks whether the loop turns; the loop answers by setting `answered`."""

    answered: threading.Event


class Inbox:
    """The queue; `put` is safe from any thread and from signal handlers.

    A pipe wakes the reader, not a lock: a signal that arrives between the check for messages and
    the wait would leave a lock asleep until something else happens, since Python runs handlers
    only between two of its own instructions. The interpreter writes to `wake_fd` from the signal
    itself.
    """

    def __init__(self) -> None:
        self._messages: deque[object] = deque()
        self._wait_fd, self.wake_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wait_fd, select.POLLIN)
        # With the last reference, and no sooner: a thread left behind may still put.
        weakref.finalize(self, _close, self._wait_fd, self.wake_fd)

    def put(self, message: object) -> None:
        """Add a message and wake the reader."""
        self._messages.append(message)
        with suppress(BlockingIOError):  # full of wake-ups already
            os.write(self.wake_fd, b"\0")

    def get(self, timeout: float | None = None) -> object | None:
        """The next message, or None after `timeout` seconds. For one reader."""
        deadline = None if timeout is None else monotonic() + timeout
        while not self._messages:
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                return None
            self._poll.poll(None if left is None else left * 1000 + 1)
            with suppress(BlockingIOError):
                os.read(self._wait_fd, 4096)
        return self._messages.popleft()


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class Operations:
    """A thread that runs one submitted call after the other and reports each to the inbox.

    It lives as long as the agent runs, since a worker forked from a function is bound to the life
    of the thread that forked it.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._calls: SimpleQueue[tuple[object, Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="regrow-operations", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> object:
        """Run `call` after those submitted before; returns the `operation` of its Done."""
        operation = object()
        self._calls.put((operation, call))
        return operation

    def close(self) -> None:
        """Let the thread end after what is already submitted; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            operation, call = item
            try:
                done = Done(operation, call(), None)
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                done = Done(operation, None, error)
            self._inbox.put(done)


@contextmanager
def signals_into(inbox: Inbox, names: str) -> Iterator[None]:
    """While inside, the named signals arrive in `inbox` as `Signaled`.

    Outside the main thread nothing is done: only the main thread can set handlers. A SIGHUP that
    is ignored stays so.

    Args:
        inbox: where they go.
        names: comma-separated names such as `SIGTERM,SIGINT`; unknown ones are warned of.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, _frame: FrameType | None) -> None:
        inbox.put(Signaled(signum))

    woken_before = signal.set_wakeup_fd(inbox.wake_fd, warn_on_full_buffer=False)
    previous = {}
    for signum in parse_signals(names):
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # nohup: the job is to survive the end of its terminal
        previous[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)
        signal.set_wakeup_fd(woken_before)


def parse_signals(names: str) -> list[signal.Signals]:
    """The signals named in a comma-separated list; those that cannot be handled are warned of."""
    found: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        signum = signal.Signals.__members__.get(name.upper())
        if signum is None or signum in (signal.SIGKILL, signal.SIGSTOP):
            import warnings

            why = "no signal of this system" if signum is None else "cannot be handled"
            warnings.warn(f"signal {name!r} {why}; it is ignored", stacklevel=3)
        else:
            found.append(signum)
    return found
