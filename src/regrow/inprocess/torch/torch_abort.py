"""Abort torch's process groups: ranks that wait in a collective fail, and new groups can be made.

The abort runs in another thread than the wrapped function. The function may be waiting in any
group, so the abort ends all groups. These include groups that the user made, and groups that are
being made.

How the abort wakes each kind of wait:

- gloo: it shuts down the connections of the groups (see below). All collectives, sends, receives
  and `Work.wait` fail within milliseconds.
- NCCL: torch aborts the communicators, all within one `ncclGroupStart`. One after the other, they
  could wait for each other without end. Then the groups are destroyed.
- A thread that makes a group waits in the group's store, and may start this wait after the abort.
  So its connection to a TCPStore is shut down repeatedly while the function is interrupted.

The abort does not wake these waits:

- `recv` without a source on gloo;
- a thread that waits for a message which gloo has sent or received in part;
- a thread that makes a gloo group and waits for a rank to connect;
- a wait in a FileStore, or in a TCPStore that outlives the function;
- gloo over ibverbs or libuv, MPI, UCC.

Such a wait ends at its own time-out, or the process ends at the hard time-out. A group with a
`regrow.store.torch.TorchStore` waits in Python code, so an interrupt reaches it.

The interrupted thread may be at any point in making a group, so torch's tables may be incomplete.
Torch derives the names of groups from counts in these tables. Ranks with different counts never
meet again. So an abort always empties the tables, and a second abort follows when the function has
ended.

NCCL's watchdog ends the process when a collective exceeds its time-out. So the time-out of a group
should be longer than the hard time-out. `warn_of_short_timeouts` logs a warning if it is not.

The abort ends a wait in torch by shutting down torch's connections and no others.

**gloo.** A rank that waits in a collective waits for a gloo thread. That thread waits in
`epoll_wait` for the sockets to the other ranks. torch has no call that ends this wait: destroying,
aborting or shutting down the group has no effect on a thread that waits in it. But when a socket is
shut down, gloo's thread reads the end of the stream and closes the socket. It then fails all
operations that wait for this socket, within a millisecond. The exception is a message that was sent
or received in part: gloo loses track of the thread that waits for it.

A process may have other connections in epoll, its own or those of libraries such as gRPC. Ending
one would harm the user's program. gloo's own registration in epoll identifies its connections. With
each descriptor, epoll keeps the address of the object that handles it, and the kernel shows this
address (`/proc/self/fdinfo`). The first word of a C++ object points to the virtual table of its
class, and the dynamic linker knows the name of that table. A descriptor is a connection of a group
if, and only if, its object is a `gloo::transport::tcp::Pair`. Listening sockets, and connections
that are still being made, have objects of other classes. The abort does not touch them, because
gloo ends the process when they fail.

The builds of torch on PyPI and pytorch.org export these classes. In a build that does not, no
connection is found, and none is ended. The same holds for gloo's other transports (ibverbs, libuv).

**TCPStore.** A thread that waits for a key waits for the answer on its connection to the server.
When the connection is shut down, the call fails at once. Every later call on that store object also
fails, because it connects only once. So the abort shuts down only connections to stores that end
with the function. Such a connection was made after the call of the function, to `MASTER_PORT` or to
the port of a process group's store. Its socket is blocking, and regrow's own sockets never are.

Each fact is checked on the same socket that is shut down, because between two checks a descriptor
may be closed and its number reused. So the descriptor is duplicated first, and the duplicate must
have the inode that was seen. Memory is read through `/proc/self/mem`, where reading a deleted
object gives an error and not a crash.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from regrow.utils.logging import library_logger

logger = library_logger(__name__)


WATCHED: Final = {"nccl"}
"""Backends with a watchdog that ends the process; gloo raises an exception instead."""


def abort_process_groups() -> None:
    """Abort and destroy all process groups of this process, if there are any.

    Exceptions from torch are logged, and the groups count as destroyed.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    try:
        end_gloo_connections()
    except OSError as error:
        logger.warning(
            "cannot wake a rank in a gloo collective, because /proc/self cannot be read (%s): it "
            "waits for its own time-out, or for hard_timeout",
            error,
        )
    world = c10d._world
    if c10d.GroupMember.WORLD not in world.pg_map:  # the default group is still being made
        c10d._update_default_pg(next(iter(world.pg_map), None))
    if c10d.GroupMember.WORLD is not None:
        try:
            c10d._abort_process_group()
        except Exception:
            logger.exception(
                "the abort of torch's process groups failed; they are destroyed without it"
            )
            with suppress(Exception):
                distributed.destroy_process_group()
    world.group_count = 0


def process_groups() -> list[object]:
    """Return the process groups of this process, from torch's table."""
    from torch import distributed

    if not distributed.is_available():
        return []
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)


