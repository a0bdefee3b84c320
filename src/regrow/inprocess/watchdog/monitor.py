"""Monitor of a host: a process that ends hung ranks and reports ended ones.

There is one monitor for the ranks of a job on a host. Ranks find it as `monitor_client` describes.
It loads neither torch nor a module of the job. Each rank has a connection; the kernel reports the
process at its other end, and the end of that process. When the deadline of a rank has passed
(`Deadlines`), a separate thread reports or ends that rank. Meanwhile the monitor watches the other
ranks:

    stacks ─► report to the store: SOFT_TIMEOUT
    stacks ─► report to the store: HARD_TIMEOUT ─► SIGTERM, SIGCONT ─► grace ─► SIGKILL

**End of a process.** If a process ends without a goodbye, its rank ends too, and the monitor
reports it to the store: TERMINATED. The monitor detects the end of the process, not of its
connection, for three reasons. The kernel closes the connections of a process some time before the
process is over. A rank may return over a new connection. A forked child may hold the connection
longer than the rank lives. So after the end of a connection the monitor waits for the end of the
process.

The monitor ends with its ranks. It then accepts no further connections, serves the earlier ones,
and closes its socket. A rank that comes later starts another monitor.

**Deadlines.** A rank sends the time until which it may continue. Two of its threads send it. The
main thread sends at every change: the function begins, the function ends, or the checks are
suspended. The thread that looks for progress sends in between. A message of the second thread must
not override a later one of the first. So each message carries the number of the change to which it
belongs, and counts only if no later change has come.

There are two deadlines. At the *hard* deadline the monitor ends the rank. At the *soft* deadline
the monitor reports the rank to the others, and the rank may still return. The rank itself reports
its soft time-out earlier, unless it holds the interpreter's lock or is stopped. So the monitor's
soft deadline is later than the rank's (`overdue_after`).

`Deadlines` reads no clock. Times are seconds of CLOCK_MONOTONIC, which all processes of a host
share.

**Reports.** The monitor detects at once that a process has ended, or that it hangs and has to be
killed. From the connection, the store would detect an end only after the grace of the session, and
a hang never. The report precedes the signal. Otherwise the store would record that the process died
by itself. A store that does not answer delays the signal by a few seconds at most. A stopped
process handles SIGTERM when it is continued, and runs no code in between.

Each report is a session that lasts as long as one question. No thread waits for the report of an
ended process, because the store detects that end by itself sooner or later. So a separate thread
reports ended processes, and reports together all processes that have ended meanwhile. A failed
report is not logged: when a whole job ends, its store is gone before its last rank.

People read the notes in a rank's log file or on stderr. Neither may delay the end of a rank, so
one thread opens and writes all files, in order. The connection of a rank that names files is
closed there as well: its end shows the rank that the files are written. Another thread opens the
stderr of a rank, because a file that cannot be written must not keep that of a rank that has ended.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import regrow.store.client.client  # noqa: F401 - loaded before a report is urgent
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import SOFT_TIMEOUT
from regrow.inprocess.watchdog.monitor_client import (
    DEADLINE,
    GOODBYE,
    LIMITED,
    LISTENER,
    LONGEST,
    UNCHECKED,
    RankDeadline,
    Terms,
    peer_of,
)
from regrow.store import StoreError, visit
from regrow.timer.stacks.capture import Target, capture
from regrow.timer.stacks.report import where
from regrow.utils import BackgroundWriter, end_process

STANDSTILL: Final = 1.0
"""Seconds of delay in waking up, after which the watcher assumes that the whole host was suspended.

