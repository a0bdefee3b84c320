"""Ending the wait of a thread in torch's TCPStore, if the wrapped function has made that store.

A thread that waits for a key there waits in C++ for the answer on its connection, and no signal
reaches Python. When the connection is shut down, the call fails at once, with torch's error for a
server that is gone; and so does every later call on that store object, as it connects only once. So
this is for stores that go with the function: those whose connection was made since it was called. A
store from outside is to live on, and is left alone. Its wait ends at its own time-out.

The connection is that for which the thread waits in `poll` or `recv`, as the kernel shows; and the
thread waits in a TCPStore if, and only if, a function of that class is to be returned to, whose
address is on its stack. Where the kernel or the linker does not show that, nothing is ended.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
from contextlib import suppress
from typing import Final, NamedTuple

from regrow.inprocess._torch_sockets import symbol_at

STORE: Final = b"N4c10d8TCPStore"
"""In the symbols of all methods of `c10d::TCPStore`."""
STACK: Final = 1 << 14
"""Bytes of the stack that are looked at, from the innermost on."""


class _Calls(NamedTuple):
    """The numbers of the system calls that a thread may wait in."""

    poll: int
    recv: int


_CALLS: Final = {"x86_64": _Calls(7, 45), "aarch64": _Calls(73, 207)}


def sockets() -> frozenset[int]:
    """Return the inodes of all sockets of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - shows what is no path
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return frozenset(inodes)


def end_store_wait(thread: int, outside: frozenset[int]) -> bool:
    """End the wait of a thread of this process in a TCPStore; whether there was one.

    Args:
        thread: its native id.
        outside: the inodes of sockets that are to be left alone.

    Raises:
        OSError: `/proc/self` cannot be read.
    """
    with open(f"/proc/self/task/{thread}/syscall", "rb") as file:
        found = file.read().split()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        fd = _waited_for(found, memory.fileno())
        if fd is None or not _in_store(int(found[-2], 16), memory.fileno()):
            return False
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if os.fstat(connection.fileno()).st_ino not in outside:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False  # also where it has ended meanwhile


def _waited_for(found: list[bytes], memory: int) -> int | None:
    """The descriptor of the one socket that a thread waits for, if it does that."""
    calls = _CALLS.get(platform.machine())
    if calls is None or len(found) < 9:  # it runs, or waits for something else
        return None
    number, first, second = int(found[0]), int(found[1], 16), int(found[2], 16)
    if number == calls.recv:
        return first
    if number == calls.poll and second == 1:
        with suppress(OSError, OverflowError, struct.error):
            fd: int = struct.unpack("i", os.pread(memory, 4, first))[0]
            return fd
    return None


def _in_store(stack: int, memory: int) -> bool:
    words = os.pread(memory, STACK, stack)
    addresses = struct.unpack(f"{len(words) // 8}Q", words[: len(words) // 8 * 8])
    return any(STORE in (symbol_at(each) or b"") for each in addresses if each >> 32)
