"""One guardian process, the socket to it and the thread that listens there.

A guardian that dies takes the workers with it (they have PDEATHSIG); what they leave behind is
killed from here, and then every listener gets `GuardianLost`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from regrow.workers import _procfs
from regrow.workers._frames import Decoder, encode
from regrow.workers._guardian_events import (
    Gone,
    GuardianEvent,
    GuardianLost,
    Lapsed,
    Listener,
    Started,
    decode,
)

#: Runs `_guardian.main` as a module, so that its byte code is cached, but without `regrow` and
#: its imports: a bare package that knows only where the files are.
_BOOTSTRAP = (
    "import sys;p=type(sys)('regrow_guardian');p.__path__=[sys.argv.pop()];"
    "sys.modules[p.__name__]=p;from regrow_guardian._guardian import main;main()"
)
#: Seconds that killing the orphans of a dead guardian may take before the loss is reported.
_LOSS_TIMEOUT = 5.0


class Link:
    """One guardian process, the socket to it and the thread that listens there."""

    def __init__(
        self, lock: threading.Lock, patience: float, on_lapse: Callable[[Lapsed], None]
    ) -> None:
        self._on_lapse = on_lapse
        self._lock = lock  # of the handle: held while a listener is registered
        outer = os.environ.get(_procfs.MARK, "/")
        #: Marks begin with it; see `_procfs.MARK`.
        self.prefix = f"{outer}{os.getpid()}-{os.urandom(6).hex()}/"
        self.listeners: dict[int, Listener] = {}
        self.pids: set[int] = set()
        self.lost = False
        self._closing = False
        self._socket, theirs = socket.socketpair()
        try:
            self.pid = _start_process(theirs, patience)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._thread = threading.Thread(target=self._listen, name="regrow-guardian", daemon=True)
        self._thread.start()

    def send(self, message: list[bytes | int], fds: Sequence[int] = ()) -> None:
        data = memoryview(encode(message))
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return  # its end is the listening thread's to tell
        except BaseException:
            # A signal's handler raised, perhaps in the middle of a message: nothing that follows
            # could be understood. The guardian takes this for our end and kills the workers.
            self._socket.shutdown(socket.SHUT_RDWR)
            raise

    def send_at_once(self, message: list[bytes | int]) -> bool:
        """Send a short message unless that would block; returns whether it is on its way."""
        try:
            self._socket.send(encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True
        return True

    def wake(self) -> None:
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def close(self, timeout: float) -> bool:
        with self._lock:
            self._closing = True
            if not self.lost:
                self.send([b"bye"])
        if threading.current_thread() is self._thread:  # a listener closes its own guardian
            return self._reap(timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        decoder = Decoder()
        while data := self._receive():
            for frame in decoder.feed(data):
                self._dispatch(decode(frame))
        with self._lock:
            self.lost = True
        now = monotonic()
        self._reap(None if self._closing else _LOSS_TIMEOUT)
        if not self._closing:
            _procfs.kill_family(self.pids, (self.prefix.encode(),), _LOSS_TIMEOUT)
        self._socket.close()
        os.close(self._pidfd)
        while self.listeners:
            worker, listener = self.listeners.popitem()
            listener(GuardianLost(worker, now))

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def _dispatch(self, event: GuardianEvent) -> None:
        match event:
            case Started(pid=pid):
                self.pids.add(pid)
            case Gone():
                listener = self.listeners.pop(event.worker)
                listener(event)
                return
            case Lapsed():
                self._on_lapse(event)
                return
        self.listeners[event.worker](event)

    def _reap(self, timeout: float | None) -> bool:
        """Wait for the guardian's end and collect it; False: it goes on."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return False
        with suppress(ChildProcessError):  # already, or by somebody who collects every child
            os.waitpid(self.pid, 0)
        return True


def _start_process(theirs: socket.socket, patience: float) -> int:
    if not sys.executable:
        raise OSError(
            "cannot start the guardian: sys.executable does not name a Python interpreter"
        )
    number = 3 if theirs.fileno() != 3 else 4  # a copy, since only that one is inherited
    return os.posix_spawn(
        sys.executable,
        [
            *(sys.executable, "-I", "-S", "-c", _BOOTSTRAP),
            *(str(os.getpid()), str(number), str(round(patience * 1e9))),
            os.path.dirname(os.path.abspath(__file__)),
        ],
        os.environ,
        file_actions=[
            # First, as the socket is itself 0 or 1 where those had been closed.
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), number),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
    )
