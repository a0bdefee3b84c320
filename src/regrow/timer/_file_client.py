"""The worker's side of a file timer: requests into the server's pipe, whatever becomes of that.

A timer is there for the training and may never harm it. So no state of the pipe raises, and none
holds the training up for long:

- The server is not there, or not any more: one warning. It is looked for again, at most once a
  second and only when there is a request, and then told of all timers that are armed.
- The pipe is full: the server gets time to empty it, which is all that a burst needs. One that does
  not within `PATIENCE` is given no more; from then on requests do not wait. Of each scope the
  latest is kept, and a thread waits for room in place of the training. The newest state arrives.
- The pipe breaks in mid-write: SIGPIPE, whatever it is set to do, is kept away.

A request is one write of one line. It is no longer than what a pipe takes in one piece, and begins
with a newline, in case somebody before it did not come to the end of a line.

In a forked child the client begins anew: timers are of a process. The copy of the file descriptor
that it inherits is left alone, as whoever daemonizes may have given its number to something else.
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

from regrow.timer._api import TimerClient
from regrow.timer._backlog import Backlog, Message
from regrow.timer._file_request import MAX_LINE, VERSION
from regrow.timer._pipe import KEPT_OPEN
from regrow.utils import get_logger

__all__ = ["FileTimerClient"]

logger = get_logger(__name__)

PATIENCE = 0.5
"""Seconds that a request waits for room in the pipe, once, until there is some again."""
PAUSE = 1.0
"""Seconds from a look for the server to the next."""
LONGEST_SCOPE = MAX_LINE - 512
"""Bytes of a scope in a line; the other fields are far shorter than the rest of it."""


class FileTimerClient(TimerClient):
    """Arms and releases the timers of this process with the server of a named pipe.

    Args:
        file_path: the server's pipe.
        signal: what the server sends this process when a timer expires. Zero or less: nothing; the
            expiration is reported only.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal
        self._links: dict[int, _Link] = {}  # this process's, and those of the ones it is a fork of

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm the timer of a scope, or arm it anew.

        Args:
            scope_id: what the timer is about. A long one is shortened, always in the same way.
            expiration_time: when it expires, in seconds since the epoch; infinity: never; negative:
                release it.

        Raises:
            ValueError: `expiration_time` is not a number.
        """
        expiration_time = float(expiration_time)  # whatever the caller calculates with
        # Read before the other clock: should this be interrupted in between, the timer gets longer.
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
        self._arm(scope_id, expiration_time, left, now)

    def acquire_in(self, scope_id: str, seconds: float) -> None:
        """Arm the timer of a scope, or arm it anew, whatever the wall clock is set to meanwhile.

        Args:
            scope_id: see `acquire`.
            seconds: from now to when it expires.
        """
        self._arm(scope_id, max(0.0, time.time() + seconds), seconds, time.monotonic())

    def _arm(self, scope_id: str, expiration_time: float, left: float, now: float) -> None:
        pid = os.getpid()
        line = (
            f'\n{{"version": {VERSION}, "pid": {pid}, "scope_id": {_written(scope_id)}, '
            f'"expiration_time": {expiration_time!r}, "signal": {int(self.signal)}, '
            f'"monotonic": {now + left!r}, "armed": {now!r}}}\n'
        )
        self._link(pid).send(Message(scope_id, line.encode(), True), now)

    def release(self, scope_id: str) -> None:
        """Disarm the timer of a scope; one that is not armed is as well."""
        pid = os.getpid()
        line = (
            f'\n{{"version": {VERSION}, "pid": {pid}, "scope_id": {_written(scope_id)}, '
            f'"expiration_time": -1, "signal": 0}}\n'
        )
        self._link(pid).send(Message(scope_id, line.encode(), False), time.monotonic())

    def _link(self, pid: int) -> _Link:
        # Both are one step each: threads that come at the same time get the same link.
        return self._links.get(pid) or self._links.setdefault(pid, self._linked())

    def _linked(self) -> _Link:
        from regrow.timer._stacks import arm

        arm()  # so that the server can ask this process where it stands
        return _Link(self._file_path)


@lru_cache(maxsize=1024)
def _written(scope: str) -> str:
    """A scope as JSON, short enough for a line."""
    scope = str(scope)
    text = json.dumps(scope)
    if len(text) <= LONGEST_SCOPE:
        return text
    import hashlib

    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # What is escaped takes up to six bytes a character, and twelve where that is two of them.
    return json.dumps(f"{scope[: LONGEST_SCOPE // 16]}...#{digest}")


class _Link:
    """A process's way to the server."""

    __slots__ = (
        "_backlog",
        "_fd",
        "_flusher",
        "_keeps",
        "_lock",
        "_look_at",
        "_path",
        "_warned",
    )

    def __init__(self, path: str) -> None:
        self._path = path
        # One that a signal handler may take again that arms a timer in the middle of arming one.
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._fd = -1
        self._keeps = False  # whether the pipe may be kept open
        self._look_at = -math.inf  # when to look for the server again, monotonic seconds
        self._flusher: threading.Thread | None = None  # has the pipe to itself
        self._warned: set[str] = set()

    def send(self, message: Message, now: float) -> None:
        """Send a request, now or as soon as that is possible."""
        with self._lock:
            if self._fd >= 0 and self._keeps and not self._backlog:
                try:
                    _write(self._fd, message.line)
                except OSError:
                    pass  # it is written once more, and then looked at what is wrong
                else:
                    self._backlog.sent(message)
                    return
            self._backlog.add(message)
            if self._flusher is None and self._reach(now) and not self._flush(PATIENCE):
                self._leave_to_thread()

    def _reach(self, now: float) -> bool:
        """Open the pipe, unless it is; whether it is open then."""
        if self._fd >= 0:
            return True
        if now < self._look_at:
            return False
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            missing = "nobody reads it" if error.errno == errno.ENXIO else error.strerror
            self._gone(now, missing or str(error))
            return False
        mode = os.fstat(fd).st_mode
        if not stat.S_ISFIFO(mode):  # somebody's file, to which nothing may be added
            os.close(fd)
            self._gone(now, "it is no pipe")
            return False
        self._keeps = bool(mode & KEPT_OPEN)
        self._fd = fd
        return True

    def _gone(self, now: float, why: str) -> None:
        self._look_at = now + PAUSE
        self._backlog.lost()
        self._warn(
            "the timers of process %d are not watched: there is no timer server at %s (%s). The"
            " training goes on, and the server is looked for again",
            why,
        )

    def _warn(self, text: str, why: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, os.getpid(), self._path, why)

    def _flush(self, patience: float) -> bool:
        """Send what is to be sent; False: there was no room, for `patience` seconds."""
        until = time.monotonic() + patience
        while (message := self._backlog.next()) is not None:
            try:
                _write(self._fd, message.line)
            except BlockingIOError:
                room = _room(self._fd, until - time.monotonic())
                if not room or (patience and self._flusher):  # of a signal handler that came by
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
            "the timers of process %d are behind: the timer server at %s %s. The training goes on,"
            " and waits for it no more",
            f"has not read for {PATIENCE} s",
        )
        self._flusher = threading.Thread(
            target=self._flush_later, name="regrow-FileTimerClient", daemon=True
        )
        try:
            self._flusher.start()
        except RuntimeError:  # there are too many, or the program ends: the next request tries
            self._flusher = None

    def _flush_later(self) -> None:
        done = False
        while not done:
            _room(self._fd, math.inf)
            with self._lock:
                done = self._flush(0.0)
                if done:
                    self._flusher = None

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def _write(fd: int, line: bytes) -> None:
    """Write a line, and raise what the kernel says, but let no SIGPIPE through.

    Raises:
        BlockingIOError: there is no room.
        BrokenPipeError: nobody reads.
    """
    if signals.getsignal(signals.SIGPIPE) is signals.SIG_IGN:  # as Python has it from the start
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


def _room(fd: int, patience: float) -> bool:
    """Wait until a pipe takes a line, or breaks; False: it did not within `patience` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if patience == math.inf else max(0.0, patience) * 1000))
