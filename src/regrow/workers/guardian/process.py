"""The guardian: a small process that starts an agent's workers; no worker outlives it.

The agent is a Python process with threads and may be killed at any instruction. The guardian does
what must happen in spite of that. It has one thread, one loop and the smallest modules of the
standard library. It forks the workers, reports when each ends, is suspended or resumed, and stops
what they leave behind. When its agent is gone, it kills everything that is left.

Why no process escapes. The guardian is a *child subreaper*: if the parent of a process below it
ends, the process becomes the guardian's own child. This includes a process that forked twice and
created its own session. So the workers and all their descendants are exactly the tree below the
guardian. "No child left" (ECHILD) from the kernel means that the tree is empty. To kill the tree,
the guardian kills its children; each death hands up the next generation and raises SIGCHLD; it
repeats this until ECHILD. The kernel does not reuse a child's pid before its parent reaps it, so no
signal of the guardian hits an unrelated process. In addition the workers have PDEATHSIG=SIGKILL, in
case the guardian itself is killed. It fires when the *thread* that forked them ends. This is one
more reason to fork from a process with only one thread.

Owners of orphans. When a worker ends, its remaining children become children of the guardian. An
orphan belongs to a worker if it carries the worker's mark in its environment, or is in the worker's
session. An orphan with neither continues until the last worker is gone, and is then stopped as
well.

Order of deaths. An epoll returns pidfds in the order in which they became readable. So if two
workers die while the guardian sleeps, it still reports them in the right order.

Adopted workers. multiprocessing forked them in the agent, so they and their orphans are not
children of the guardian. The guardian watches each by a pidfd from the agent, and searches all of
/proc for its descendants.

The lease. On several hosts, workers may run only during the agent's lease, which the agent renews
by messages. When the lease expires, the guardian kills the workers. This also happens if the agent
is suspended, or has lost its connection without noticing. After each wake-up the guardian checks
the lease before it starts any worker, because the whole host may have been paused.

The parts:
- `MainLoop` handles the agent's requests.
- `Reaper` watches the workers and what they leave behind.
- `WorkerRecords` and `LeaseTimer` decide, without I/O.
- `Wire` is the socket to the agent.
- `Program` turns a forked child into a worker.
- `Template`, if the agent requests one, forks workers that have imported modules already; as a
  standby, it becomes a worker.
- `shut_down` ends everything.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import _socket
import os
import select
import sys
from time import monotonic_ns

from . import procfs
from .protocol import Wire
from .reaper import Reaper, close_drains, kill
from .records import LeaseTimer, WorkerRecord, WorkerRecords
from .spawn import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, Program, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .template import Template

#: Time after which the dead agent's logs are saved if processes do not end after SIGKILL.
DRAIN_AFTER_NS = 2_000_000_000


class Poller:
    """Waits for descriptors and signals."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        self.on_child: Callable[[], object] = lambda: None  # called after a SIGCHLD
        self.resumptions: list[int] = []  # SIGCONTs, until earlier events are handled
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGCONT, lambda *_: self.resumptions.append(monotonic_ns()))
        self.watch(self._wakeup, self._on_signal)

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` each time a descriptor is readable."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def watch_for(self, fd: int, events: int = select.EPOLLIN) -> None:
        """Change the events for which a descriptor is watched."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Close a watched descriptor."""
        del self._handlers[fd]
        self._epoll.unregister(fd)
        os.close(fd)

    def wait(self, timeout: float | None) -> list[int]:
        """Return the descriptors ready within `timeout` seconds, in the order of their events."""
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def handle(self, fd: int) -> None:
        """Call the handler of a descriptor, unless an earlier handler closed the descriptor."""
        handler = self._handlers.get(fd)
        if handler is not None:
            handler()

    def wait_for_signal(self, timeout: float) -> None:
        """Sleep until a child ends, or for `timeout` seconds."""
        if select.select([self._wakeup], [], [], timeout)[0]:
            os.read(self._wakeup, 4096)

    def _on_signal(self) -> None:
        os.read(self._wakeup, 4096)
        self.on_child()


class MainLoop:
    """The guardian's one loop.

    Args:
        wire: the socket to the agent.
        agent: process id of the agent.
        kill_timeout: ns from SIGKILL until the guardian gives up on a process.
    """

    def __init__(self, wire: Wire, agent: int, kill_timeout: int) -> None:
        self._wire = wire
        self._poller = Poller()
        self._records = WorkerRecords(kill_timeout)
        self._reaper = Reaper(self._records, self._poller, wire.send)
        self._lease = LeaseTimer()
        self._frames: list[list[bytes]] = []  # received, not yet handled
        self._template: Template | None = None
        self._standbys: list[Template] = []
        self._forking: dict[int, tuple[WorkerRecord, list[int]]] = {}  # with signals for later
        self._reaper.is_of_helper = self._is_of_helper
        self._poller.watch(wire.number, self._on_wire)
        self._agent_gone = False
        try:
            self._poller.watch(os.pidfd_open(agent), self._end)
        except ProcessLookupError:
            self._end()
        if os.getppid() != agent:  # the agent died before it could be watched
            self._end()

    def run(self) -> None:
        """Serve the agent until it is gone, then shut down."""
        try:
            while not (self._agent_gone or self._wire.closed):
                self._run_once()
            self._receive_rest()
        finally:
            shut_down(self._records, self._reaper, self._poller)

    def _end(self) -> None:
        """Shut down: the agent has ended, or requests it."""
        self._agent_gone = True

    def _run_once(self) -> None:
        to_send = select.EPOLLOUT if self._wire.pending else 0
        self._poller.watch_for(self._wire.number, select.EPOLLIN | to_send)
        # The next poll reads all events that happened while this process was suspended.
        resumptions = len(self._poller.resumptions)
        ready = self._poller.wait(0 if resumptions else self._timeout())
        self._keep_lease()
        # Ends before commands: a worker that died before the request for a stop died by itself.
        for fd in sorted(ready, key=lambda fd: fd == self._wire.number):
            self._poller.handle(fd)
        frames, self._frames = self._frames, []
        for frame in frames:
            self._handle(frame)
        self._reaper.keep_deadlines()
        for helper in self._helpers():
            helper.check(monotonic_ns())
        self._standbys = [each for each in self._standbys if not each.gone]
        if self._reaper.sweep_due:
            self._reaper.sweep()
        del self._poller.resumptions[:resumptions]

    def _timeout(self) -> float | None:
        """Return the seconds until the next grace, kill_timeout or lease ends."""
        checks = [self._records.next_check()]
        if self._records.by_number:
            checks.append(self._lease.next_check())
        checks += [helper.deadline for helper in self._helpers()]
        first = min((check for check in checks if check is not None), default=None)
        if first is None:
            return None
        # Rounded up, because a wait that ends too early would only start again.
        return max(0, first - monotonic_ns() + 999_999) // 1_000_000 / 1000

    def _keep_lease(self) -> None:
        """Kill the workers if their lease has expired."""
        if not self._lease.is_over(monotonic_ns()):
            return
        while self._receive():  # a renewal may be waiting there
            continue
        now = monotonic_ns()
        if self._lease.expire(now) and self._records.by_number:
            self._wire.send(b"lapsed", 0, len(self._records.by_number), now)
            self._records.end_lease(now)
            self._reaper.keep_deadlines()

    # --- the agent's messages

    def _on_wire(self) -> None:
        self._wire.flush()
        self._receive()

    def _receive(self) -> bool:
        """Read once from the agent's socket; return False if there was nothing to read.

        A renewed lease takes effect at once. Other messages are queued.
        """
        frames = self._wire.receive()
        for frame in frames or ():
            if frame[0] == b"lease":  # end of the lease in ns; 0: without end
                self._lease.renew(int(frame[1]) or None)
            else:
                self._frames.append(frame)
        return frames is not None

    def _handle(self, frame: list[bytes]) -> None:
        match frame[0]:
            case b"spawn":
                self._spawn(frame)
            case b"preload" | b"stand_by":
                self._prepare(frame)
            case b"dismiss":  # 1: only those that do not wait at their wrapped call yet
                self._dismiss(only_starting=frame[1] == b"1")
            case b"adopt":
                self._adopt(frame)
            case b"stop":  # signal number (0: none), grace in ns, workers
                self._stop(int(frame[1]), int(frame[2]), [int(word) for word in frame[3:]])
            case b"bye":
                self._end()
            case word:
                raise RuntimeError(f"the agent sent an unknown message {word!r}")

    def _prepare(self, frame: list[bytes]) -> None:
        """Start a template or a standby."""
        from .template import Template

        program = Program(frame, self._wire.fds)
        name = b"template" if frame[0] == b"preload" else b"standby"
        try:
            started = Template(
                name,
                int(frame[1]),
                program,
                self._poller,
                self._wire.send,
                self._begin,
                self._execute,
                lambda: not self._lease.is_over(monotonic_ns()),
            )
        except OSError as error:
            why = f"it cannot be started: {os.strerror(error.errno or 0)}"
            self._wire.send(name, int(frame[1]), b"gone", 0, why.encode(), monotonic_ns())
        else:
            if name == b"template":
                self._template = started
            else:
                self._standbys.append(started)
        finally:
            program.close()

    def _dismiss(self, *, only_starting: bool) -> None:
        for standby in self._standbys:
            if not (only_starting and standby.ready):
                standby.dismiss()

    def _helpers(self) -> list[Template]:
        """Return the template, if there is one, and the standbys."""
        return [*self._standbys, *([] if self._template is None else [self._template])]

    def _is_of_helper(self, pid: int) -> bool:
        helpers = [helper for helper in self._helpers() if not helper.gone]
        entry = procfs.stat(pid) if helpers else None
        session = entry.session if entry is not None else None
        return any(helper.owns(pid, session) for helper in helpers)

    def _spawn(self, frame: list[bytes]) -> None:
        program = Program(frame, self._wire.fds)
        record = WorkerRecord(int(frame[1]), frame[2], int(frame[3]), program.drains)
        free = [each for each in self._standbys if each.is_free]
        if self._template is not None and self._template.ready:
            free.append(self._template)
        if free:
            self._forking[record.number] = record, []
            free[0].start(record, program)
        else:
            self._execute(record, program)

    def _execute(self, record: WorkerRecord, program: Program) -> None:
        """Start a worker's program by exec."""
        try:
            if self._lease.is_over(now := monotonic_ns()):
                self._wire.send(b"lapsed", 0, 1, now)
                self._reaper.send_exited(record, signal.SIGKILL, 0, now)
            else:
                record.pid, record.exec_pipe = program.start(os.getpid())
        except OSError as error:
            self._wire.send(b"refused", record.number, b"fork", error.errno or 0, b"")
        finally:
            program.close()
        if record.pid:
            record.pidfd = os.pidfd_open(record.pid)
            self._reaper.watch(record)
            self._signal_late(record)
        else:
            self._forking.pop(record.number, None)
            close_drains(record)
            self._wire.send(b"gone", record.number, 0, 0, monotonic_ns())

    def _begin(self, record: WorkerRecord) -> None:
        """Watch a worker from a template or a standby; it still waits behind its gate."""
        self._reaper.watch(record)
        self._reaper.send_started(record)
        self._signal_late(record)

    def _signal_late(self, record: WorkerRecord) -> None:
        """Send a worker the signals of stops that came while it was being started."""
        _, signals = self._forking.pop(record.number, (record, []))
        for signum in signals:
            self._reaper.signal(record, signum)

    def _adopt(self, frame: list[bytes]) -> None:
        # Fields: worker, token, grace in ns, pid, paths of the drains. Descriptors: its pidfd, one
        # per drain.
        pidfd, *drains = (self._wire.fds.pop(0) for _ in frame[4:])
        paths = zip(drains, frame[5:], strict=True)
        record = WorkerRecord(int(frame[1]), frame[2], int(frame[3]), list(paths))
        record.pid, record.pidfd, record.adopted = int(frame[4]), pidfd, True
        self._reaper.watch(record)
        self._reaper.send_started(record)
        if self._lease.is_over(now := monotonic_ns()):
            self._wire.send(b"lapsed", 0, 1, now)
            record.grace, record.deadline = 0, now

    def _stop(self, signum: int, grace: int, numbers: list[int]) -> None:
        self._reaper.note_ends()  # a worker that has ended by now died by itself
        now = monotonic_ns()
        for number in numbers:
            if number in self._forking:
                record, signals = self._forking[number]
                if record.stop(signum, grace, now):
                    signals.append(signum)
            found = self._records.by_number.get(number)
            if found is not None and found.stop(signum, grace, now):
                self._reaper.signal(found, signum)
                self._reaper.signal(found, signal.SIGCONT)  # a suspended worker handles no signal
        self._reaper.sweep_due = True

    def _receive_rest(self) -> None:
        """Read the agent's last messages, because they may name forked workers to kill."""
        while self._receive():
            continue
        for frame in self._frames:
            if frame[0] == b"adopt":
                self._adopt(frame)
            elif frame[0] in (b"spawn", b"preload", b"stand_by"):
                Program(frame, self._wire.fds)  # takes its descriptors off the list


def shut_down(records: WorkerRecords, reaper: Reaper, poller: Poller) -> None:
    """Kill all processes until none is left, and save output that the dead agent had not read."""
    begun, saved, pid = monotonic_ns(), False, os.getpid()
    drains = [drain for record in records.by_number.values() for drain in record.drains]
    adopted = [record for record in records.by_number.values() if record.adopted]
    for record in adopted:
        if not record.exited:
            reaper.kill_adopted(record)
    sessions, tokens = [each.pid for each in adopted], [each.token for each in adopted]
    while True:
        alive = reaper.reap()
        for group in records.by_pid:
            kill(-group, signal.SIGKILL)  # a group dies in one step, whichever member forks
        for child in procfs.children(pid, pid):
            kill(child, signal.SIGKILL)
        if adopted and procfs.kill_family(sessions, tokens, 1):
            alive = True
        if not alive:
            break
        patient = monotonic_ns() - begun < DRAIN_AFTER_NS
        if not patient and not saved:
            saved = True
            save_logs(drains)
        poller.wait_for_signal(0.05 if patient else 1)
    save_logs(drains)


def save_logs(drains: Iterable[tuple[int, bytes]]) -> None:
    """Append the content of each pipe to its file; report a file that cannot be written."""
    for fd, path in drains:
        os.set_blocking(fd, False)
        try:
            with open(path, "ab") as file:
                while data := os.read(fd, 1 << 16):
                    file.write(data)
        except BlockingIOError:  # the pipe is empty; a writer is left
            continue
        except OSError as error:
            print(f"regrow guardian: cannot save a log: {error}", file=sys.stderr)


def main() -> None:
    """Run the process; argv: the agent's pid, the number of the socket to it, the kill_timeout."""
    agent, number, kill_timeout = (int(word) for word in sys.argv[1:4])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"regrow-guardian")
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != number:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the directory itself
                continue
    os.set_inheritable(number, False)
    MainLoop(Wire(_socket.socket(fileno=number)), agent, kill_timeout).run()
