"""Waking who waits, while a gloo group is made, for ranks that will never connect.

To make a group, each rank tells the others its address by the store. Of two ranks, the one with the
greater address connects; the other waits for that in C++, for as long as the group's time-out, also
when the first is dead or was interrupted. Nothing could be shut down there. All it has is a socket
that listens, whose end would be the process's, and a table of the connections that are to come,
each with a number.

So they come: this process connects to itself, says each number that there can be, and closes. gloo
takes each connection for the one it waited for, reads the end of the stream from it, and fails with
the error that it has for a rank that died just then. A number that nobody waits for yet is kept by
gloo for who will; so each listening socket needs that once, also when the rank is only about to
wait.

The numbers count the ranks of the group. Until the group is destroyed, gloo keeps the connections
that nobody waits for; so they are made only while a thread makes a group. Nothing needs to be done
for a rank that connects itself: a dead one refuses. One whose host is gone does not, and the wait
is as long as the kernel's, some two minutes. Groups with TLS are left alone, since what comes there
has to shake hands.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from types import FrameType
from typing import Final

from regrow.inprocess._torch_sockets import class_of, duplicate, watched

LISTENER: Final = b"_ZTVN4gloo9transport3tcp8ListenerE"
"""Virtual table of what handles a socket that listens: `gloo::transport::tcp::Listener`."""
PATIENCE: Final = 0.5
"""Seconds for gloo's thread to take a connection, when its queue is full."""
_MAKES: Final = ("torch.distributed.distributed_c10d", "_new_process_group_helper")


def complete_connections(size: int, done: set[int]) -> int:
    """Have all connections that gloo waits for come, and end; how many there were.

    Args:
        size: ranks that a group has at most.
        done: the inodes of sockets that need no more of that; those that are dealt with are added.

    Raises:
        OSError: `/proc/self` cannot be read.
    """
    if os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS" or not _is_being_made():
        return 0
    made = 0
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for each in watched():
            if each.inode in done or class_of(each.handler, memory.fileno()) != LISTENER:
                continue
            listener = duplicate(each)
            if listener is None:
                continue
            with listener:
                try:
                    for number in range(size):
                        _come(listener, number)
                        made += 1
                except OSError:  # it is closed, or late; then it is looked at again
                    continue
            done.add(each.inode)
    return made


def _is_being_made() -> bool:
    """Whether a thread of this process makes a process group."""
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            if (above.f_globals.get("__name__"), above.f_code.co_name) == _MAKES:
                return True
            above = above.f_back
    return False


def _come(listener: socket.socket, number: int) -> None:
    with socket.socket(listener.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(listener.getsockname())
        connection.sendall(struct.pack("=q", number))