No rank could send a message then. So the time in which the watcher slept does not count.
"""


class ExpiredDeadline(NamedTuple):
    """A rank that has sent no message for too long."""

    id: int
    iteration: int
    """The iteration to end; `UNCHECKED` or `LIMITED`: end the rank."""


class Deadlines:
    """Deadlines of the ranks of a host, which are few; the caller identifies a rank by a number."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[RankDeadline, float]] = {}  # with soft-to-hard seconds

    def set(self, id: int, deadline: RankDeadline, earlier: float = 0.0) -> None:
        """Set the deadlines of a rank.

        Args:
            id: the rank.
            deadline: its message.
            earlier: seconds from the soft deadline to the hard one.
        """
        known = self._latest.get(id)
        if math.isnan(deadline.until) or (known and deadline.change < known[0].change):
            return
        self._latest[id] = deadline, earlier

    def remove(self, id: int) -> None:
        """Remove a rank that has left, has ended, or is being ended."""
        self._latest.pop(id, None)

    def next(self) -> float:
        """Return the earliest deadline; infinity without any."""
        return min((at for at, _ in self._all()), default=math.inf)

    def woke(self, slept_at: float, until: float, now: float) -> float:
        """Postpone all deadlines if the watcher woke too late.

        Args:
            slept_at: when the watcher went to sleep.
            until: the latest time at which it should have woken.
            now: when it woke.

        Returns:
            Seconds by which the deadlines are postponed; usually 0.
        """
        if now <= until + STANDSTILL:
            return 0.0
        slept = now - slept_at
        for id, (deadline, earlier) in self._latest.items():
            self._latest[id] = deadline._replace(until=deadline.until + slept), earlier
        return slept

    def due(self, now: float) -> list[ExpiredDeadline]:
        """Return the ranks that are due, the earliest first, and each once.

        This also removes the ranks that are to be ended.
        """
        late: dict[int, ExpiredDeadline] = {}
        for _, due in sorted(entry for entry in self._all() if entry[0] <= now):
            if due.id not in late or due.iteration < 0:
                late[due.id] = due
        for id, due in late.items():
            deadline, earlier = self._latest.pop(id)
            if due.iteration >= 0:
                self._latest[id] = deadline._replace(iteration=UNCHECKED), earlier
        return list(late.values())

    def _all(self) -> Iterator[tuple[float, ExpiredDeadline]]:
        """Yield the hard deadline of each rank, and its soft deadline if that is checked."""
        for id, (deadline, earlier) in self._latest.items():
            yield deadline.until, ExpiredDeadline(id, min(deadline.iteration, UNCHECKED))
            if deadline.iteration >= 0:
                yield deadline.until - earlier, ExpiredDeadline(id, deadline.iteration)


FIRST_RANK: Final = 30.0
"""Seconds within which the rank that started the monitor has to connect."""
TERMINATED: Final = "TERMINATED"
HARD_TIMEOUT: Final = "HARD_TIMEOUT"
"""Kinds of faults; equal to the names in `attribution.Interruption`."""
VISIT: Final = 2.0
"""Seconds to reach the store, and seconds for its answer."""
LAST_REPORTS: Final = 30.0
"""Seconds for the last reports when the monitor ends."""
LAST_NOTES: Final = 5.0
"""Seconds for writing the last files and notes when the monitor ends; a rank waits as long."""


class Watched:
    """The process of one rank."""

    __slots__ = ("capturing", "connection", "is_being_ended", "pid", "pidfd", "terms")

    def __init__(self, connection: socket.socket) -> None:
        pid, uid = peer_of(connection)
        if uid != os.getuid() or pid <= 0:
            raise PermissionError(f"the monitor cannot signal process {pid} of user {uid}")
        self.connection: socket.socket | None = connection
        """None after the connection ended. The process then ends soon, or connects again."""
        self.pid = pid
        self.pidfd = _pidfd(pid)
        self.terms: Terms | None = None
        """Received with the first packet."""
        self.is_being_ended = False
        """Whether the monitor is ending this rank; the other ranks have received the report."""
        self.capturing = threading.Lock()
        """Held while the stacks of the process are requested."""


