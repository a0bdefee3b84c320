"""The relay: keeps the end of each worker's stderr while the stream goes to the agent's stderr.

A worker writes to stderr why it ends: a traceback, the message of an abort. So `regrow run` gives
each worker whose stderr is not redirected a pipe, and a process of its own, the relay, copies it to
the real stderr. The last `KEPT` bytes of each stream are in memory that agent and relay share.

**The program sees what it saw without.** If stderr is a terminal, the worker gets a terminal with
the same size and settings, except that it leaves newlines alone: the real terminal converts them.
Each write appears at once, and no line is collected. Two things differ. The terminal has another
name. And a line on stdout may overtake a line that was written to stderr a tenth of a millisecond
before, because stdout is inherited.

**Why a process.** A thread of the agent would do, as for the pump. But a worker must not wait for
an agent that is stopped (Ctrl-Z), and what it wrote must appear if the agent is killed. The relay
has a session of its own, so neither Ctrl-Z nor `stty tostop` stops it. If stderr blocks (Ctrl-S, a
pipe that is not read), the relay waits, and then the workers wait, as they would without it. The
relay ends with its agent: when it has copied everything, or when nothing moves for `STUCK_S`. If it
is killed, the agent starts another one. Meanwhile the agent has the pipes open, so no worker gets a
SIGPIPE.

**If stderr fails** (its reader has ended, its terminal is closed, its disk is full), output is
dropped, and the workers continue, as with a tee.

**At the end of a job** the agent waits until everything is copied. The wait has no limit, like a
write of the agent to the same stderr; a signal ends it.

Other ways were considered. A file could be read back, but it has the lines of all workers, and a
terminal or a pipe cannot be read back. stdout could take the same way, so that the order of both is
exact. But then the kept end would be that of both, and the last line of stdout would be shown as
the cause of a failure.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import suppress
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from regrow.utils import ends_within, get_logger, reap, spawn_helper, start_thread
from regrow.workers.guardian.protocol import Decoder, encode
from regrow.workers.logs.relay_process import HEADER, KEPT, STDERR

if TYPE_CHECKING:
    from types import FrameType

BOOTSTRAP = (
    "import sys;p=type(sys)('regrow_relay');p.__path__=[sys.argv.pop()];"
    "sys.modules[p.__name__]=p;from regrow_relay.logs.relay_process import main;main()"
)
"""Runs `relay_process.main` without `regrow` and its imports."""
PAUSE_S = 1.0
"""Least seconds from the start of a relay that was killed to the start of the next one."""

logger = get_logger(__name__)


class KeptStream:
    """The stderr of one worker; `StderrRelay.add` returns it.

    Args:
        number: its number in messages.
        is_shown: whether it is copied to stderr.
        terminal: descriptor of a terminal, if the worker gets one like it.

    Raises:
        OSError: no more descriptors or terminals are available.
    """

    def __init__(self, number: int, is_shown: bool, terminal: int | None) -> None:
        self.number = number
        self.is_shown = is_shown
        self.ended = False
        """Whether everything is copied, and no process has the stream open."""
        self.last = b""
        """The end of a stream that has ended."""
        self.memory = os.memfd_create("regrow-stderr", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.memory, HEADER + KEPT)
            self.reader, self.writer = os.pipe() if terminal is None else _open_terminal(terminal)
        except OSError:
            os.close(self.memory)
            raise
        os.set_blocking(self.reader, False)

    def is_read(self) -> bool:
        """Return whether the relay has read everything that was written so far."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        return not any(event & select.POLLIN for _, event in poll.poll(0))

    def read(self) -> bytes:
        """Return the end of a stream that has not ended."""
        received = int.from_bytes(os.pread(self.memory, 8, 0), "little")
        ring, at = os.pread(self.memory, KEPT, HEADER), received % KEPT
        return ring[:received] if received <= KEPT else ring[at:] + ring[:at]

    def end(self) -> None:
        """Release the descriptors, except the writer."""
        self.last, self.ended = self.read(), True
        os.close(self.reader)
        os.close(self.memory)


