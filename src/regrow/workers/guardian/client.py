"""`Guardian`: the agent's handle for its guardian process; cleans up if that process is killed.

Every request is a message and every reply is an event, so no call waits. `start` returns while the
guardian's interpreter is still starting. The agent can request a thousand workers before the first
reply. One thread passes events to the worker's listener, in the order in which they happened.

If the guardian dies, the kernel kills the workers that it started (PDEATHSIG). The handle kills the
processes that they leave behind, and adopted workers, which are not the guardian's children. Then
every listener receives `GuardianLost`. The next `spawn` starts another guardian, so one handle
serves a job through all its attempts.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import NamedTuple

from regrow.utils import end_text, ends_within, get_logger, reap, start_thread
from regrow.workers.guardian import procfs
from regrow.workers.guardian.events import (
    Exited,
    Gone,
    GuardianEvent,
    GuardianLost,
    HelperChanged,
    Lapsed,
    Listener,
    Started,
    decode,
)
from regrow.workers.guardian.protocol import Decoder, encode
from regrow.workers.guardian.starting import (
    KILL_TIMEOUT_S,
    is_standard,
    start_process,
    take_early,
)

#: As `BOOTSTRAP`, for `template_process.main`, which returns in each worker that is forked.
TEMPLATE_BOOTSTRAP = (
    "import sys;p=type(sys)('regrow_guardian');p.__path__=[sys.argv.pop()];"
    "sys.modules[p.__name__]=p;from regrow_guardian.template_process import main;main()()"
)
Message = Sequence[bytes | int]
#: Most seconds to kill the orphans of a dead guardian before the loss is reported.
_LOSS_TIMEOUT = 5.0

logger = get_logger(__name__)


class WorkerSetup(NamedTuple):
    """Environment, file descriptors, event listener and grace with which a worker starts."""

    env: Mapping[str, str]
    """The worker's complete environment; the guardian adds the worker's mark."""
    listener: Listener
    """Called with all events of the worker, on the handle's own thread; must not block or raise."""
    fds: Mapping[int, int] = {}
    """The worker's file descriptors: number there -> number here. 0 to 2 default to the agent's."""
    drains: Sequence[tuple[int, str]] = ()
    """Pipes that the guardian empties into files if the agent is killed."""
    grace: float = 30.0
    """Seconds between SIGTERM and SIGKILL for processes that the worker leaves behind."""