class Monitor:
    """Watches the ranks that connect, until none is left.

    Args:
        listener: the socket to which they connect.
        left: called in a thread, with the process ids of the other ranks, when a rank has left or
            ended. It may block.
    """

    def __init__(
        self, listener: socket.socket, left: Callable[[Collection[int]], None] = lambda pids: None
    ) -> None:
        self._left = left
        listener.setblocking(False)
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._deadlines = Deadlines()  # by pidfd
        self._watched: dict[int, Watched] = {}  # by connection and by pidfd
        self._threads: list[threading.Thread] = []
        self._ends = BackgroundWriter(_report_ends, "regrow-reports")
        self._files = BackgroundWriter(_run_writes, "regrow-notes")
        self._streams = BackgroundWriter(_run_writes, "regrow-stderr")

    def run(self) -> None:
        """Watch until the last rank has ended."""
        self.handle_events(time.monotonic() + FIRST_RANK)
        while self._watched:
            self.handle_events(self._deadlines.next())
        self._listener.shutdown(socket.SHUT_RD)  # refuses new connections; keeps the queue
        self._accept()
        self._poll.unregister(self._listener)
        self._listener.close()
        while self._watched:
            self.handle_events(self._deadlines.next())
        self.close()

    def close(self) -> None:
        """Wait for the threads that end ranks, and for the last reports and notes."""
        for thread in self._threads:
            thread.join()
        self._ends.close(LAST_REPORTS)
        self._files.close(LAST_NOTES)

    def handle_events(self, until: float) -> None:
        """Sleep until an event or a time, and handle all events that are due."""
        begin = time.monotonic()
        left = None if until == math.inf else math.ceil(max(until - begin, 0.0) * 1000)
        ready = self._poll.poll(left)
        slept = self._deadlines.woke(begin, until, time.monotonic())
        if slept:
            self._note("", f"the host was suspended for {slept:.3f} s: deadlines are postponed")
        found = [(fd, self._watched[fd]) for fd, _ in ready if fd in self._watched]
        self._accept()  # first: packets on all connections precede the end of a process
        for _, watched in found:
            self._receive(watched)
        for fd, watched in found:
            if fd == watched.pidfd:
                self._ended(watched)
        for due in self._deadlines.due(time.monotonic()):
            watched = self._watched[due.id]
            watched.is_being_ended = watched.is_being_ended or due.iteration < 0
            # In a separate thread, because this takes time.
            thread = threading.Thread(
                target=self._handle_hang, args=(watched, os.dup(watched.pidfd), due.iteration)
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection waits, or it has gone
                return
            connection.setblocking(False)
            try:
                watched = Watched(connection)
            except OSError as error:
                self._note("", f"refused a connection: {error}")
                connection.close()
                continue
            for fd in (connection.fileno(), watched.pidfd):
                self._watched[fd] = watched
                self._poll.register(fd, select.POLLIN)
            self._receive(watched)

    def _receive(self, watched: Watched) -> None:
        """Receive all packets of a rank."""
        while (connection := watched.connection) is not None:
            try:
                packet = connection.recv(LONGEST)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the rank left data unread; its packets are still here
            except OSError:
                packet = b""
            if not packet and watched.terms is not None:
                self._disconnect(watched)
            elif not packet or packet == GOODBYE:
                self._forget(watched)
            else:
                try:
                    self._handle(watched, packet)
                except (ValueError, TypeError, LookupError, struct.error) as error:
                    self._note(
                        "",
                        f"refused a malformed packet of process {watched.pid}: {error}: "
                        f"{packet!r:.200}",
                    )
                    self._forget(watched)

    def _handle(self, watched: Watched, packet: bytes) -> None:
        """Handle a packet.

        Raises:
            Exception: the packet is malformed: ValueError, TypeError, LookupError or struct.error.
        """
        terms = watched.terms
        if terms is not None:
            deadline = RankDeadline(*DEADLINE.unpack(packet))
            self._deadlines.set(watched.pidfd, deadline, terms.hard - terms.overdue)
            return
        first = json.loads(packet)
        terms = Terms(**first["terms"])
        for other in list(self._watched.values()):  # the rank has reconnected
            known = other.terms
            if known is not None and (other.pid, known.group, known.rank) == (
                watched.pid,
                terms.group,
                terms.rank,
            ):
                self._forget(other)
        watched.terms = terms
        deadline = RankDeadline(*first["deadline"])
        self._deadlines.set(watched.pidfd, deadline, terms.hard - terms.overdue)
        self._publish(terms, watched.pid)

    def _publish(self, terms: Terms, pid: int) -> None:
        """Have the files of a rank written; they stay, for launch scripts that read them later.

        Args:
            terms: terms of the rank.
            pid: id of the rank's process.
        """
        if terms.logfile:
            watches = f"the monitor (process {os.getpid()}) watches initial rank {terms.rank}"
            text = f"{watches} (process {pid}); hard time-out {terms.hard:g} s"
            self._note(terms.logfile, text)
        if terms.pidfile:
            self._files.add(partial(_write_pid, terms.pidfile, terms.logfile))

    def _note(self, path: str, text: str) -> None:
        """Have a note written; to stderr if there is no file, or if it cannot be written."""
        self._files.add(partial(_write_note, path, _line(text)))

    def _disconnect(self, watched: Watched) -> None:
        """Close a connection; the state of the process stays unknown."""
        connection, watched.connection = watched.connection, None
        self._deadlines.remove(watched.pidfd)
        if connection is not None:
            del self._watched[connection.fileno()]
            self._poll.unregister(connection)
            terms = watched.terms
            if terms is not None and (terms.logfile or terms.pidfile):
                self._files.add(connection.close)
            else:
                connection.close()

    def _forget(self, watched: Watched) -> None:
        """Stop watching a rank."""
        self._disconnect(watched)
        if self._watched.pop(watched.pidfd, None) is None:
            return
        self._poll.unregister(watched.pidfd)
        os.close(watched.pidfd)
        self._streams.add(partial(self._left, {other.pid for other in self._watched.values()}))

    def _ended(self, watched: Watched) -> None:
        """Handle the end of a process; report it if there was no goodbye."""
        for other in set(self._watched.values()):
            if other.pid == watched.pid:
                self._receive(other)
        if self._watched.get(watched.pidfd) is not watched:  # left, or reconnected
            return
        self._forget(watched)
        if watched.terms is not None and not watched.is_being_ended:
            text = f"process {watched.pid} on {socket.gethostname()} has ended"
            self._ends.add((watched.terms, text))

    def _handle_hang(self, watched: Watched, pidfd: int, iteration: int) -> None:
        """Report a rank without progress; past its hard time-out, end it (SIGTERM, then SIGKILL).

        Args:
            watched: the rank.
            pidfd: descriptor of its process; this function closes it.
            iteration: see `ExpiredDeadline`.
        """
        terms = watched.terms
        assert terms is not None  # a rank with a deadline has terms
        ends = iteration < 0
        why = f"no progress for {terms.hard if ends else terms.soft:g} s"
        if iteration == LIMITED:
            why = "no return in time"
        rank = f"initial rank {terms.rank} (process {watched.pid})"
        try:
            with watched.capturing:
                target = Target(watched.pid, pidfd, awaited=True)
                dump = capture([target])[watched.pid]
            message = f"{why}: {where(dump)}"
            what = "is ended" if ends else "does not answer"
            self._note(terms.logfile, f"{rank} {what}: {message}\n{dump.text}".rstrip())
            report = (
                _end(terms, HARD_TIMEOUT, message) if ends else _overdue(terms, iteration, message)
            )
            try:
                _send(terms, [report])
            except StoreError as error:
                self._note(
                    terms.logfile, f"the store did not receive the report of {rank}: {error}"
                )
            if ends:
                end_process(
                    pidfd,
                    terms.grace,
                    lambda: self._note(
                        terms.logfile,
                        f"{rank} has not ended within {terms.grace:g} s of SIGTERM, and is killed",
                    ),
                )
        finally:
            os.close(pidfd)


def _end(terms: Terms, kind: str, message: str) -> messages.Asked:
    text = message[: messages.TEXT]
    return messages.ReportDead(terms.group, terms.rank, terms.process, kind, text)


def _overdue(terms: Terms, iteration: int, message: str) -> messages.Asked:
    rank, text = (terms.group, terms.rank, terms.process), message[: messages.TEXT]
    return messages.Report(*rank, iteration, messages.OVERDUE, SOFT_TIMEOUT, text)


def _report_ends(ends: list[tuple[Terms, str]], lost: int) -> None:
    """Report ended processes to their store; all ranks of a monitor have the same store."""
    with suppress(StoreError):
        _send(ends[0][0], [_end(terms, TERMINATED, text) for terms, text in ends])


def _send(terms: Terms, reports: Sequence[messages.Asked]) -> None:
    """Send reports to the store of a rank.

    Raises:
        StoreError: the store cannot be reached or did not answer; the text gives the reason.
    """
    with visit(terms.endpoint, bytes.fromhex(terms.token), VISIT) as client:
        for report in reports:
            client.ask(messages.NAME, messages.encode(report), VISIT)


def _run_writes(writes: list[Callable[[], None]], lost: int) -> None:
    for write in writes:
        write()
    if lost:
        _to_stderr(_line(f"{lost} notes are lost, because earlier ones could not be written"))


def _write_note(path: str, line: str) -> None:
    problem = _write(path, line) if path else ""
    if problem or not path:
        _to_stderr(line + problem)


def _write_pid(path: str, logfile: str) -> None:
    problem = _write(path, f"{os.getpid()}\n", mode="w")
    if problem:
        _write_note(logfile, _line(f"the monitor cannot write its pid: {problem.rstrip()}"))


def _write(path: str, line: str, mode: str = "a") -> str:
    """Write a line to a file; return why it cannot be written, or an empty text."""
    try:
        with open(path, mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        return f"{path} cannot be written: {error}\n"
    return ""


def _use_stderr_of(pids: Collection[int]) -> None:
    """Write to the stderr of one of these processes from now on, and close the one before.

    The monitor has inherited the streams of the rank that started it. When that rank has ended, its
    agent waits for the end of these streams. Without processes, the monitor writes to /dev/null:
    its last reports may take longer than the last rank.
    """
    for path in (*(f"/proc/{pid}/fd/2" for pid in pids), os.devnull):
        with suppress(OSError):  # the process has ended, or its stderr is a socket
            stderr = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
            os.set_blocking(stderr, True)  # the open must not wait for a reader, a write may
            for stream in (1, 2):
                os.dup2(stderr, stream)
            os.close(stderr)
            return


def _to_stderr(text: str) -> None:
    left = memoryview(text.encode(errors="backslashreplace"))
    with suppress(OSError):  # its reader has ended
        while left:
            left = left[os.write(2, left) :]


def _line(text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} regrow monitor: {text}\n"


def _pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended and was waited for
        reads, writes = os.pipe2(os.O_CLOEXEC)
        os.close(writes)
        return reads


def serve() -> None:
    """Run the monitor on the listening socket, which is inherited as `LISTENER`."""
    Monitor(socket.socket(fileno=LISTENER), _use_stderr_of).run()
