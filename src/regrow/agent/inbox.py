"""The agent's message queue: ends of operations, notifications, and signals such as SIGTERM.

The agent's main thread takes the next message, acts on it, and does nothing else. Long work runs in
an `Operations` thread, one call after the other; the end of each call is a message. Signal handlers
only put a message into the inbox, so a signal is safe at any point of the program.
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
from functools import partial
from queue import SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

from regrow.agent.decisions.events import Event, Signaled
from regrow.utils import split_signals, start_thread
from regrow.workers import signals_handled

Message = Callable[[], Event | None] | Event
"""A message in the inbox.

A function is called by the loop; its return value is an event for `decide`, or None. A thread that
learns something posts such a function, so that all handling runs in the loop.
"""


class Inbox:
    """The message queue; `put` is safe from any thread and from signal handlers.

    A pipe wakes the reader. A lock cannot: Python runs signal handlers only between two of its own
    instructions. A signal between the check for messages and the wait would leave the lock waiting
    until the next message. The interpreter writes to `wake_fd` in the signal itself.
    """

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._wait_fd, self.wake_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wait_fd, select.POLLIN)
        # Close with the last reference only: an abandoned thread may still call `put`.
        weakref.finalize(self, _close, self._wait_fd, self.wake_fd)

    def put(self, message: Message) -> None:
        """Add a message and wake the reader."""
        self._messages.append(message)
        with suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self.wake_fd, b"\0")

    def get(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None after `timeout` seconds. For one reader only."""
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


Ended = Callable[[Any, BaseException | None], Event | None]
"""Handles the result or the error of an operation, in the loop; returns as a message does."""


class Operations:
    """A thread that runs submitted calls one by one and reports their ends to the inbox.

    One thread, which lives as long as the agent runs, keeps the calls in their order. A worker that
    it forks from a function outlives the thread: only the main thread sets PDEATHSIG for `fork`.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._calls: SimpleQueue[tuple[Callable[[], Any], Ended] | None] = SimpleQueue()
        start_thread(self._run, "regrow-operations")

    def submit(self, call: Callable[[], Any], ended: Ended) -> None:
        """Run `call` after all earlier calls, and post `ended` with its outcome to the inbox."""
        self._calls.put((call, ended))

    def close(self) -> None:
        """End the thread after the submitted calls; do not wait for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, ended = item
            try:
                message = partial(ended, call(), None)
            except BaseException as error:  # noqa: BLE001 - the loop raises it
                message = partial(ended, None, error)
            self._inbox.put(message)


@contextmanager
def signals_into(
    inbox: Inbox,
    names: str,
    handled: Callable[[int, FrameType | None], bool] = lambda signum, frame: False,
) -> Iterator[None]:
    """Context manager: the named signals arrive in `inbox` as `Signaled`.

    Outside the main thread it does nothing, because only the main thread can set handlers. An
    ignored SIGHUP stays ignored.

    Args:
        inbox: gets the messages.
        names: comma-separated names such as `SIGTERM,SIGINT`; an unknown name causes a warning.
        handled: called at each signal, as a signal handler; it may raise. If it returns true, the
            signal does not go to the inbox.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        if not handled(signum, frame):
            inbox.put(Signaled(signum))

    woken_before = signal.set_wakeup_fd(inbox.wake_fd, warn_on_full_buffer=False)
    previous = {}
    known, unknown = split_signals(names)
    for name in unknown:
        import warnings

        warnings.warn(f"signal {name!r} cannot be handled; it is ignored", stacklevel=3)
    for signum in known:
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # nohup: the job must survive the end of its terminal
        previous[signum] = signal.signal(signum, handler)
    try:
        with signals_handled():
            yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)
        signal.set_wakeup_fd(woken_before)
