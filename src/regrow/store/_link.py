"""One connection of a client, and who is told when it can be read or written.

The background thread of the client sleeps in one epoll. The connection is in it twice,
under two descriptors: for reading and for writing. For reading it is armed only while no
call reads and some call waits for an answer; otherwise it tells the background thread
nothing but that the server hung up. For writing it is armed only while something is left
to send. Both are armed for one event at a time, so the background thread is never woken
for what another thread is doing.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Final

from regrow.store import _wire as wire
from regrow.store._errors import StoreProtocolError

if TYPE_CHECKING:
    from regrow.store._dial import Greeted

_HANGUP: Final = select.EPOLLRDHUP | select.EPOLLONESHOT


class Link:
    """A connection that has been greeted.

    Args:
        greeted: the connection, and what was said on it so far.
        epoll: the background thread's.
    """

    def __init__(self, greeted: Greeted, epoll: select.epoll) -> None:
        self.fd = greeted.channel.fileno()
        self.write_fd = os.dup(self.fd)
        self._channel = greeted.channel
        self._epoll = epoll
        # The server's messages are hardly longer than those it takes.
        self._longest = greeted.welcome.frame_bytes + (1 << 20)
        self._rest = bytearray(greeted.rest)
        self._needed = wire.HEADER
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._armed = False
        epoll.register(self.fd, _HANGUP)
        epoll.register(self.write_fd, select.EPOLLONESHOT)

    def arm(self) -> None:
        """Have the background thread read what comes next."""
        self._armed = True
        self._epoll.modify(self.fd, select.EPOLLIN | _HANGUP)

    def disarm(self) -> None:
        """Keep the background thread from reading."""
        if self._armed:
            self._armed = False
            self._epoll.modify(self.fd, _HANGUP)

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to receive."""
        return bool(self._poll.poll(min(max(seconds, 0.0), 1e6) * 1000))

    def send(self, data: bytes) -> None:
        """Send, leaving to the background thread what does not fit."""
        if not self._channel.send(data):
            self._epoll.modify(self.write_fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def flush(self) -> None:
        """Send what was left."""
        if not self._channel.flush():
            self._epoll.modify(self.write_fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def receive(self) -> list[wire.Reply]:
        """Return the messages that have arrived; at most one read.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the connection is lost.
            msgspec.MsgspecError, StoreProtocolError: what arrived is not a message.
        """
        data = self._channel.recv()
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        return self._messages(data)

    def shutdown(self) -> None:
        """End the connection, waking whoever waits in `readable`."""
        self._channel.shutdown()

    def close(self) -> None:
        """Give the descriptors back; nobody may be using the link."""
        self._epoll.unregister(self.fd)
        self._epoll.unregister(self.write_fd)
        self.forget()

    def forget(self) -> None:
        """Give the descriptors back without touching the epoll, which a parent may share."""
        self._channel.close()
        os.close(self.write_fd)

    def _messages(self, data: bytes) -> list[wire.Reply]:
        view, pos, end, messages = memoryview(data), 0, len(data), []
        self._needed = wire.HEADER
        while end - pos >= wire.HEADER:
            length = int.from_bytes(view[pos : pos + wire.HEADER], "big")
            if length > self._longest:
                raise StoreProtocolError(f"the server announced a message of {length} bytes")
            stop = pos + wire.HEADER + length
            if stop > end:
                self._needed = wire.HEADER + length
                break
            messages.append(wire.decode_reply(view[pos + wire.HEADER : stop]))
            pos = stop
        self._rest += view[pos:]
        return messages
