"""The monitor of a host: the process that ends ranks which hang, and tells of those that ended.

It is one process for the ranks of a job on a host, which find it as `_monitor_start` says; it
loads neither torch nor anything of the job. Each rank has a connection; the kernel says whose that
is, and when that process has ended. When a rank's deadline has passed (`_deadlines`), a thread of
its own tells of that rank, or ends it (`_monitor_end`), and the others are watched meanwhile.

**A process that ends** without a goodbye takes its rank along, and the store is told: TERMINATED.
That is seen by the end of the process, and not of the connection. The kernel closes a process's
connections some time before it is over; a rank may come back over a new one; and a child that it
has forked may hold the connection for longer than the rank lives. So a connection that ends is put
aside, and the process is waited for.

The monitor ends with its ranks. It takes no more connections then, serves those that were made
before, and lets go of its socket, so that whoever comes later starts another one.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from regrow.inprocess._deadlines import NOT_JUDGED, Deadlines, Due, Word
from regrow.inprocess._hard_watch import GOODBYE, LONGEST, WORD, Terms
from regrow.inprocess._monitor_end import Hung, end_rank, tell_of
from regrow.inprocess._monitor_start import LISTENER
from regrow.inprocess._telling import TERMINATED, Seen, Teller, note, tell_ranks

FIRST_RANK: Final = 30.0
"""Seconds in which the rank that has started the monitor has to connect to it."""
_PEER: Final = struct.Struct("3i")


class Watched:
    """One rank's process."""

    __slots__ = ("asking", "connection", "is_being_ended", "pid", "pidfd", "terms")

    def __init__(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(raw)
        if uid != os.getuid() or pid <= 0:
            raise PermissionError(f"process {pid} of user {uid} is none to be signalled from here")
        self.connection: socket.socket | None = connection
        """None when it has ended; the process will, or comes back."""
        self.pid = pid
        self.pidfd = _pidfd(pid)
        self.terms: Terms | None = None
        """Known with the first packet."""
        self.is_being_ended = False
        """From here, of which the others know."""
        self.asking = threading.Lock()
        """See `Hung`."""


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
        self._deadlines = Deadlines()  # by pidfd
        self._watched: dict[int, Watched] = {}  # by connection and by pidfd
        self._threads: list[threading.Thread] = []
        self._teller = Teller()

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
        for thread in self._threads:
            thread.join()
        self._teller.close()

    def _sleep(self, until: float) -> None:
        """Sleep, and do what there is to be done."""
        begin = time.monotonic()
        left = None if until == math.inf else math.ceil(max(until - begin, 0.0) * 1000)
        ready = self._poll.poll(left)
        slept = self._deadlines.woke(begin, until, time.monotonic())
        if slept:
            note("", f"the host stood still for {slept:.3f} s, which does not count")
        heard = [(fd, self._watched[fd]) for fd, _ in ready if fd in self._watched]
        self._accept()  # first: what a process has said over all its connections, it said living
        for _, watched in heard:
            self._hear(watched)
        for fd, watched in heard:
            if fd == watched.pidfd:
                self._ended(watched)
        for due in self._deadlines.due(time.monotonic()):
            self._hangs(due)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # there is none, or none any more
                return
            connection.setblocking(False)
            try:
                watched = Watched(connection)
            except OSError as error:
                note("", f"a connection is refused: {error}")
                connection.close()
                continue
            for fd in (connection.fileno(), watched.pidfd):
                self._watched[fd] = watched
                self._poll.register(fd, select.POLLIN)
            self._hear(watched)

    def _hear(self, watched: Watched) -> None:
        """Take what a rank has said."""
        while (connection := watched.connection) is not None:
            try:
                packet = connection.recv(LONGEST)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has left something unread; what it has said is still there
            except OSError:
                packet = b""
            if not packet and watched.terms is not None:
                self._hang_up(watched)
            elif not packet or packet == GOODBYE:
                self._forget(watched)
            else:
                try:
                    self._take(watched, packet)
                except (ValueError, TypeError, LookupError, struct.error) as error:
                    note("", f"process {watched.pid} is not understood: {error}: {packet!r:.200}")
                    self._forget(watched)

    def _take(self, watched: Watched, packet: bytes) -> None:
        """Take a packet; raises if it makes no sense."""
        if watched.terms is not None:
            self._said(watched, watched.terms, Word(*WORD.unpack(packet)))
            return
        first = json.loads(packet)
        terms = Terms(**first["terms"])
        for other in list(self._watched.values()):  # it has come back
            known = other.terms
            if known is not None and (other.pid, known.group, known.rank) == (
                watched.pid,
                terms.group,
                terms.rank,
            ):
                self._forget(other)
        watched.terms = terms
        self._said(watched, terms, Word(*first["word"]))
        _publish(terms)
        if terms.endpoint:
            self._teller.prepare()

    def _said(self, watched: Watched, terms: Terms, word: Word) -> None:
        self._deadlines.said(watched.pidfd, word, terms.hard - terms.overdue)

    def _hang_up(self, watched: Watched) -> None:
        """Close a connection; nothing is known of the process."""
        connection, watched.connection = watched.connection, None
        self._deadlines.gone(watched.pidfd)
        if connection is not None:
            del self._watched[connection.fileno()]
            self._poll.unregister(connection)
            connection.close()

    def _forget(self, watched: Watched) -> None:
        """Let go of a rank."""
        self._hang_up(watched)
        if self._watched.pop(watched.pidfd, None) is None:
            return
        self._poll.unregister(watched.pidfd)
        os.close(watched.pidfd)
        if watched.terms is not None and watched.terms.pidfile:
            with suppress(OSError):
                os.unlink(watched.terms.pidfile)

    def _ended(self, watched: Watched) -> None:
        """A process has ended, if without a goodbye."""
        for other in set(self._watched.values()):
            if other.pid == watched.pid:
                self._hear(other)
        if self._watched.get(watched.pidfd) is not watched:  # it has left, or come back
            return
        self._forget(watched)
        terms = watched.terms
        if terms is None or watched.is_being_ended:
            return
        said = f"process {watched.pid} on {socket.gethostname()} has ended"
        end = Seen(terms, TERMINATED, said)
        if terms.endpoint:
            self._teller.tell(end)
        else:
            tell_ranks(end, self._group(terms))

    def _hangs(self, due: Due) -> None:
        """A rank makes no progress; do about it what takes time, elsewhere."""
        watched = self._watched[due.who]
        terms = watched.terms
        assert terms is not None  # it has a deadline
        pidfd = os.dup(watched.pidfd)
        others = [each for each in self._group(terms) if each is not watched.connection]
        rank = Hung(terms, watched.pid, pidfd, others, watched.asking)
        if due.iteration == NOT_JUDGED:
            watched.is_being_ended = True
            thread = threading.Thread(target=end_rank, args=(rank,))
        else:
            thread = threading.Thread(target=tell_of, args=(rank, due.iteration))
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _group(self, terms: Terms) -> list[socket.socket]:
        """The connections of a group's ranks."""
        return [
            each.connection
            for fd, each in self._watched.items()
            if fd == each.pidfd
            and each.connection is not None
            and each.terms is not None
            and each.terms.group == terms.group
        ]


def _pidfd(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it has, and was waited for
        reads, writes = os.pipe2(os.O_CLOEXEC)
        os.close(writes)
        return reads


def _publish(terms: Terms) -> None:
    """Write the pid to where a rank wants it."""
    if not terms.pidfile:
        return
    try:
        with open(terms.pidfile, "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        note(terms.logfile, f"the monitor's pid cannot be written to {terms.pidfile}: {error}")


def serve() -> None:
    """Be the monitor; the listening socket is handed over as `LISTENER`."""
    Monitor(socket.socket(fileno=LISTENER)).run()
