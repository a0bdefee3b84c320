"""The guardian's side of a process that makes workers start faster: a template or a standby.

A *template* has imported modules, and forks workers, which do not import them again.
`template_process` is its program. A *standby* has run a worker's program up to its wrapped call,
and becomes one worker when it is asked. `regrow._standby` is its side.

**The worker is a child of the guardian**, like one that was started by exec. A template forks it
in two steps; the process in between ends at once, and the kernel gives its child to the guardian,
which is the nearest subreaper.

**No worker starts twice.** The worker waits at a pipe, the *gate*. The guardian opens the gate when
it watches the worker. If the template refuses a worker, is gone, or does not answer in time, the
guardian closes the gate, so a process that exists ends. It then starts the program by exec. So the
loss of a template or a standby costs time, and nothing else.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import _socket
import os
import sys
from time import monotonic_ns

from . import procfs
from .protocol import Wire, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .process import Poller
    from .records import WorkerRecord
    from .spawn import Program

#: Time in which a template must fork a worker; then it is killed, and the worker starts by exec.
FORK_NS = 2_000_000_000
#: The template's number of the socket to the guardian.
CONTROL = 3
#: Most bytes of a reason.
TEXT = 1000


class Template:
    """A running template, or a standby.

    Args:
        name: `template` or `standby`; also the name of its messages to the agent.
        number: the number of the agent's request; it is in these messages.
        program: its program.
        poller: wakes the guardian.
        send: sends a message to the agent.
        begin: called with a record that has the pid and pidfd of a worker.
        execute: starts a worker's program by exec.
        may_start: returns whether workers may start now.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        name: bytes,
        number: int,
        program: Program,
        poller: Poller,
        send: Callable[..., None],
        begin: Callable[[WorkerRecord], None],
        execute: Callable[[WorkerRecord, Program], None],
        may_start: Callable[[], bool],
    ) -> None:
        self._name, self._number = name, number
        self._is_standby = name == b"standby"
        self._may_start = may_start
        self._poller, self._send, self._begin, self._execute = poller, send, begin, execute
        ours, theirs = _socket.socketpair()
        program.mapping[CONTROL] = theirs.detach()  # closed with the program's other descriptors
        self.pid, failure = program.start(os.getpid(), is_helper=not self._is_standby)
        os.close(failure)  # its end shows that it could not run
        self._pidfd = os.pidfd_open(self.pid)
        self._socket = ours
        self._wire = Wire(ours)
        self.ready = False
        """Whether it has reported that workers can start from it."""
        self.gone = False
        """Whether no worker starts from it any more."""
        self.deadline: int | None = None
        """End of the time in which it has to answer, in ns of the monotonic clock."""
        self._waiting: list[tuple[WorkerRecord, Program]] = []
        self._asked: tuple[WorkerRecord, Program, int] | None = None  # with the gate
        poller.watch(self._wire.number, self._on_answer)

    @property
    def is_free(self) -> bool:
        """Whether it can start a worker at once."""
        return self.ready and self._asked is None

    def dismiss(self) -> None:
        """End it, because it is not needed any more; its end is not reported."""
        if not self.gone:
            self._end("", b"")

    def start(self, record: WorkerRecord, program: Program) -> None:
        """Start a worker from it; `begin` or `execute` is called for the worker later."""
        self._waiting.append((record, program))
        self._ask_next()

    def check(self, now: int) -> None:
        """End it if it has not answered in time."""
        if self.deadline is not None and now >= self.deadline:
            self._end("it did not answer in time")

    def owns(self, pid: int, session: int | None) -> bool:
        """Return whether a process is this one, is in its session, or waits behind its gate."""
        return self.pid in (pid, session)

    def _ask_next(self) -> None:
        """Ask for the next worker; a worker that cannot be asked for starts by exec."""
        while self._waiting and self._asked is None and not self.gone:
            record, program = self._waiting.pop(0)
            if not self._ask(record, program):
                self._execute(record, program)

    def _ask(self, record: WorkerRecord, program: Program) -> bool:
        """Ask for a worker; return False if no descriptor is free for the question."""
        variables = [name + b"=" + value for name, value in program.env.items()]
        counts = [len(program.mapping), len(program.argv), len(variables)]
        body = encode([*counts, *program.mapping, *program.argv, *variables])
        try:
            request = os.memfd_create("regrow-fork", os.MFD_CLOEXEC)
        except OSError:
            return False
        try:
            gate, ours = os.pipe()
        except OSError:
            os.close(request)
            return False
        self._asked = record, program, ours
        self.deadline = monotonic_ns() + FORK_NS
        try:
            while body:
                body = body[os.write(request, body) :]
            fds = [request, program.directory, gate, *program.mapping.values()]
            sent = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
            self._socket.sendmsg([b"?"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
        except OSError as error:
            self._end(f"it cannot be asked: {error}")
        finally:
            os.close(gate)
            os.close(request)
        return True

    def _on_answer(self) -> None:
        try:
            for frame in self._wire.receive() or ():
                self._on_frame(frame)
        except (ValueError, IndexError, RuntimeError):  # a module has written to the socket
            self._end("it sent a malformed message")
        for fd in self._wire.fds:  # the template sends none
            os.close(fd)
        self._wire.fds.clear()
        if self._wire.closed and not self.gone:
            self._end("it has ended")

    def _on_frame(self, frame: list[bytes]) -> None:
        match frame[0]:
            case _ if self.gone:
                return
            case b"ready":  # resident memory in bytes
                self.ready = True
                self._report(b"ready", self.pid, int(frame[1]), monotonic_ns())
                self._ask_next()
            case b"forked":  # pid
                self._on_forked(int(frame[1]))
            case b"refused":  # reason
                why = frame[1][:TEXT]
                self._report(b"refused", self.pid, why, monotonic_ns())
                self._close_gate()
            case b"unfit":  # reason; it ends by itself
                self._end(frame[1][:TEXT].decode(errors="replace"), b"unfit")

    def _on_forked(self, pid: int) -> None:
        if self._asked is None:
            return
        entry = procfs.stat(pid)
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):  # killed behind the gate, or no pid
            pidfd = -1
        is_ours = entry is not None and entry.parent == os.getpid()
        if pidfd < 0 or not is_ours or not self._may_start():
            if pidfd >= 0:
                os.close(pidfd)
            self._close_gate()
            return
        record, program, gate = self._asked
        self._asked = self.deadline = None
        record.pid, record.pidfd, record.source = pid, pidfd, self._name
        if self._is_standby:
            self._release()
            self._report(b"taken", pid, b"", monotonic_ns())
        self._begin(record)
        _open(gate)
        program.close()
        self._ask_next()

    def _report(self, kind: bytes, *fields: bytes | int) -> None:
        self._send(self._name, self._number, kind, *fields)

    def _close_gate(self) -> None:
        """Start the asked worker by exec; a process behind the gate ends."""
        if self._asked is not None:
            record, program, gate = self._asked
            self._asked = self.deadline = None
            os.close(gate)
            self._execute(record, program)
        self._ask_next()

    def _end(self, why: str, kind: bytes = b"gone") -> None:
        """Kill it, and start its workers by exec; report that, unless `kind` is empty."""
        procfs.send(self._pidfd, signal.SIGKILL)
        self._release()
        if kind:
            self._report(kind, self.pid, why.encode(), monotonic_ns())
        self._close_gate()
        waiting, self._waiting = self._waiting, []
        for record, program in waiting:
            self._execute(record, program)

    def _release(self) -> None:
        self.gone, self.ready = True, False
        os.close(self._pidfd)
        self._poller.forget(self._wire.number)
        self._socket.detach()  # `forget` has closed it


def _open(gate: int) -> None:
    try:
        os.write(gate, b"!")
    except BrokenPipeError:  # killed behind the gate: its end is reported like any other
        return
    finally:
        os.close(gate)
