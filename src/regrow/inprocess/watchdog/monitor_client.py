"""Connection of a rank to the monitor of its host, for time-outs that the rank cannot enforce.

A rank without progress may be unable to act. Native code can hold the interpreter's lock, and a
stopped process runs no code. So a separate process enforces the hard time-out: the `monitor`, one
for the ranks of a job on a host. It also enforces the soft time-out of a rank that should have
reported it and did not.

The rank sends the time until which it may continue without progress. Each message is one packet and
never blocks: if the buffer is full, the next message has the same content. If the monitor has
ended, the thread that looks for progress starts it again.

A rank that no longer needs the monitor sends a goodbye. A connection that ends without a goodbye
has two possible causes. The process has ended, which the kernel then reports to the monitor, or the
process reconnects.

Ranks find the monitor by an abstract unix socket. Such a socket belongs to no file system and ends
with its last owner. A rank that finds none binds it, starts a monitor and hands it the socket. So
there is one monitor at a time, and a rank that connects need not wait until the monitor runs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import socket
import struct
import time
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from regrow.timer.stacks.answering import arm
from regrow.utils import Backoff
from regrow.utils.logging import library_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.inprocess.call.wrapper import Wrapper
    from regrow.inprocess.group.service_link import ServiceLink
    from regrow.inprocess.store import TCPStore

logger = library_logger(__name__)


MARGIN: Final = 1.0
"""Longest margin in seconds for a rank to report its own soft time-out, before the monitor does.

The margin is at most half of the time from the soft to the hard time-out. It is at least the pause
between two checks of progress, because the monitor knows progress from these checks only.
"""
UNCHECKED: Final = -1
"""Replaces an iteration: the monitor reports no soft time-out of this rank."""
LIMITED: Final = -2
"""As `UNCHECKED`; the rank is ended at its deadline even if it makes progress."""


DEADLINE: Final = struct.Struct("<Qdq")
"""Format of a `RankDeadline`; its time is in seconds of CLOCK_MONOTONIC."""
GOODBYE: Final = b"goodbye"
"""Last packet of a rank that no longer needs the monitor."""
LONGEST: Final = 1 << 16
"""Largest packet in bytes."""
_LONGEST_PAUSE: Final = 60.0
"""Longest pause between two attempts to start a monitor again, in seconds."""
_LEAVE_TIME: Final = 5.0
"""Seconds for the monitor to write the files of a rank at the end of the call.

A busy host takes more than a second to start the monitor.
"""


class RankDeadline(NamedTuple):
    """Message of a rank about its deadlines."""

    change: int
    """Number of the change to which this belongs; messages about earlier changes are ignored."""
    until: float
    """When the rank is to be ended; infinity: never."""
    iteration: int = UNCHECKED
    """The iteration to end at the soft time-out."""


def overdue_after(soft: float, hard: float, interval: float) -> float:
    """Return how many seconds without progress pass before the monitor reports a rank.

    Args:
        soft: the rank's soft time-out, seconds.
        hard: its hard time-out, seconds.
        interval: the pause between two checks of its own, seconds.
    """
    return soft + max(min(MARGIN, (hard - soft) / 2), interval)


class Terms(NamedTuple):
    """The facts that the monitor needs about a rank."""

    rank: int
    """The initial rank."""
    hard: float
    """Seconds without progress after which the rank is ended."""
    grace: float
    """Seconds from SIGTERM to SIGKILL."""
    group: str
    """Name of the rank's group in its store."""
    process: str = ""
    """Name of this process there. Empty if no other process can take over the rank."""
    endpoint: str = ""
    """Address of the group's store."""
    token: str = ""
    """Token of that store, as hexadecimal digits."""
    logfile: str = ""
    """File to which the monitor appends its notes about the rank; empty: stderr."""
    pidfile: str = ""
    """File into which the monitor writes its pid; the file stays. Empty: none."""
    soft: float = math.inf
    """Seconds without progress after which the other ranks restart."""
    overdue: float = math.inf
    """Result of `overdue_after`."""


