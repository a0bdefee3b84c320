"""Ending the connections of this process's gloo groups, and nobody else's.

A rank that waits in a gloo collective waits for a thread of gloo's, which waits in `epoll_wait` for
the sockets to the other ranks. torch has no call that ends this: destroying, aborting or shutting
down the group does nothing for who waits in it. But when a socket is shut down, gloo's thread reads
the end of the stream from it, closes it, and fails all that waits for it, within a millisecond.

Which sockets are gloo's, nobody says; a process may have connections of its own, stores with TCP
connections, and servers that use epoll as gloo does. What tells them apart for certain is what gloo
itself registered: with each descriptor, epoll keeps the address of the object that handles it, and
the kernel shows it (`/proc/self/fdinfo`). The first word of a C++ object points to the virtual
table of its class, and the dynamic linker knows the name of that. A descriptor is a connection of a
group's if, and only if, its object is a `gloo::transport::tcp::Pair`. It is a listening socket, or
a connection that is only being made, if the object is of another class: those are left alone, since
gloo ends the process when they fail. Who waits for those is woken otherwise (`_torch_connecting`).

Each fact is checked against the socket that is acted on: between two looks gloo may close it, and
somebody else be given its number. So the descriptor is duplicated first, and the duplicate must be
of the inode that epoll has; and memory is read through `/proc/self/mem`, where an object that is
gone is an error and not a crash.

The classes are exported by the builds of torch on PyPI and pytorch.org. Where they are not, no
connection is found, and none is ended. Nor are those of gloo's other transports (ibverbs, libuv).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

PAIRS = frozenset(
    {b"_ZTVN4gloo9transport3tcp4PairE", b"_ZTVN4gloo9transport3tcp3tls4PairE"},
)
"""Virtual tables of what handles a connection: `gloo::transport::tcp::Pair`, and the one in TLS."""

STACK = 1 << 14
"""Bytes of a stack that are looked at, from the innermost on."""

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


class Watched(NamedTuple):
    """A descriptor that an epoll instance waits for."""

    fd: int
    handler: int
    """What was registered with it: 64 bits, the address of an object if it is gloo's."""
    inode: int


def end_gloo_connections() -> int:
    """Shut down the connections of all gloo groups of this process; how many there were.

    Whoever waits in one of the groups, here or on another rank, then fails.

    Raises:
        OSError: `/proc/self` cannot be read, as in a process that is not its owner's.
    """
    ended = 0
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for each in watched():
            if class_of(each.handler, memory.fileno()) in PAIRS:
                ended += _shut(each)
    return ended


def watched() -> Iterator[Watched]:
    """All that the epoll instances of this process wait for."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":  # noqa: PTH115
                continue
            with open(f"/proc/self/fdinfo/{name}", "rb") as info:
                lines = info.read()
            for fd, handler, inode in _WATCHED.findall(lines):
                yield Watched(int(fd), int(handler, 16), int(inode, 16))


def class_of(address: int, memory: int) -> bytes | None:
    """The symbol of the virtual table of an object; None: there is no such object."""
    try:
        (table,) = struct.unpack("P", os.pread(memory, struct.calcsize("P"), address))
    except (OSError, OverflowError, struct.error):
        return None
    return symbol_at(table)


def symbol_at(address: int) -> bytes | None:
    """The symbol of what is at an address; None: the dynamic linker knows of none."""
    name: bytes | None = _known_of(address).name
    return name


def library_of(address: int) -> str:
    """The path of the library that something at an address belongs to; "": of none."""
    return os.fsdecode(_known_of(address).file or b"")


def is_in(function: bytes, stack: int, memory: int) -> bool:
    """Whether a function that has this in its symbol is to be returned to.

    Args:
        function: a part of a symbol.
        stack: the address of the innermost end of a stack.
        memory: a descriptor of `/proc/self/mem`.

    Raises:
        OSError: there is no such stack.
    """
    words = os.pread(memory, STACK, stack)
    addresses = struct.unpack(f"{len(words) // 8}Q", words[: len(words) // 8 * 8])
    return any(function in (symbol_at(each) or b"") for each in addresses if each >> 32)


def duplicate(watched: Watched) -> socket.socket | None:
    """Return the socket that is watched, under a descriptor of the caller's; None if it is gone."""
    try:
        fd = os.dup(watched.fd)
    except OSError:
        return None
    if os.fstat(fd).st_ino != watched.inode:
        os.close(fd)
        return None
    return socket.socket(fileno=fd)


def _known_of(address: int) -> _Symbol:
    """What the dynamic linker knows; nothing is set if that is nothing."""
    symbol = _Symbol()
    _dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    return symbol


def _shut(watched: Watched) -> bool:
    connection = duplicate(watched)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            return False
    return True
