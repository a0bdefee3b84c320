"""The program of the relay: copies the stderr of workers to its own stderr, and keeps the ends.

`relay` is the agent's side, and gives the reasons. This program runs without `regrow`: it imports
the standard library, and the guardian's protocol.

**No byte is in the memory of this process alone.** What it reads goes at once to memory that it
shares with the agent (`Stream`), and so does the number of bytes that it has written on. If it is
killed, its successor writes the rest. The relay may be killed between a read and the count of its
bytes. So before the read it writes NUL bytes to the place of the data, and up to where the data
will count. Its successor counts what is no longer NUL there.

**Lines of two workers are not mixed.** Up to `PIPE_BUF` bytes that a worker writes at once arrive
at once. If more have arrived, the part after the last newline waits for its rest, for `HELD_S`.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import _socket
import _thread
import errno
import mmap
import os
import select
import sys
import time
from fcntl import ioctl
from termios import FIONREAD, TIOCGWINSZ, TIOCSWINSZ

from ..guardian.protocol import Wire  # noqa: TID252 - `regrow` has another name here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = 64 * 1024
"""Bytes that are kept of the end of a stream."""
HEADER = 4096
"""Bytes before them in the shared memory; the first 24 are three counters, see `Stream`."""
HELD_S = 0.005
"""Seconds for which a part of a line waits for its rest."""
STUCK_S = 5.0
"""Seconds without progress after which a relay ends whose agent is gone."""
STDERR = 2


class Stream:
    """The stderr of one worker.

    Args:
        number: the agent's number of the stream.
        reader: the reading end of a pipe, or the other side of a terminal; it does not block.
        memory: a file of `HEADER + KEPT` bytes. It starts with the number of bytes that were read,
            the number of those that were written on, and the number of bytes after the latest
            read, 8 bytes each. From `HEADER` on it is a ring with the last bytes that were read.
        is_shown: whether the bytes are written to stderr.
    """

    def __init__(self, number: int, reader: int, memory: int, is_shown: bool) -> None:
        self.number, self.reader, self._is_shown = number, reader, is_shown
        self._map = mmap.mmap(memory, HEADER + KEPT)
        os.close(memory)
        self._counts = memoryview(self._map)[:24].cast("Q")
        self._ring = memoryview(self._map)[HEADER:]
        uncounted = self._counts[2] - self._counts[0]
        if uncounted > 0:  # the relay before was killed in a read, or the read was short
            data = b"".join(self._pieces(self._counts[0], uncounted))
            self._counts[0] += len(data.rstrip(b"\0"))

    @property
    def pending(self) -> int:
        """Number of bytes that were read, and are not written on yet."""
        return self._counts[0] - self._counts[1]

    def receive(self) -> int | None:
        """Read what there is; return the bytes, 0 at the end, None if there is nothing now."""
        begin = self._counts[0]
        size = min(self._available(), KEPT - self.pending)
        for piece in self._pieces(begin, size):
            piece[:] = bytes(len(piece))
        self._counts[2] = begin + size
        try:
            # At the end, and at an error, nothing is available: the read tells which it is.
            size = os.readv(self.reader, self._pieces(begin, size or 1))
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return 0  # a terminal that no process has open any more
        self._counts[0] += size
        return size

    def _available(self) -> int:
        try:
            return int.from_bytes(ioctl(self.reader, FIONREAD, bytes(4)), sys.byteorder)
        except OSError:  # as in `receive`
            return 0

    def write(self, size: int) -> None:
        """Write on some of the pending bytes, however long that takes."""
        while size:
            pieces = self._pieces(self._counts[1], size)
            written = _write(pieces) if self._is_shown else size
            self._counts[1] += written
            size -= written

    def whole_lines(self) -> int:
        """Return how many of the pending bytes are whole lines; all if there is no newline."""
        data = b"".join(self._pieces(self._counts[1], self.pending))
        return data.rfind(b"\n") + 1 or len(data)

    def _pieces(self, start: int, size: int) -> list[memoryview]:
        """Return the parts of the ring that hold `size` bytes from the byte number `start` on."""
        at = start % KEPT
        first = min(size, KEPT - at)
        pieces = [self._ring[at : at + first], self._ring[: size - first]]
        return pieces if pieces[1] else pieces[:1]


def _write(pieces: Sequence[memoryview]) -> int:
    """Write to stderr; return the bytes that are written, or dropped because stderr is gone."""
    try:
        return os.writev(STDERR, pieces)
    except BlockingIOError:  # another process made the terminal non-blocking
        poll = select.poll()
        poll.register(STDERR, select.POLLOUT)
        poll.poll()
        return 0
    except OSError:  # no reader, a closed terminal, a full disk
        return sum(map(len, pieces))


class Relay:
    """The loop.

    Args:
        wire: the socket to the agent. Messages from it: `add` (number, 1 if the stream is shown;
            with its reader and its memory), `bye`. Message to it: `ended` (number).
        is_terminal: whether stderr is a terminal.
    """

    def __init__(self, wire: Wire, *, is_terminal: bool) -> None:
        self._wire = wire
        self._is_terminal = is_terminal
        self._poll = select.epoll()
        self._poll.register(wire.number, select.EPOLLIN)
        self._streams: dict[int, Stream] = {}
        self._held: set[int] = set()  # readers of the streams with a part of a line
        self._window_size = b""
        self._closing = False
        self.steps = 0
        """Grows as long as the relay makes progress."""

    def run(self) -> None:
        """Copy until the agent says `bye`, or is gone and all streams have ended."""
        while self._streams or not self._wire.closed:
            limit = 0 if self._closing else HELD_S if self._held else None
            ready = {fd for fd, _ in self._poll.poll(limit)}
            for fd in self._held - ready:
                self._streams[fd].write(self._streams[fd].pending)
            self._held &= ready
            if self._closing and not ready:
                return
            for fd in ready:
                self.steps += 1
                if fd == self._wire.number:
                    self._on_wire()
                else:
                    self._on_output(self._streams[fd])

    def _on_output(self, stream: Stream) -> None:
        size = stream.receive()
        if self._is_terminal:
            self.copy_window_size()
        self._held.discard(stream.reader)
        if size is not None and size > select.PIPE_BUF:
            stream.write(stream.whole_lines())
            self._held.add(stream.reader)
        else:
            stream.write(stream.pending)
        if size == 0:
            self._poll.unregister(stream.reader)
            del self._streams[stream.reader]
            os.close(stream.reader)
            self._wire.send(b"ended", stream.number)

    def _on_wire(self) -> None:
        self._wire.flush()
        for word, *fields in self._wire.receive() or ():
            if word == b"bye":
                self._closing = True
            else:
                self._add(int(fields[0]), is_shown=fields[1] == b"1")
        if self._wire.closed:
            self._poll.unregister(self._wire.number)
        else:
            to_send = select.EPOLLOUT if self._wire.pending else 0
            self._poll.modify(self._wire.number, select.EPOLLIN | to_send)

    def _add(self, number: int, *, is_shown: bool) -> None:
        reader, memory = self._wire.fds[:2]
        del self._wire.fds[:2]
        self._streams[reader] = stream = Stream(number, reader, memory, is_shown)
        stream.write(stream.pending)  # of a relay that was killed
        self._poll.register(reader, select.EPOLLIN)
        self._window_size = b""

    def copy_window_size(self) -> None:
        """Give the terminals of the workers the size of the real one."""
        try:
            size = ioctl(STDERR, TIOCGWINSZ, bytes(8))
            if size != self._window_size:
                for reader in self._streams:
                    ioctl(reader, TIOCSWINSZ, size)
            self._window_size = size
        except OSError:  # the real one is gone
            return


def _end_with_agent(wire: int, relay: Relay) -> None:
    """End this process when the agent has ended and no more output is copied.

    A write to stderr may block for ever.
    """
    poll = select.poll()
    poll.register(wire, select.POLLRDHUP)
    poll.poll()
    before = -1
    while relay.steps != before:
        before = relay.steps
        time.sleep(STUCK_S)
    os._exit(1)


def main() -> None:
    """Run the process; argument: the number of the socket to the agent."""
    number = int(sys.argv[1])
    with open("/proc/self/comm", "w") as name:
        name.write("regrow-relay")
    os.set_inheritable(number, False)
    relay = Relay(Wire(_socket.socket(fileno=number)), is_terminal=os.isatty(STDERR))
    # The main thread gets the signal, so it copies the size also while it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    _thread.start_new_thread(_end_with_agent, (number, relay))
    signal.signal(signal.SIGWINCH, lambda *_: relay.copy_window_size())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGWINCH])
    relay.run()