class Guardian:
    """One guardian process and its workers; a new process after `close`. Thread-safe.

    Args:
        kill_timeout: seconds after SIGKILL until the guardian abandons a process that does not
            end (uninterruptible sleep, a device that hangs). The job can then continue or end.
        on_lapse: called when a lease (`renew`) expired and the guardian kills the workers, before
            their ends are reported. It runs on the handle's own thread, and must not block or
            raise.
    """

    def __init__(
        self,
        *,
        kill_timeout: float = KILL_TIMEOUT_S,
        on_lapse: Callable[[Lapsed], None] | None = None,
    ) -> None:
        self.on_template: Callable[[HelperChanged], None] = lambda changed: None
        """Called with changes of the template (`preload`), in the same way as `on_lapse`."""
        self.on_standby: Callable[[HelperChanged], None] = lambda changed: None
        """Called with changes of the standbys (`stand_by`), in the same way."""
        self._kill_timeout = kill_timeout
        self._on_lapse = on_lapse or (lambda lapsed: None)
        self._lease: float | None = None
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._process_with_template: _Process | None = None
        self._numbers = count(1)

    @property
    def pid(self) -> int | None:
        """Process id of the guardian, if one was started and is not known to be gone."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs; do not wait for it.

        Raises:
            OSError: the process cannot be started.
        """
        with self._lock:
            self._ensure()

    def spawn(self, argv: Sequence[str], setup: WorkerSetup) -> int:
        """Start a program as a worker; `Started` or `Refused` follows.

        A standby becomes the worker if there is one, or the template forks it.

        Args:
            argv: the program and its arguments; looked up in PATH of `setup.env` unless it has a
                slash.
            setup: environment, descriptors, listener and grace of the worker.

        Returns:
            The handle's number for the worker.

        Raises:
            OSError: no guardian can be started.
            ValueError: arguments or environment have a null byte, or exceed the message limit.
        """
        return self._request(b"spawn", argv, setup)

    def _request(self, kind: bytes, argv: Sequence[str], setup: WorkerSetup) -> int:
        words = [os.fsencode(word) for word in argv]
        variables = [os.fsencode(f"{name}={value}") for name, value in setup.env.items()]
        for word in (*words, *variables):
            if b"\0" in word:
                raise ValueError(
                    f"a worker's argument or variable has a null byte: {os.fsdecode(word)!r}"
                )
        # Without one of its own, a worker inherits the guardian's descriptors 0 to 2.
        fds = {number: number for number in (0, 1, 2) if is_standard(number)} | dict(setup.fds)
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self._lock:
                mark = self._new_mark()
                # The last variable of a name is used.
                variables.append(f"{procfs.MARK}={mark}".encode())
                counts = [len(fds), len(words), len(variables)]
                fields: Message = [*counts, *fds, *words, *variables]
                given = [directory, *fds.values()]
                return self._send_worker(kind, mark, setup, fields, given)
        finally:
            os.close(directory)

    @property
    def has_template(self) -> bool:
        """Whether a template runs, or starts."""
        process = self._process
        return process is not None and not process.lost and process is self._process_with_template

    def preload(
        self, modules: Sequence[str], command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """Start a template: a process that imports modules, and from which workers are forked.

        Later workers whose command begins like `command` start from it, if they fit; see
        `template_process`. The others start by exec, as do all of them until the template is ready.

        Args:
            modules: names of the modules, imported in this order.
            command: the common part of the workers' commands: `python [-u] SCRIPT` or `-m MODULE`.
            env: the environment in which the modules are imported.

        Raises:
            OSError: no guardian can be started.
            ValueError: an argument or a variable has a null byte.
        """
        flags = command[1:2] if command[1:2] == ["-u"] else []
        package = os.path.dirname(os.path.abspath(__file__))
        argv = [command[0], *flags, "-c", TEMPLATE_BOOTSTRAP, ",".join(modules)]
        self._request(b"preload", [*argv, *command, package], WorkerSetup(env, lambda event: None))

    def stand_by(self, argv: Sequence[str], env: Mapping[str, str], output: int) -> int:
        """Start a standby: a worker's program, which waits at its wrapped call to become a worker.

        Args:
            argv: the command of the workers.
            env: its complete environment.
            output: descriptor of a file for what it writes until then.

        Returns:
            The handle's number for the standby.

        Raises:
            OSError: no guardian can be started.
            ValueError: an argument or a variable has a null byte.
        """
        setup = WorkerSetup(env, lambda event: None, fds={1: output, 2: output})
        return self._request(b"stand_by", argv, setup)

    def dismiss(self, *, only_starting: bool = False) -> None:
        """End standbys; their ends are not reported.

        Args:
            only_starting: those that do not wait at their wrapped call yet; else all.
        """
        with self._lock:
            if self._process is not None and not self._process.lost:
                self._process.send([b"dismiss", int(only_starting)])

    def mark(self) -> str:
        """Return a new mark: set it as `REGROW_WORKER` for a worker before you `adopt` it."""
        with self._lock:
            return self._new_mark()

    def adopt(self, pid: int, mark: str, setup: WorkerSetup) -> int:
        """Watch a worker that this process forked, and kill it with its descendants like others.

        Args:
            pid: the worker's process: a child of this process that has not been waited for.
            mark: the mark that `mark` returned for the worker.
            setup: listener, drains and grace of the worker; `env` and `fds` are not used.

        Returns:
            The handle's number for the worker.

        Raises:
            OSError: there is no such process, or no guardian can be started.
        """
        pidfd = os.pidfd_open(pid)
        try:
            with self._lock:
                self._ensure().pids.add(pid)
                return self._send_worker(b"adopt", mark, setup, [pid], [pidfd])
        finally:
            os.close(pidfd)

    def stop(self, workers: Sequence[int] | None, signum: int, grace: float) -> None:
        """End workers: `signum` to their process groups, and SIGKILL to all after `grace` seconds.

        Args:
            workers: the workers; those that are gone are skipped. None: all workers.
            signum: for example SIGTERM. SIGCONT follows, for suspended workers. 0: only change the
                grace of a stop in progress.
            grace: seconds. A later call may shorten or lengthen the grace of an earlier one. It
                counts from the first call, and has no effect after the grace expired.
        """
        self.wake()
        with self._lock:
            if self._process is not None and not self._process.lost:
                which = self._process.listeners if workers is None else workers
                self._process.send([b"stop", signum, round(max(0.0, grace) * 1e9), *which])

    def renew(self, until: float | None) -> None:
        """Renew the lease of the workers; never blocks.

        When the lease expires, the guardian kills all workers, and starts none until the next call.
        This holds even if this process has ended by then. Of several calls, the last one counts. If
        another thread is in the middle of a message, the renewal is sent with the next call or the
        next worker.

        Args:
            until: end of the lease, in seconds of the monotonic clock. None is without end, the
                initial state.
        """
        self._lease = until
        if self._lock.acquire(blocking=False):
            try:
                if self._process is not None and not self._process.lost:
                    self._process.send_at_once(_lease_message(until))
            finally:
                self._lock.release()

    def close(self, timeout: float = 10.0) -> bool:
        """End the guardian, which kills all remaining workers.

        Args:
            timeout: seconds to wait for its end. The guardian continues while a process does not
                end after SIGKILL (uninterruptible sleep), and keeps watching that process.

        Returns:
            Whether the guardian ended.
        """
        self.wake()
        with self._lock:
            process = self._process
            self._process = None
        return process is None or process.close(timeout)

    def wake(self) -> None:
        """Resume a suspended guardian, because the end of the workers depends on the guardian."""
        # Without the lock, because a thread that sends to the guardian may hold it.
        process = self._process
        if process is not None:
            process.wake()

    def _ensure(self) -> _Process:
        if self._process is None or self._process.lost:
            self._process = _Process(self._lock, self._kill_timeout, self._notify)
        return self._process

    def _notify(self, event: Lapsed | HelperChanged) -> None:
        """Pass on an event that is about no single worker."""
        match event:
            case HelperChanged(helper="standby"):
                self.on_standby(event)
            case HelperChanged():
                if event.kind in ("gone", "unfit"):
                    self._process_with_template = None
                self.on_template(event)
            case Lapsed():
                self._on_lapse(event)

    def _new_mark(self) -> str:
        return f"{self._ensure().prefix}{next(self._numbers)}/"

    def _send_worker(
        self, kind: bytes, mark: str, setup: WorkerSetup, fields: Message, fds: Sequence[int]
    ) -> int:
        process, number = self._ensure(), next(self._numbers)
        if kind == b"preload":  # before the guardian can report its end
            self._process_with_template = process
        elif kind != b"stand_by":
            process.listeners[number] = setup.listener
        head: Message = [kind, number, mark.encode(), round(setup.grace * 1e9)]
        paths = [os.fsencode(path) for _, path in setup.drains]
        process.send(_lease_message(self._lease))
        process.send([*head, *fields, *paths], [*fds, *(fd for fd, _ in setup.drains)])
        return number


def _lease_message(until: float | None) -> Message:
    return [b"lease", 0 if until is None else round(until * 1e9)]


class _Process:
    """One guardian process, the socket to it, and the thread that receives from it.

    Args:
        lock: lock of the handle, which holds it while it registers a listener.
        kill_timeout: as in `Guardian`.
        notify: called with events that are about no single worker.
    """

    def __init__(
        self,
        lock: threading.Lock,
        kill_timeout: float,
        notify: Callable[[Lapsed | HelperChanged], None],
    ) -> None:
        self._notify = notify
        self._lock = lock
        outer = os.environ.get(procfs.MARK, "/")
        #: Prefix of all marks; see `procfs.MARK`.
        self.prefix = f"{outer}{os.getpid()}-{os.urandom(6).hex()}/"
        self.listeners: dict[int, Listener] = {}
        self.pids: set[int] = set()
        self.lost = False
        self._resumed_at = b"0"  # the latest SIGCONT that the guardian reported
        self._was_stopped = False  # up to that SIGCONT, which may have reached a running guardian
        self._closing = False
        early = take_early() if kill_timeout == KILL_TIMEOUT_S else None
        self.pid, self._socket = early or start_process(kill_timeout)
        self._pidfd = os.pidfd_open(self.pid)
        self._thread = start_thread(self._listen, "regrow-guardian")

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        data = memoryview(encode(message))
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return  # the receiving thread reports the end
        except BaseException:
            # A signal handler raised, perhaps in the middle of a message, so later messages could
            # not be parsed. The guardian takes the shutdown for the agent's end and kills the
            # workers.
            self._socket.shutdown(socket.SHUT_RDWR)
            raise

    def send_at_once(self, message: Message) -> None:
        """Send a short message unless that would block."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._socket.send(encode(message), socket.MSG_DONTWAIT)

    def wake(self) -> None:
        with suppress(OSError):  # the guardian has ended
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def close(self, timeout: float) -> bool:
        with self._lock:
            self._closing = True
            if not self.lost:
                self.send([b"bye"])
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        decoder = Decoder()
        while data := self._receive():
            for frame in decoder.feed(data):
                if frame[0] == b"exited" and frame[4] not in (b"0", self._resumed_at):
                    self._resumed_at, self._was_stopped = frame[4], self._is_resumed()
                self._dispatch(decode(frame))
        with self._lock:
            self.lost = True
        now = monotonic()
        ended = ends_within(self._pidfd, None if self._closing else _LOSS_TIMEOUT)
        how = f"the guardian (pid {self.pid}) {end_text(reap(self._pidfd) if ended else None)}"
        self._socket.close()  # so that one descriptor is free to read /proc
        try:
            if not self._closing:
                procfs.kill_family(self.pids, (self.prefix.encode(),), _LOSS_TIMEOUT)
        except OSError:
            logger.exception("%s; processes that its workers started may be left", how)
        finally:
            os.close(self._pidfd)
            while self.listeners:
                worker, listener = self.listeners.popitem()
                listener(GuardianLost(worker, now, how))

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def _dispatch(self, event: GuardianEvent | Lapsed | HelperChanged) -> None:
        match event:
            case Started(pid=pid):
                self.pids.add(pid)
            case Gone():
                listener = self.listeners.pop(event.worker)
                listener(event)
                return
            case Lapsed() | HelperChanged():
                self._notify(event)
                return
            case Exited(late=True):
                event = event._replace(late=self._was_stopped)
        self.listeners[event.worker](event)

    def _is_resumed(self) -> bool:
        """Return whether the guardian was suspended and resumed since the last call."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WNOHANG) is not None
        except OSError:
            return False