class StderrRelay:
    """Keeps the streams of all attempts of a job; thread-safe.

    Call `open` before the first attempt, and `close` after the last one.

    Args:
        stderr: descriptor to which the streams are copied.
    """

    def __init__(self, stderr: int = STDERR) -> None:
        self._stderr = stderr
        self._changed = threading.Condition()
        self._streams: dict[int, KeptStream] = {}  # those that have not ended
        self._numbers = count(1)
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None  # to the process, if there is one
        self._pidfd = -1
        self._is_terminal = self._is_possible = self._is_closing = False
        self._previous: Any = None  # handler of SIGWINCH

    def open(self) -> None:
        """Examine stderr; if it is a terminal, follow the changes of its size."""
        self._is_closing, self._is_possible = False, _is_stream(self._stderr)
        self._is_terminal = self._is_possible and os.isatty(self._stderr)
        if self._is_terminal and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGWINCH, self._on_resize)

    def add(self, *, is_shown: bool = True) -> KeptStream | None:
        """Add a stream; its `writer` is for the worker, and the caller closes it.

        Args:
            is_shown: whether it is copied to stderr.

        Returns:
            The stream; None if a worker has to inherit stderr, because it is closed, or because no
            more descriptors or terminals are available.
        """
        if not self._is_possible:
            return None
        try:
            stream = KeptStream(next(self._numbers), is_shown, self._terminal())
        except OSError:
            return None
        with self._changed:
            self._streams[stream.number] = stream
            try:
                if self._socket is not None:
                    _send(self._socket, stream, socket.MSG_DONTWAIT)
            except OSError:  # stderr blocks, and many streams wait already
                del self._streams[stream.number]
                os.close(stream.writer)
                stream.end()
                return None
        return stream

    def _terminal(self) -> int | None:
        return self._stderr if self._is_terminal else None

    def start(self) -> None:
        """Start the process, if there is a stream; call it when the workers are starting."""
        with self._changed:
            if self._streams and self._thread is None:
                self._thread = start_thread(self._run, "regrow-relay")

    def await_end(self, stream: KeptStream, timeout: float) -> None:
        """Wait until a stream has ended.

        Args:
            stream: the stream of a worker that has ended.
            timeout: seconds to wait, if a process holds it open or stderr blocks.
        """
        with self._changed:
            self._changed.wait_for(lambda: stream.ended, timeout)

    def last(self, stream: KeptStream) -> str:
        """Return the end of a stream; empty if the relay has not read all of it."""
        with self._changed:
            if not stream.ended and not stream.is_read():
                return ""
            return (stream.last if stream.ended else stream.read()).decode(errors="replace")

    def close(self) -> None:
        """Wait until everything is copied, and end the process; all workers have ended."""
        if self._previous is not None:
            signal.signal(signal.SIGWINCH, self._previous)
            self._previous = None
        with self._changed:
            self._is_possible, self._is_closing = False, True
            if self._socket is not None:
                _say_bye(self._socket)
            self._signal(signal.SIGCONT)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _on_resize(self, signum: int, frame: FrameType | None) -> None:
        self._signal(signal.SIGWINCH)
        if callable(self._previous):
            self._previous(signum, frame)

    def _signal(self, signum: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signum)

    # --- the thread

    def _run(self) -> None:
        """Run the process, and another one if it is killed."""
        done = is_reported = False
        while not done:
            begun = monotonic()
            try:
                done = self._run_process() == 0
            except OSError as error:
                if not is_reported:
                    logger.warning("cannot copy the stderr of workers yet: %s", error)
                done, is_reported = self._is_closing, True
            if not done:
                sleep(max(0.0, begun + PAUSE_S - monotonic()))
        with self._changed:
            self._thread = None
            while self._streams:
                self._streams.popitem()[1].end()
            self._changed.notify_all()

    def _run_process(self) -> int | None:
        """Start the process, and receive from it; return its exit code."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                pid = _start_process(theirs, self._stderr)
            pidfd = os.pidfd_open(pid)
            with self._changed:
                for stream in self._streams.values():
                    _send(ours, stream)
                if self._is_closing:
                    _say_bye(ours)
                self._socket, self._pidfd = ours, pidfd
            decoder = Decoder()
            while data := _receive(ours):
                for frame in decoder.feed(data):
                    self._on_ended(int(frame[1]))
            with self._changed:
                self._socket, self._pidfd = None, -1
        try:
            ends_within(pidfd, None)
            return reap(pidfd)
        finally:
            os.close(pidfd)

    def _on_ended(self, number: int) -> None:
        with self._changed:
            self._streams.pop(number).end()
            self._changed.notify_all()


def _send(control: socket.socket, stream: KeptStream, flags: int = 0) -> None:
    message = encode([b"add", stream.number, int(stream.is_shown)])
    with suppress(BrokenPipeError, ConnectionResetError):  # the next process gets it
        socket.send_fds(control, [message], [stream.reader, stream.memory], flags)


def _say_bye(control: socket.socket) -> None:
    with suppress(OSError):
        control.sendall(encode([b"bye"]))


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(1 << 12)
    except ConnectionResetError:
        return b""


def _is_stream(fd: int) -> bool:
    """Return whether a descriptor is open; 2 may be a file of ours if it was closed."""
    try:
        return os.get_inheritable(fd) or fd != STDERR
    except OSError:
        return False


def _open_terminal(model: int) -> tuple[int, int]:
    """Return both sides of a terminal like another one; the second is for a worker."""
    import fcntl
    import termios

    control, worker = os.openpty()
    try:
        settings = termios.tcgetattr(model)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(worker, termios.TCSANOW, settings)
        size = fcntl.ioctl(model, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(worker, termios.TIOCSWINSZ, size)
    except (OSError, termios.error) as error:
        os.close(control)
        os.close(worker)
        raise OSError(*error.args) from error
    return control, worker


def _start_process(theirs: socket.socket, stderr: int) -> int:
    number = next(each for each in (3, 4, 5) if each not in (theirs.fileno(), stderr))
    workers = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return spawn_helper(
        ["-I", "-S", "-c", BOOTSTRAP, str(number), workers],
        os.environ,
        [
            # First, because the socket itself is 0 or 1 if these descriptors were closed.
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), number),
            (os.POSIX_SPAWN_DUP2, stderr, STDERR),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
    )
