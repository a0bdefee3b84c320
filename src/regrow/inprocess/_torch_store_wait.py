"""Ending the wait of a thread in torch's TCPStore, if the wrapped function has made that store.

A thread that waits for a key there waits in C++ for the answer on its connection, and no signal
reaches Python. When the connection is shut down, the call fails at once, with torch's error for a
server that is gone; and so does every later call on that store object, as it connects only once. So
this is for stores that go with the function: those whose connection was made since it was called. A
store from outside is to live on, and is left alone. Its wait ends at its own time-out.

The connection is that for which the thread waits in `poll` or `recv`, as the kernel shows; and the
thread waits in a TCPStore if, and only if, a function of that class is to be returned to, whose
address is on its stack. Where the kernel or the linker does not show that, nothing is ended.

Who makes a TCPStore that it serves itself sleeps until all workers are connected, and asks its own
server for their number every 10 ms. So a thread that sleeps in there is looked at for two of its
turns, in one of which it is met when it asks.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import time
from contextlib import suppress
from io import FileIO
from typing import Final, NamedTuple

from regrow.inprocess._torch_sockets import is_in

STORE: Final = b"N4c10d8TCPStore"
"""In the symbols of all methods of `c10d::TCPStore`."""
TURNS: Final = 0.025
"""Seconds for which a thread that sleeps is looked at."""


class _Calls(NamedTuple):
    """The numbers of the system calls that a thread may wait in."""

    poll: int
    recv: int
    sleep: int


_CALLS: Final = {"x86_64": _Calls(7, 45, 230), "aarch64": _Calls(73, 207, 115)}


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
    calls = _CALLS.get(platform.machine())
    with (
        open(f"/proc/self/task/{thread}/syscall", "rb", buffering=0) as file,
        open("/proc/self/mem", "rb", buffering=0) as memory,
    ):
        found = _look(file)
        if calls is None or not found or found[0] not in calls:
            return False
        if not is_in(STORE, found[-2], memory.fileno()):
            return False
        until = time.monotonic() + TURNS
        while (fd := _waited_for(calls, found, memory.fileno())) is None:
            if time.monotonic() >= until:
                return False
            found = _look(file)
        with suppress(OSError), open(os.dup(fd), "rb", buffering=0) as copy:
            # Asked again: a thread that slept may have left the store, and wait for something else.
            if not is_in(STORE, found[-2], memory.fileno()):
                return False
            if os.fstat(copy.fileno()).st_ino not in outside:
                with socket.socket(fileno=os.dup(copy.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                return True
    return False  # also where it has ended meanwhile


def _look(file: FileIO) -> list[int]:
    """The number of the system call that a thread is in, arguments, the stack; [] if it runs."""
    file.seek(0)
    number, *rest = file.read().split()
    return [int(number), *(int(each, 16) for each in rest)] if rest else []


def _waited_for(calls: _Calls, found: list[int], memory: int) -> int | None:
    """The descriptor of the one socket that a thread waits for, if it does that."""
    match found:
        case [calls.recv, fd, *_]:
            return fd
        case [calls.poll, first, 1, *_]:
            with suppress(OSError, OverflowError, struct.error):
                waited: int = struct.unpack("i", os.pread(memory, 4, first))[0]
                return waited
    return None
