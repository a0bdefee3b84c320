"""What comes through the pipe of a file timer's server, and of that what counts.

`_lines` makes requests of bytes; here it is asked whether they are of somebody who may have timers.
That is looked up when a process arms its first one, and never again while it lives: a request costs
no system call. Whatever does not count is reported, once for each kind and source, as a process
that writes nonsense does so all the time.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections.abc import Callable, Iterable

from regrow.timer._file_request import FileTimerRequest
from regrow.timer._file_workers import GONE, Workers
from regrow.timer._lines import Lines, Refusal
from regrow.timer._pipe import Pipe
from regrow.timer._timers import Timers
from regrow.utils import get_logger

logger = get_logger(__name__)

PIECE = 32 * 1024
"""Bytes read at once: some two hundred requests, between which no deadline is looked at."""
MANY = 16384
"""Timers of one worker that are kept, give or take a piece: memory is bounded, whatever it does."""
REPORTS = 256
"""Kinds and sources of bad input that are reported, one by one."""


class Intake:
    """The requests in a pipe.

    Args:
        pipe: where they come from.
        workers: those whose requests count; it grows with those that come.
        timers: theirs.
        monotonic: seconds on CLOCK_MONOTONIC.
        refusal: why a process may have no timers; None: it may.
        refused: told of what does not count, and the request that it was, if it was one.
    """

    __slots__ = (
        "_lines",
        "_monotonic",
        "_pipe",
        "_refusal",
        "_refused",
        "_reported",
        "_timers",
        "_workers",
        "emptied",
    )

    def __init__(
        self,
        pipe: Pipe,
        workers: Workers,
        timers: Timers[int, FileTimerRequest],
        monotonic: Callable[[], float],
        refusal: Callable[[int], str | None],
        refused: Callable[[Refusal, FileTimerRequest | None], None],
    ) -> None:
        self._pipe = pipe
        self._workers = workers
        self._timers = timers
        self._monotonic = monotonic
        self._refusal = refusal
        self._refused = refused
        self._lines = Lines()
        self._reported: set[tuple[str, int]] = set()
        self.emptied = False
        """Whether the last `read` has left nothing in the pipe."""

    @property
    def fd(self) -> int:
        """Readable when there is something to read."""
        return self._pipe.fd

    def waiting(self) -> int:
        """How many bytes are in the pipe."""
        size: int = struct.unpack("i", fcntl.ioctl(self._pipe.fd, termios.FIONREAD, bytes(4)))[0]
        return size

    def full(self) -> bool:
        """Whether nothing can be written into the pipe."""
        poll = select.poll()
        poll.register(self._pipe.fd, select.POLLOUT)
        return not poll.poll(0)

    def read(self) -> tuple[list[FileTimerRequest], int]:
        """Take a piece of what is in the pipe.

        Returns:
            the requests in it that count, and how many bytes it had.
        """
        try:
            data = os.read(self._pipe.fd, PIECE)
        except BlockingIOError:
            data = b""
        self.emptied = len(data) < PIECE
        batch = self._lines.feed(data)
        for refusal in batch.refusals:
            if self._is_news(refusal.why, refusal.pid):
                self._report(refusal, None)
        return list(self._acceptable(batch.requests)), len(data)

    def _acceptable(self, requests: Iterable[FileTimerRequest]) -> Iterable[FileTimerRequest]:
        now = self._monotonic()
        refused: dict[int, str] = {}  # for as long as this takes: a pid may become another's
        for request in requests:
            pid = request.worker_pid
            if request.armed is not None and request.armed > now:
                # Its clock is not ours, as in another time namespace.
                request.monotonic = request.armed = None
            worker = self._workers.get(pid)
            if worker is not None:
                why = self._excess(request) if request.expiration_time >= 0 else ""
                if not why and (now if request.armed is None else request.armed) > worker.reaped:
                    yield request
            elif request.expiration_time < 0:
                continue  # there is nothing to release
            elif pid in refused:
                why = refused[pid]
            else:
                why = refused[pid] = self._admit(pid)
                if not why:
                    yield request
            if why and self._is_news(why, pid):
                self._report(Refusal(why, pid, request.to_json()), request)

    def _admit(self, pid: int) -> str:
        """Look up a process that arms its first timer; why it may not."""
        try:
            worker = self._workers.add(pid)
        except ProcessLookupError:
            return GONE
        # It is held by now, so what is found out about the pid is true of the process.
        try:
            why = self._refusal(pid) or ""
        except Exception:
            logger.exception("process %d cannot be looked at, and gets no timers for now", pid)
            why = "is of a process that cannot be looked at"
        if why:
            self._workers.forget(worker)
        return why

    def _excess(self, request: FileTimerRequest) -> str:
        """Why a worker may arm no timer that it has not armed."""
        timers, pid = self._timers, request.worker_pid
        if len(timers) < MANY or timers.count(pid) < MANY or (pid, request.scope_id) in timers:
            return ""
        return f"is of a process with {MANY} timers"

    def _is_news(self, why: str, pid: int) -> bool:
        """Whether to report this; asked once, as then it is no news any more."""
        # Helpers may end before they are looked up: that is no misuse, so one speaks for all.
        source = why, 0 if why == GONE else pid
        if len(self._reported) > REPORTS or source in self._reported:
            return False
        self._reported.add(source)
        return True

    def _report(self, refusal: Refusal, request: FileTimerRequest | None) -> None:
        if len(self._reported) > REPORTS:
            logger.warning("bad requests in %s are not reported any more", self._pipe.path)
        else:
            self._refused(refusal, request)

    def remove(self) -> None:
        """Remove the pipe from the file system."""
        self._pipe.remove()

    def close(self) -> None:
        """Read no more."""
        self._pipe.close()
