"""The worker's side of a file timer: writes requests into the server's pipe.

A timer exists for the training and must never harm it. So no state of the pipe raises an error, and
none blocks the training for long:

- The server is missing: the client warns once. It searches for the server again, at most once a
  second and only when there is a request. It then sends all armed timers.
- The pipe is full: the client waits `FLUSH_TIMEOUT` for space, which is enough for a burst. After
  that, requests do not wait until the pipe has space again. The client keeps the latest request of
  each scope (`Backlog`), and a thread waits for space instead of the training.
- The pipe breaks during a write: SIGPIPE is blocked during the write.

A request is one write of one line. A pipe accepts the line in one piece. It begins with a newline,
in case another client did not complete its line.

A forked child starts with a new connection, because timers belong to a process. It does not close
its copy of the file descriptor, because a program that daemonizes may have reused the number for
another file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import signal as signals
import stat
import threading
import time
from functools import lru_cache
from typing import NamedTuple

from regrow.timer.api import TimerClient
from regrow.timer.fifo.request import KEPT_OPEN, MAX_LINE, VERSION
from regrow.utils import get_logger, ready

__all__ = ["FileTimerClient"]

logger = get_logger(__name__)

FLUSH_TIMEOUT = 0.5
"""Seconds that a request waits once for space in the full pipe; later requests do not wait."""
PAUSE = 1.0
"""Seconds between two searches for the server."""
LONGEST_SCOPE = MAX_LINE - 512
"""Most bytes of a scope in a line; the other fields need far less than the rest."""


class FileTimerClient(TimerClient):
    """Arms and releases the timers of this process with the server of a named pipe.

    Args:
        file_path: the server's pipe.
        signal: the signal that the server sends to this process when a timer expires. Zero or less:
            no signal, the expiration is only reported.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal
        # By pid: connections of this process and its ancestors.
        self._connections: dict[int, _Connection] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm the timer of a scope, or arm it again.

        Args:
            scope_id: the name of the timer. A long name is shortened, always in the same way.
            expiration_time: seconds since the epoch; infinity: never; negative: release the timer.

        Raises:
            ValueError: `expiration_time` is not a number.
        """
        expiration_time = float(expiration_time)
        # Read before the other clock: an interruption in between makes the timer longer, not
        # shorter.
        left = expiration_time - time.time()
        now = time.monotonic()
        if not 0 <= expiration_time < math.inf:
            if math.isnan(expiration_time):
                raise ValueError(
                    f"the expiration time of scope {scope_id!r} is {expiration_time}; give seconds"
                    " since the epoch"
                )
            self.release(scope_id)
            return
        self._arm(scope_id, expiration_time, now + left, now)

    def acquire_in(self, scope_id: str, seconds: float) -> None:
        """Arm the timer of a scope, or arm it again, independent of the wall clock.

        Args:
            scope_id: see `acquire`.
            seconds: from now to the expiration.
        """
        now = time.monotonic()
        self._arm(scope_id, max(0.0, time.time() + seconds), now + seconds, now)

    def release(self, scope_id: str) -> None:
        """Disarm the timer of a scope, if it is armed."""
        self._send(scope_id, '"expiration_time": -1, "signal": 0', False, time.monotonic())

    def _arm(self, scope_id: str, expiration_time: float, at: float, now: float) -> None:
        fields = f'"expiration_time": {expiration_time!r}, "signal": {int(self.signal)}'
        self._send(scope_id, f'{fields}, "monotonic": {at!r}, "armed": {now!r}', True, now)

    def _send(self, scope_id: str, fields: str, arms: bool, now: float) -> None:
        pid = os.getpid()
        scope = _written(scope_id)
        line = f'\n{{"version": {VERSION}, "pid": {pid}, "scope_id": {scope}, {fields}}}\n'
        found = self._connections.get(pid)
        if found is None:
            from regrow.timer.stacks.answering import arm

            arm()  # so that the server can request the stacks of this process
            # One atomic step: threads that arrive at the same time get the same connection.
            found = self._connections.setdefault(pid, _Connection(self._file_path))
        found.send(Message(scope_id, line.encode(), arms), now)


@lru_cache(maxsize=1024)
def _written(scope: str) -> str:
    """Encode a scope as JSON, cut so that the request fits in one line of the pipe."""
    scope = str(scope)
    text = json.dumps(scope)
    if len(text) <= LONGEST_SCOPE:
        return text
    import hashlib

    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # An escaped character takes up to six bytes, or twelve if it consists of two code units.
    return json.dumps(f"{scope[: LONGEST_SCOPE // 16]}...#{digest}")


class Message(NamedTuple):
    """A request to send."""

    scope: str
    line: bytes
    """The line as written to the pipe."""
    arms: bool
    """Whether the request arms the timer; otherwise it releases it."""


class Backlog:
    """Sent and unsent requests of one process (pure).

    A server that was slow or missing receives only the newest state: the latest request of each
    scope. A release is dropped if the server cannot know the timer. So there are never more unsent
    requests than the timers of the process and the server together.
    """

    __slots__ = ("_sent", "_unsent")

    def __init__(self, unsent: dict[str, Message] | None = None) -> None:
        self._sent: dict[str, Message] = {}  # timers that are armed in the server's view
        self._unsent = {} if unsent is None else unsent

    def __len__(self) -> int:
        """Return the number of unsent requests."""
        return len(self._unsent)

    def add(self, message: Message) -> None:
        """Add a request to send; it replaces an older request of its scope."""
        older = self._unsent.pop(message.scope, None)
        if not message.arms and older is not None and message.scope not in self._sent:
            return
        self._unsent[message.scope] = message

    def next(self) -> Message | None:
        """Return a request to send, or None; the request stays in the backlog until the caller
        reports by `sent` that it was sent.
        """
        # `copy` is atomic: a signal handler or another thread may add a request here.
        message = next(iter(self._unsent.copy().values()), None)
        if message is not None and message.arms:
            # The caller may be interrupted before it calls `sent`.
            self._sent.setdefault(message.scope, message)
        return message

    def sent(self, message: Message) -> None:
        """Note that the server received this request; a newer one of its scope stays unsent."""
        if self._unsent.get(message.scope) is message:
            del self._unsent[message.scope]
        if message.arms:
            self._sent[message.scope] = message
        else:
            self._sent.pop(message.scope, None)

    def lost(self) -> None:
        """Note that the server is gone: send all armed timers to the next one."""
        armed = {**self._sent, **self._unsent}
        self._unsent = {scope: message for scope, message in armed.items() if message.arms}
        self._sent = {}


class _Connection:
    """Sends the requests of one process."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Reentrant: a signal handler may arm a timer while this thread arms one.
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._fd = -1
        self._keeps = False  # whether the pipe may stay open
        self._look_at = -math.inf  # time of the next search for the server, monotonic seconds
        # While this thread runs, no other thread writes.
        self._flusher: threading.Thread | None = None
        self._warned: set[str] = set()

    def send(self, message: Message, now: float) -> None:
        """Send a request, now or as soon as possible."""
        with self._lock:
            if self._fd >= 0 and self._keeps and not self._backlog:
                try:
                    write_line(self._fd, message.line)
                except OSError:
                    pass  # `_flush` writes the line again, and handles the error
                else:
                    self._backlog.sent(message)
                    return
            self._backlog.add(message)
            if self._flusher is None and self._reach(now) and not self._flush(FLUSH_TIMEOUT):
                self._leave_to_thread()

    def _reach(self, now: float) -> bool:
        """Open the pipe, unless it is open; return whether it is open now."""
        if self._fd >= 0:
            return True
        if now < self._look_at:
            return False
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            missing = "no process reads it" if error.errno == errno.ENXIO else error.strerror
            self._gone(now, missing or str(error))
            return False
        mode = os.fstat(fd).st_mode
        if not stat.S_ISFIFO(mode):  # a file of the user, which must not be written to
            os.close(fd)
            self._gone(now, "it is not a pipe")
            return False
        self._keeps = bool(mode & KEPT_OPEN)
        self._fd = fd
        return True

    def _gone(self, now: float, why: str) -> None:
        self._look_at = now + PAUSE
        self._backlog.lost()
        self._warn(
            "timers: those of process %d are not kept, because no timer server reads %s (%s). The"
            " training continues, and the client looks for the server again",
            why,
        )

    def _warn(self, text: str, why: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, os.getpid(), self._path, why)

    def _flush(self, timeout: float) -> bool:
        """Send the backlog; False: the pipe had no space for `timeout` seconds."""
        until = time.monotonic() + timeout
        while (message := self._backlog.next()) is not None:
            try:
                write_line(self._fd, message.line)
            except BlockingIOError:
                room = wait_for_room(self._fd, until - time.monotonic())
                # A signal handler may have started the thread during the wait.
                if not room or (timeout and self._flusher):
                    return False
            except OSError as error:
                self._close()
                self._gone(time.monotonic(), error.strerror or str(error))
                return True
            else:
                self._backlog.sent(message)
        if not self._keeps:
            self._close()
        return True

    def _leave_to_thread(self) -> None:
        if self._flusher is not None:
            return
        self._warn(
            "timers: requests of process %d are late, because the timer server at %s %s. The"
            " training continues and no longer waits for the server",
            f"has not read its pipe for {FLUSH_TIMEOUT} s",
        )
        self._flusher = threading.Thread(
            target=self._flush_later, name="regrow-FileTimerClient", daemon=True
        )
        try:
            self._flusher.start()
        except RuntimeError:  # too many threads, or the program ends: the next request tries again
            self._flusher = None

    def _flush_later(self) -> None:
        done = False
        while not done:
            wait_for_room(self._fd, math.inf)
            with self._lock:
                done = self._flush(0.0)
                if done:
                    self._flusher = None

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def write_line(fd: int, line: bytes) -> None:
    """Write a line without a SIGPIPE.

    Raises:
        BlockingIOError: the pipe is full.
        BrokenPipeError: no process reads the pipe.
    """
    if signals.getsignal(signals.SIGPIPE) is signals.SIG_IGN:  # Python's default
        os.write(fd, line)
        return
    before = signals.pthread_sigmask(signals.SIG_BLOCK, {signals.SIGPIPE})
    waiting = signals.SIGPIPE in signals.sigpending()
    try:
        os.write(fd, line)
    except BrokenPipeError:
        if not waiting:
            signals.sigtimedwait({signals.SIGPIPE}, 0)
        raise
    finally:
        signals.pthread_sigmask(signals.SIG_SETMASK, before)


def wait_for_room(fd: int, timeout: float) -> bool:
    """Wait until a pipe has room for a line or is broken; return False after `timeout` seconds."""
    return bool(ready([fd], None if timeout == math.inf else timeout, select.POLLOUT))
