"""The life of a timer server's thread: it is started, it is stopped, and it never ends by itself.

What a server does goes on in one thread, so that nothing that others call can wait for a worker to
be reaped. An error in it, of ours or of a hook, is logged, and it goes on.

A forked child has copies of the server's descriptors and no thread. To whoever writes into the pipe
it would look as if somebody read it, for as long as the child lives: so a child closes them.
"""

from __future__ import annotations

import abc
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from regrow.timer._sleeper import Sleeper
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.timer._file_request import FileTimerRequest

logger = get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0
"""Seconds from a turn that failed to the next: after the first such turn, doubled after each, and
at most."""
STOP_PATIENCE = 10.0
"""Seconds that `stop` waits at most for the end of what the thread does, the writing of a report
for instance."""


class ServerThread(abc.ABC):
    """A thread that sleeps until there is something to do.

    Args:
        name: what is served, in words for the log.
        daemon: whether the thread ends with the program.
        log_event: told what happens.
    """

    _wall: Callable[[], float] = staticmethod(time.time)
    _monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        name: str,
        daemon: bool,
        log_event: Callable[[str, FileTimerRequest | None], None] | None,
    ) -> None:
        self._name = name
        self._daemon = daemon
        self._log_event = log_event
        self._lock = threading.RLock()
        """Of all that is used by more threads than this."""
        self._sleeper = Sleeper(self._monotonic)
        self._stopping = threading.Event()
        self._last_turn = False
        self._ended: float | None = None
        """When the server ended, monotonic seconds."""
        self._watchdog_thread: threading.Thread | None = None

    def _let_go_in_children(self) -> None:
        """Once all that is to be closed is there: have forked children close it."""
        os.register_at_fork(after_in_child=partial(_forked, weakref.ref(self)))

    def start(self) -> None:
        """Start the server's thread. While it runs, this changes nothing.

        Raises:
            RuntimeError: the server was stopped.
        """
        if self._ended is not None:
            raise RuntimeError(f"the timer server of {self._name} was stopped; make a new one")
        if self._watchdog_thread is not None:
            logger.warning("the timer server of %s runs already", self._name)
            return
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name=f"regrow-{type(self).__name__}", daemon=self._daemon
        )
        self._watchdog_thread.start()
        logger.info("the timer server of %s has started", self._name)
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """Stop the server's thread, wait for its end, and remove the pipe."""
        self._stopping.set()
        if self._finish():
            self._tell("watchdog stopped", None)

    def run_once(self) -> None:
        """Act on what is in the pipe and on what is due; then stop, without a word of it."""
        self._last_turn = True
        self._finish()

    @abc.abstractmethod
    def _run_watchdog(self, *, wait: bool) -> None:
        """Sleep until there is something to do, unless told not to `wait`, and do it."""

    @abc.abstractmethod
    def _remove(self) -> None:
        """Take away what others find the server by."""

    @abc.abstractmethod
    def _close(self, *, forked: bool) -> None:
        """Close all descriptors; if `forked`, copies that a child has, and nothing but these."""

    def _watchdog_loop(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.is_set():
                last = self._last_turn  # before it looks, so that it sees what came before
                try:
                    self._run_watchdog(wait=not last)
                    pause = 0.0
                except Exception:
                    pause = min(2 * pause or FIRST_PAUSE, LAST_PAUSE)
                    logger.exception("the timer server of %s goes on in %s s", self._name, pause)
                    self._stopping.wait(pause)
                if last:
                    break
        finally:
            self._end()

    def _finish(self) -> bool:
        """Have the thread end, and wait for that; whether there was something to stop."""
        if self._ended is not None and self._watchdog_thread is None:
            return False
        self._wake_up()
        self._remove()
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join(STOP_PATIENCE)
            if thread.is_alive():
                logger.warning(
                    "the timer server of %s has not ended within %s s; it will after what it does",
                    self._name,
                    STOP_PATIENCE,
                )
        return True

    def _end(self) -> None:
        with self._lock:
            self._ended = self._monotonic()
            self._close(forked=False)
            self._sleeper.close()

    def _abandon(self) -> None:
        """In a forked child: this is the parent's."""
        self._lock = threading.RLock()  # as the parent's thread may have held it
        self._watchdog_thread, self._ended = None, self._monotonic()
        self._close(forked=True)
        self._sleeper.close()

    def _wake_up(self) -> None:
        """Let the thread look again at what it waits for."""
        with self._lock:
            if self._ended is None and threading.current_thread() is not self._watchdog_thread:
                self._sleeper.wake()

    def _tell(self, name: str, request: FileTimerRequest | None) -> None:
        if self._log_event is not None:
            self._safely(self._log_event, name, request)

    def _safely(self, hook: Callable[..., None], *args: object) -> None:
        """Call what others have written: no error in it may keep the thread from its work."""
        try:
            hook(*args)
        except Exception:
            logger.exception("the timer server of %s goes on without %r", self._name, hook)


def _forked(reference: weakref.ref[ServerThread]) -> None:
    server = reference()
    if server is not None and server._ended is None:
        server._abandon()
