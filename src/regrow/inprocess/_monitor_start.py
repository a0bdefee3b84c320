"""Finding the monitor of this host, or starting it.

It is found by an abstract unix socket, which belongs to no file system and ends with its last
owner. Whoever finds none binds it, and hands it over to a monitor that it starts; so there is one
at a time, and a rank that connects need not wait until it runs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import sys
import time
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LISTENER: Final = 3
"""The monitor's file descriptor of the socket on which it listens."""

_BOOT: Final = (
    f"import os, sys; os.closerange({LISTENER + 1}, 1 << 20); os.fork() and os._exit(0); "
    "sys.path += sys.argv[1:]; from regrow.inprocess._monitor import serve; serve()"
)
"""What the rank has inherited and lets others inherit, the monitor keeps open for nobody."""
_SETTLE: Final = 5.0
"""Seconds in which somebody else may be at starting or ending a monitor."""
_NAP: Final = 0.005
"""Seconds between two looks whether it has done so."""
_PEER: Final = struct.Struct("3i")
"""A `ucred`: pid, uid and gid."""


def reach(job: str) -> tuple[socket.socket, int]:
    """Connect to the monitor of a job on this host; start it if there is none.

    Args:
        job: what the ranks share that one monitor watches.

    Returns:
        The connection, and the process that was started, for the caller to wait for; 0 if none was.
        It ends at once and leaves the monitor to whoever is above: the monitor is no child of this
        process, which might be killed with all its children.

    Raises:
        OSError: there is none, and none can be started.
    """
    name, deadline, started = monitor_name(job), time.monotonic() + _SETTLE, 0
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(name)
            _check(connection, name)
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


def _check(connection: socket.socket, name: bytes) -> None:
    """Anybody on this host could have bound the name, and is not to have the token.

    Raises:
        PermissionError: another user has.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(raw)
    if uid != os.getuid():
        raise PermissionError(errno.EACCES, f"the socket {name!r} belongs to another user ({uid})")


def _start(name: bytes) -> int:
    """Start the monitor; returns the process that does, 0 where somebody else is about to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise
        listener.listen(1024)
        return _spawn(listener)


def _spawn(listener: socket.socket) -> int:
    from regrow.store._process import _RESET_SIGNALS, _import_paths

    # Of a number that none of the others takes before it is its turn.
    ours = fcntl(listener, F_DUPFD_CLOEXEC, LISTENER + 1)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _BOOT, *_import_paths()],
            _environment(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
                (os.POSIX_SPAWN_DUP2, ours, LISTENER),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=_RESET_SIGNALS,
        )
    finally:
        os.close(ours)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the monitor's: it is none of the workers, and belongs to all of them.

    An agent kills what a worker leaves behind, by the mark that it finds there. The monitor has
    that of the agent itself, so that it goes with the last of the workers at the latest.
    """
    from regrow.store._process import _FOR_WORKERS
    from regrow.workers._procfs import MARK

    found = {name: value for name, value in environ.items() if name not in _FOR_WORKERS}
    if MARK in found:
        found[MARK] = found[MARK].rstrip("/").rpartition("/")[0] + "/"
    return found


def monitor_name(job: str) -> bytes:
    """Return the name of the socket, in the namespace of those that have no file.

    Args:
        job: what the ranks share. Those of another user, or with other process ids, have another
            monitor, which can signal them.
    """
    pids = Path("/proc/self/ns/pid").readlink()
    secret = hashlib.blake2b(f"{os.getuid()} {pids} {job}".encode(), digest_size=16).hexdigest()
    return f"\0regrow-monitor-{secret}".encode()
