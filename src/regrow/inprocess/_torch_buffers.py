"""Waking who waits for a gloo message that was half-way when its connection ended.

When a connection ends, gloo fails all that waits for it, but for the message that is under way: the
one of which a part was read, and those that wait for room to be written. It is in none of the lists
that gloo goes through then (`gloo::transport::tcp::Pair::signalException`), so who waits for it
does so until the time-out of the group. The more there is to send, the likelier that is: of 3,000
restarts of three ranks in all-reduces of up to 400 kB, four came to it.

What gloo leaves out is done here, by its own means: the buffer that is waited for is told of an
exception (`UnboundBuffer::signalException`), made as the C++ runtime makes one. The buffer is the
object that holds the futex for which the thread sleeps, as the kernel shows; and its first word has
to point to the virtual table of that class, as in `_torch_sockets`.

The buffer lives as long as somebody waits in it, and a wait may end at any time. So nothing is done
while there is a connection of gloo's whose end may yet wake somebody. Once there is none, what
still sleeps there has been forgotten, and only its time-out could end it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from functools import cache
from typing import Any, Final

from regrow.inprocess._torch_sockets import PAIRS, class_of, is_in, library_of, watched

BUFFER: Final = b"_ZTVN4gloo9transport3tcp13UnboundBufferE"
"""Virtual table of what a message is read into, or written from."""
WAITS: Final = b"N4gloo9transport3tcp13UnboundBuffer8wait"
"""In the symbols of the two methods that wait."""
MESSAGE: Final = b"the connection has ended, with a message half-way"

_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
"""The number of the system call by which a thread sleeps."""
_BYTES: Final = 256
"""How far into a buffer its futexes are, at most."""
_SIGNAL: Final = (
    "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"
)


def end_gloo_waits() -> int:
    """Wake all threads that gloo has forgotten; how many there were.

    Raises:
        OSError: `/proc/self` cannot be read.
    """
    ended = 0
    with open("/proc/self/mem", "rb", buffering=0) as file:
        memory = file.fileno()
        if any(class_of(each.handler, memory) in PAIRS for each in watched()):
            return 0
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError):  # the thread has ended meanwhile
                buffer = _waited_for(task, memory)
                if buffer is not None:
                    _signal(buffer)
                    ended += 1
    return ended


def _waited_for(task: str, memory: int) -> int | None:
    """The address of the buffer for which a thread sleeps, if it does that."""
    with open(f"/proc/self/task/{task}/syscall", "rb", buffering=0) as file:
        number, *rest = file.read().split()
    if not rest or int(number) != _FUTEX.get(platform.machine()):
        return None
    futex, stack = int(rest[0], 16), int(rest[-2], 16)
    if not is_in(WAITS, stack, memory):
        return None
    last = futex - futex % 8
    buffers = (a for a in range(last, last - _BYTES, -8) if class_of(a, memory) == BUFFER)
    return next(buffers, None)


def _signal(buffer: int) -> None:
    """Have whoever waits for a buffer raise."""
    (table,) = struct.unpack("P", ctypes.string_at(buffer, struct.calcsize("P")))
    exception = ctypes.c_void_p(_exception())
    _runtime()._ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(ctypes.byref(exception))
    # An object of such a class is passed by its address, and here it is moved from.
    ctypes.CDLL(library_of(table))[_SIGNAL](ctypes.c_void_p(buffer), ctypes.byref(exception))


def _exception() -> int:
    """Make a `std::runtime_error`; returns its address, of which nobody has a reference yet."""
    runtime = _runtime()
    made: int = runtime.__cxa_allocate_exception(ctypes.c_size_t(16))
    runtime._ZNSt13runtime_errorC1EPKc(ctypes.c_void_p(made), MESSAGE)
    kind = ctypes.c_char.in_dll(runtime, "_ZTISt13runtime_error")
    runtime.__cxa_init_primary_exception(
        ctypes.c_void_p(made),
        ctypes.byref(kind),
        ctypes.cast(runtime._ZNSt13runtime_errorD1Ev, ctypes.c_void_p),
    )
    return made


@cache
def _runtime() -> Any:
    """The C++ runtime that torch has loaded."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_allocate_exception.restype = ctypes.c_void_p
    return runtime
