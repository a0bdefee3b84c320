"""The monitor of a host: the process that ends ranks which make no progress.

It is one process for the ranks of a job on a host, which find it as `_monitor_start` says; it
loads neither torch nor anything of the job. Each rank has a connection; the kernel says whose that
is. When a rank's deadline has passed (`_hard_deadlines`), a thread of its own ends that rank, and
the others are watched meanwhile:

    stacks ─► the store is told: HARD_TIMEOUT ─► SIGTERM, SIGCONT ─► grace ─► SIGKILL

The store comes before the signal: at the end of the process it would take the rank for one that has
died by itself. A store that does not answer puts the signal off by a few seconds, and no more.
A process that is stopped takes SIGTERM when it is continued, and runs nothing in between.

The monitor ends with its ranks. It takes no more connections then, serves those that were made
before, and lets go of its socket, so that whoever comes later starts another one.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from regrow.inprocess._hard_deadlines import HardDeadlines
from regrow.inprocess._hard_watch import LONGEST, WORD, Terms
from regrow.inprocess._monitor_start import LISTENER
from regrow.timer._capture import Target, capture
from regrow.timer._frames import where

HARD_TIMEOUT: Final = "HARD_TIMEOUT"
"""As `attribution.Interruption` names it."""
VISIT: Final = 2.0
"""Seconds that the store may take to be reached, and to answer."""
FIRST_RANK: Final = 30.0
"""Seconds in which the rank that has started the monitor has to connect to it."""
_PEER: Final = struct.Struct("3i")


class Watched:
    """One rank's process."""

    __slots__ = ("connection", "pid", "pidfd", "terms")

    def __init__(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(raw)
        if uid != os.getuid() or pid <= 0:
            raise PermissionError(f"process {pid} of user {uid} is none to be signalled from here")
        self.connection = connection
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.terms: Terms | None = None
        """Known with the first packet."""

    def forget(self) -> None:
        """Let go of it."""
        self.connection.close()
        os.close(self.pidfd)
        if self.terms is not None and self.terms.pidfile:
            with suppress(OSError):
                os.unlink(self.terms.pidfile)


class Monitor:
    """Watches the ranks that connect, until there are none.

    Args:
        listener: where they connect.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._deadlines = HardDeadlines()
        self._watched: dict[int, Watched] = {}  # by connection and by pidfd
        self._endings: list[threading.Thread] = []

    def run(self) -> None:
        """Watch."""
        self._sleep(time.monotonic() + FIRST_RANK)
        while self._watched:
            self._sleep(self._deadlines.next())
        self._listener.shutdown(socket.SHUT_RD)  # refuses, and keeps those that are in the queue
        self._accept()
        self._poll.unregister(self._listener)
        self._listener.close()
        while self._watched:
            self._sleep(self._deadlines.next())
        for ending in self._endings:
            ending.join()

    def _sleep(self, until: float) -> None:
        """Sleep, and do what there is to be done."""
        begin = time.monotonic()
        left = None if until == math.inf else math.ceil(max(until - begin, 0.0) * 1000)
        ready = self._poll.poll(left)
        slept = self._deadlines.woke(begin, until, time.monotonic())
        if slept:
            _note("", f"the host stood still for {slept:.3f} s, which does not count")
        heard = [fd for fd, _ in ready if fd != self._listener.fileno()]
        for fd in heard:
            watched = self._watched.get(fd)
            if watched is not None:
                self._hear(watched, ended=fd == watched.pidfd)
        if len(heard) < len(ready):  # last: who is new may have a number that was another's
            self._accept()
        for fd in self._deadlines.due(time.monotonic()):
            self._end(self._watched[fd])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # there is none, or none any more
                return
            connection.setblocking(False)
            try:
                watched = Watched(connection)
            except ProcessLookupError:  # it has ended since, and needs no watching
                connection.close()
                continue
            except OSError as error:
                _note("", f"a connection is refused: {error}")
                connection.close()
                continue
            for fd in (connection.fileno(), watched.pidfd):
                self._watched[fd] = watched
                self._poll.register(fd, select.POLLIN)

    def _hear(self, watched: Watched, *, ended: bool) -> None:
        """Take what a rank has said; it is forgotten when it has no more to say."""
        who = watched.connection.fileno()
        while True:
            try:
                packet = watched.connection.recv(LONGEST)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                ended = True
                break
            try:
                if watched.terms is None:
                    first = json.loads(packet)
                    watched.terms = Terms(**first["terms"])
                    self._deadlines.said(who, first["change"], first["until"])
                    _publish(watched.terms)
                else:
                    self._deadlines.said(who, *WORD.unpack(packet))
            except (ValueError, TypeError, LookupError, struct.error) as error:
                _note("", f"process {watched.pid} is not understood: {error}: {packet!r:.200}")
                ended = True
                break
        if ended:
            self._deadlines.gone(who)
            for fd in (who, watched.pidfd):
                del self._watched[fd]
                self._poll.unregister(fd)
            watched.forget()

    def _end(self, watched: Watched) -> None:
        terms = watched.terms
        assert terms is not None  # it has a deadline
        process = os.dup(watched.pidfd)
        group = [
            each.connection
            for fd, each in self._watched.items()
            if fd != each.pidfd and each.terms is not None and each.terms.group == terms.group
        ]
        ending = threading.Thread(target=end, args=(terms, watched.pid, process, group))
        self._endings = [each for each in self._endings if each.is_alive()]
        self._endings.append(ending)
        ending.start()


def end(terms: Terms, pid: int, pidfd: int, group: Sequence[socket.socket]) -> None:
    """End a rank.

    Args:
        terms: the rank's.
        pid: its process.
        pidfd: of that process; closed when it has ended.
        group: the connections of its group's ranks on this host, which tell the others where the
            monitor cannot.
    """
    try:
        dump = capture([Target(pid, pidfd)])[pid]
        message = f"no progress for {terms.hard:g} s: {where(dump)}"
        _note(
            terms.logfile,
            f"initial rank {terms.rank} (process {pid}) is ended: {message}\n{dump.text}".rstrip(),
        )
        _tell(terms, message, group)
        if not _signalled(pidfd, terms.grace, signal.SIGTERM, signal.SIGCONT):
            _note(
                terms.logfile,
                f"initial rank {terms.rank} (process {pid}) has not ended within {terms.grace:g} s "
                f"of SIGTERM, and is killed",
            )
            _signalled(pidfd, terms.grace, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _signalled(pidfd: int, patience: float, *signals: int) -> bool:
    """Send a process signals; whether it has ended within so many seconds."""
    for each in signals:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, each)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(math.ceil(patience * 1000)))


def _tell(terms: Terms, message: str, group: Sequence[socket.socket]) -> None:
    """Have the rank counted out by the store, for this reason."""
    if not terms.endpoint:
        for connection in group:  # its own as well: it will not read that
            with suppress(OSError):
                connection.send(json.dumps([terms.rank, HARD_TIMEOUT, message]).encode())
        return
    from regrow.inprocess._accuse import accuse
    from regrow.store import StoreError
    from regrow.store._worker import visit

    try:
        with visit(terms.endpoint, bytes.fromhex(terms.token), VISIT) as client:
            accuse(client, terms.rank, HARD_TIMEOUT, message, group=terms.group, timeout=VISIT)
    except StoreError as error:
        _note(
            terms.logfile, f"the other ranks cannot be told of initial rank {terms.rank}: {error}"
        )


def _publish(terms: Terms) -> None:
    """Write the pid to where a rank wants it."""
    if not terms.pidfile:
        return
    try:
        with open(terms.pidfile, "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        _note(terms.logfile, f"the monitor's pid cannot be written to {terms.pidfile}: {error}")


def _note(path: str, text: str) -> None:
    """Say something, in a file if there is one to be written, else on stderr."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} regrow monitor: {text}\n"
    if path:
        try:
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line)
        except OSError as error:
            line = f"{line}{path} cannot be written: {error}\n"
        else:
            return
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


def serve() -> None:
    """Be the monitor; the listening socket is handed over as `LISTENER`."""
    Monitor(socket.socket(fileno=LISTENER)).run()