def write_trace(folder: str, iteration: int) -> None:
    """Write the collectives in progress to `FOLDER/iter_ITERATION/_dump_RANK.json`.

    It writes nothing without a process group, or with a torch before 2.8, which has no such
    recorder. The main thread may be blocked in a collective. So the recorder is read without
    Python's lock, and without stacks, which would need that lock. An error is logged and not
    raised, because a trace must not delay the abort.

    Args:
        folder: folder of the traces; created if it does not exist.
        iteration: number of the call of the wrapped function.
    """
    import torch._C._distributed_c10d as recorder
    from torch import distributed

    read = getattr(recorder, "_dump_fr_trace_json", None)
    if read is None or not distributed.is_initialized():
        return
    try:
        path = Path(folder, f"iter_{iteration}", f"_dump_{distributed.get_rank()}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(includeCollectives=True, onlyActive=True))
    except Exception as error:  # noqa: BLE001 - the recorder raises types of its own
        logger.warning("the trace of torch's collectives cannot be written: %s", error)


def warn_of_short_timeouts(groups: Iterable[Any], limit: timedelta) -> None:
    """Log a warning if a watchdog of torch may end this process before `limit` has passed.

    The same warning is logged once per process.

    Args:
        groups: the process groups of this process.
        limit: the hard time-out.
    """
    for group in groups:
        for backend in _backends(group):
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if backend.name() in WATCHED and timeout is not None and timeout < limit:
                _warn_once(backend.name(), timeout, limit)


@cache
def _warn_once(backend: str, timeout: timedelta, limit: timedelta) -> None:
    logger.warning(
        "a process group of %s has a time-out of %s s, which is shorter than hard_timeout, %s s: it"
        " may end the process before the wrapper can restart it; give init_process_group and"
        " new_group a longer timeout",
        backend,
        timeout.total_seconds(),
        limit.total_seconds(),
    )


def _backends(group: Any) -> Iterator[Any]:
    """Yield each backend of a group once, even if it serves several kinds of devices."""
    seen: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if not any(backend is other for other in seen):
            seen.append(backend)
            yield backend


PAIRS = frozenset(
    {b"_ZTVN4gloo9transport3tcp4PairE", b"_ZTVN4gloo9transport3tcp3tls4PairE"},
)
"""Virtual tables of connection handlers: `gloo::transport::tcp::Pair`, without and with TLS."""
WAKE_DELAY: Final = 0.02
"""Seconds for the interrupt to end the function, before the connections of stores are ended."""

_dladdr = ctypes.CDLL(None).dladdr
_WATCHED = re.compile(
    rb"tfd: *(\d+) .*data: *([0-9a-f]+) .*ino: *([0-9a-f]+)",
)


class _Symbol(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _WatchedSocket(NamedTuple):
    """A descriptor that an epoll instance waits for."""

    fd: int
    handler: int
    """Data registered with the descriptor: 64 bits; for gloo, the address of an object."""
    inode: int


def end_gloo_connections() -> int:
    """Shut down the connections of all gloo groups of this process.

    Threads that wait in one of the groups then fail, on this rank and on the others.

    Returns:
        The number of connections that were shut down.

    Raises:
        OSError: `/proc/self` is not readable, because the process does not own its entries there.
    """
    ended = 0
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for each in _watched():
            if _class_of(each.handler, memory.fileno()) in PAIRS:
                ended += _shut_down(each.fd, each.inode)
    return ended


def store_waking() -> Callable[[], None]:
    """Return a function that ends waits in a TCPStore; call this before the wrapped function.

    Another thread calls the result repeatedly, from the interrupt until the wrapped function has
    ended. The result does nothing for the first `WAKE_DELAY` seconds.
    """
    outside = frozenset(_sockets().values())
    begun: list[float] = []

    def wake() -> None:
        begun.append(time.monotonic())
        if begun[-1] - begun[0] < WAKE_DELAY or "torch" not in sys.modules:
            return
        ports = _store_ports()
        for fd, inode in _sockets().items():
            if inode not in outside and _leads_to(fd) in ports:
                _shut_down(fd, inode)

    return wake


def _store_ports() -> set[int]:
    """Return the ports of the TCPStores that process groups use, or are being made with."""
    from torch import distributed

    text = os.environ.get("MASTER_PORT", "")
    ports = {int(text)} if text.isascii() and text.isdecimal() else set()
    if distributed.is_available():
        for _, store in list(distributed.distributed_c10d._world.pg_map.values()):
            below: Any = store
            while below is not None:
                ports.add(getattr(below, "port", 0))
                below = getattr(below, "underlying_store", None)
    return ports


def _leads_to(fd: int) -> int:
    """Return the remote port of a blocking TCP connection; -1 for any other descriptor."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if tcp and os.get_blocking(connection.fileno()):
            return int(connection.getpeername()[1])
    return -1


def _sockets() -> dict[int, int]:
    """Return the inodes of all sockets of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - the target is not a path
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _watched() -> Iterator[_WatchedSocket]:
    """Yield all descriptors that the epoll instances of this process wait for."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":  # noqa: PTH115
                continue
            with open(f"/proc/self/fdinfo/{name}", "rb") as info:
                lines = info.read()
            for fd, handler, inode in _WATCHED.findall(lines):
                yield _WatchedSocket(int(fd), int(handler, 16), int(inode, 16))


def _class_of(address: int, memory: int) -> bytes | None:
    """Return the symbol of an object's virtual table; None if there is no such object."""
    try:
        (table,) = struct.unpack("P", os.pread(memory, struct.calcsize("P"), address))
    except (OSError, OverflowError, struct.error):
        return None
    symbol = _Symbol()
    _dladdr(ctypes.c_void_p(table), ctypes.byref(symbol))
    name: bytes | None = symbol.name
    return name


def _shut_down(fd: int, inode: int) -> bool:
    """Shut down a socket, unless its descriptor was reused; return whether it was shut down."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer closed first
            return False
    return True