class HardWatch:
    """Sends the deadlines of one rank to the monitor of this host.

    Args:
        terms: terms of the rank.
        job: value shared by the ranks of one monitor.
    """

    def __init__(self, terms: Terms, job: str) -> None:
        self._terms = terms
        self._pid = os.getpid()
        self._job = job
        self._socket: socket.socket | None = None
        self._sent: RankDeadline | None = None  # the last message that was sent
        self._backoff = Backoff(1.0, _LONGEST_PAUSE)
        self._try_at = 0.0
        self._warned = False
        self._started = 0  # pid of a process to wait for
        self.changes = 0
        """Number of changes that the main thread has sent."""
        arm()  # so that the monitor can request the stacks of this process
        self.reconnect(RankDeadline(0, math.inf))

    def change(self, until: float, iteration: int) -> None:
        """Set the time until which this rank may continue; for the main thread.

        Args:
            until: seconds on the monotonic clock; infinity: without a limit.
            iteration: the iteration that ends at the soft time-out before that, or `UNCHECKED`.
        """
        self.changes += 1
        self.send(RankDeadline(self.changes, until, iteration))

    def send(self, deadline: RankDeadline) -> None:
        """Send a deadline; its `change` is the value of `changes` from before it was computed."""
        connection = self._socket
        if deadline == self._sent or connection is None or self._pid != os.getpid():
            return  # a forked child has its parent's connection and must not use it
        try:
            connection.send(DEADLINE.pack(*deadline), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the next message has the same content
        except OSError:
            self._disconnect(connection)
            return
        self._sent = deadline

    def reconnect(self, deadline: RankDeadline) -> None:
        """Start a monitor if it has ended, and send it this message; for one thread at a time."""
        self._reap()
        self._detect_end()
        if time.monotonic() < self._try_at:
            return
        if self._socket is not None:
            self._backoff.reset()  # the monitor has outlasted the pause since its start
            return
        lost, self._try_at = bool(self._try_at), time.monotonic() + self._backoff.next()
        if lost and not self._warned:
            self._warned = True
            logger.warning(
                "the monitor process that enforces the hard time-out of initial rank %d has ended; "
                "starting another one",
                self._terms.rank,
            )
        try:
            connection, self._started = connect_monitor(self._job)
            connection.setblocking(True)  # in spite of a default time-out: the listener waits
            # In one packet: between two, the main thread may take the interpreter's lock and keep
            # it.
            first = {"terms": self._terms._asdict(), "deadline": deadline}
            packet = json.dumps(first).encode()
            connection.send(packet, socket.MSG_DONTWAIT)
        except OSError as error:
            logger.error(
                "no monitor can be started, so the hard time-out of %g s of initial rank %d is not "
                "enforced: %s",
                self._terms.hard,
                self._terms.rank,
                error,
            )
            return
        self._sent = None
        self._socket = connection

    def close(self) -> None:
        """End the connection: this rank no longer needs the monitor."""
        connection, self._socket = self._socket, None
        if connection is not None and self._pid == os.getpid():
            with suppress(OSError):
                connection.send(GOODBYE, socket.MSG_DONTWAIT)
                if self._terms.logfile or self._terms.pidfile:
                    # The monitor may have just started; wait until it has written the files.
                    connection.settimeout(_LEAVE_TIME)
                    while connection.recv(LONGEST):
                        pass
        if connection is not None:
            connection.close()
        self._reap()

    def _detect_end(self) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            ended = not connection.recv(LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        if self._socket is connection:
            self._socket, self._sent = None, None
        connection.close()

    def _reap(self) -> None:
        """Wait for the process that started the monitor; it ends at once."""
        if self._started:
            with suppress(ChildProcessError):  # other code has waited for all children
                os.waitpid(self._started, 0)
            self._started = 0


LISTENER: Final = 3
"""Descriptor of the listening socket in the monitor."""

_BOOT: Final = (
    f"import os, sys; os.closerange({LISTENER + 1}, 1 << 20); os.fork() and os._exit(0); "
    "sys.path += sys.argv[1:]; from regrow.inprocess.watchdog.monitor import serve; serve()"
)
"""Start code of the monitor; it closes all other descriptors that the rank passes on."""
_SETTLE: Final = 5.0
"""Seconds in which another process may be starting or ending a monitor."""
_NAP: Final = 0.005
"""Seconds between two checks whether it has finished."""
_PEER: Final = struct.Struct("3i")
"""Format of a `ucred`: pid, uid and gid."""


def connect_monitor(job: str) -> tuple[socket.socket, int]:
    """Connect to the monitor of a job on this host; start one if there is none.

    Args:
        job: value shared by the ranks of one monitor.

    Returns:
        The connection, and the pid of the process that was started; 0 without one. The caller has
        to wait for that process, which ends at once. The monitor is therefore no child of the
        caller, which might be killed with all its children.

    Raises:
        OSError: there is no monitor, and none can be started.
    """
    name, deadline, started = monitor_name(job), time.monotonic() + _SETTLE, 0
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(name)
            # Any process on this host could have bound the name, and must not receive the token.
            _, uid = peer_of(connection)
            if uid != os.getuid():
                raise PermissionError(
                    errno.EACCES, f"the socket {name!r} belongs to another user ({uid})"
                )
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() >= deadline:
                raise
            started = started or _start(name)
            time.sleep(0 if started else _NAP)
        except BaseException:
            connection.close()
            raise
        else:
            return connection, started


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end of a unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(raw)
    return pid, uid


def _start(name: bytes) -> int:
    """Start the monitor; return the starting process's pid, 0 if another process starts it."""
    from regrow.store import import_paths
    from regrow.utils import spawn_helper

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise
        listener.listen(1024)
        # Use a number above all target numbers, so that no dup2 overwrites it before its turn.
        ours = fcntl(listener, F_DUPFD_CLOEXEC, LISTENER + 1)
        try:
            return spawn_helper(
                ["-I", "-S", "-c", _BOOT, *import_paths()],
                monitor_environment(os.environ),
                [
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 2, 1),
                    (os.POSIX_SPAWN_DUP2, ours, LISTENER),
                ],
            )
        finally:
            os.close(ours)


def monitor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the monitor, which serves all workers and is not one itself.

    An agent kills the processes that a worker leaves behind. It identifies them by the worker's
    mark. The monitor serves all workers, so it gets the agent's mark. It ends at the latest with
    the last worker.
    """
    from regrow.store import FOR_WORKERS
    from regrow.workers.guardian.procfs import MARK

    found = {name: value for name, value in environ.items() if name not in FOR_WORKERS}
    if MARK in found:
        found[MARK] = _agent(found)
    return found


def _agent(environ: Mapping[str, str]) -> str:
    """Return the mark of the agent, computed from its worker's; empty without an agent."""
    from regrow.workers.guardian.procfs import MARK

    mark = environ.get(MARK, "")
    return mark.rstrip("/").rpartition("/")[0] + "/" if mark else ""


def monitor_name(job: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the name of the monitor's socket, in the abstract namespace.

    Args:
        job: value shared by the ranks, which contains a secret. The user, the pid namespace and the
            agent are part of the name as well. A monitor can signal only processes of its user and
            namespace. An agent ends the monitor of its workers with them.
        environ: environment of a rank.
    """
    pids = Path("/proc/self/ns/pid").readlink()
    whose = f"{os.getuid()} {pids} {_agent(environ)} {job}"
    secret = hashlib.blake2b(whose.encode(), digest_size=16).hexdigest()
    return f"\0regrow-monitor-{secret}".encode()


def open_monitor(
    store: TCPStore, link: ServiceLink, group: str, rank: int, config: Wrapper
) -> HardWatch:
    """Return the watch that reports this rank's time-outs and its end from outside the process.

    Args:
        store: the store in which the group meets.
        link: the link of this rank.
        group: the name of the group in the store.
        rank: the initial rank.
        config: the configuration of the wrapper.
    """
    soft, hard = config.soft_timeout.total_seconds(), config.hard_timeout.total_seconds()
    endpoint, token = store.whereabouts()
    terms = Terms(
        rank,
        hard,
        config.termination_grace_time.total_seconds(),
        group,
        process=link.process,
        endpoint=endpoint,
        token=token.hex(),
        logfile=(config.monitor_process_logfile or "").format(rank=rank),
        pidfile=(config.monitor_process_pidfile or "").format(rank=rank),
        soft=soft,
        overdue=overdue_after(soft, hard, config.progress_watchdog_interval.total_seconds()),
    )
    return HardWatch(terms, monitor_job(endpoint, token))


def monitor_job(endpoint: str, token: bytes) -> str:
    """Return a value that the ranks of one monitor share, and that no other user can guess.

    Otherwise another user of this host could bind the monitor's socket before the ranks do. They
    would then have no hard time-out.

    Args:
        endpoint: address of the ranks' store.
        token: token of that store.
    """
    return f"{endpoint} {token.hex()}"
