"""The guardian: a small process that starts an agent's workers and outlives none of them.

The agent is a Python process with threads and may be killed at any instruction; what must happen
all the same is done here, by a process with one thread, one loop and nothing but the standard
library's leanest modules. It forks the workers, says when each ends, stops or continues, stops what
they leave behind, and when its agent is gone kills everything that is left.

Why nothing escapes. The guardian is a *child subreaper*: a process below it whose parent ends
becomes the guardian's own child, also one that forked twice and made a session of its own. So the
workers and all their descendants are exactly the tree below the guardian, and "no child left"
(ECHILD), which the kernel says, means that nobody is left. To kill the tree, kill the children;
each death hands up the next generation and raises SIGCHLD; repeat until ECHILD. And a child's pid
cannot pass to a stranger before its parent reaps it, so no signal sent here can hit one. The
workers in turn have PDEATHSIG=SIGKILL, for the case that the guardian is the one killed; it fires
when the *thread* that forked them ends, one more reason to fork from a process with only one.

Whose orphan is it? When a worker ends, what it leaves behind has just become our child. It belongs
to the worker whose mark it carries in its environment, or whose session it is in; one that has
thrown away both is left alone until the last worker is gone, and then goes as well.

In which order did they die? Pidfds in an epoll come out in the order in which they became readable,
so that two workers that die within the guardian's sleep are still reported in the right order.

Adopted workers were forked elsewhere (by multiprocessing, in the agent), so they and their orphans
are not our children: their ends are seen through a pidfd that the agent hands over, their families
are searched in all of /proc.

What if nobody vouches for the workers any more? On several hosts they may run as long as the
agent's lease lasts, which it renews by messages; when it is over, they are killed from here, also
when the agent is suspended, or has lost touch and does not know it yet. It is looked at first
whenever this process wakes, as the whole host may have been paused: before anything is started.

The parts: `Guardian` is the loop, `_wire` its end of the socket, `_ward` what it knows of a worker;
`_become` turns a forked child into one; `_frames` says what a message looks like. From the agent:
`spawn`, `adopt`, `signal`, `stop`, `lease`, `bye`; to the agent: `started`, `refused`, `exited`,
`stopped`, `continued`, `gone`, `lapsed`; the arguments are written where each is handled or sent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from functools import partial
from time import monotonic_ns

from . import _procfs
from ._become import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, become, prctl
from ._deadman import Deadman
from ._ward import Worker
from ._wire import Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: How long the dead agent's logs wait for processes that SIGKILL does not end.
DRAIN_AFTER_NS = 2_000_000_000


class Guardian:
    """The loop.

    `wire` is the socket to the agent, `agent_pidfd` its process (-1: it has ended), `patience` the
    nanoseconds after SIGKILL in which a process has to end or else is given up.
    """

    def __init__(self, wire: Wire, agent_pidfd: int, patience: int) -> None:
        self._wire = wire
        self._patience = patience
        self._pid = os.getpid()
        self._workers: dict[int, Worker] = {}  # by the agent's number, until gone
        self._by_pid: dict[int, Worker] = {}  # our children that are workers, until reaped
        self._owners: dict[int, Worker | None] = {}  # of orphans, until reaped
        self._sweep_due = False
        self._agent_gone = False
        self._deadman = Deadman()
        self._frames: list[list[bytes]] = []  # heard, not yet obeyed
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._wake, wakeup = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch(self._wake, self._on_sigchld)
        if agent_pidfd >= 0:
            self._watch(agent_pidfd, self.on_agent_gone)
        self._watch(wire.number, self._on_agent)

    def run(self) -> None:
        """Serve the agent until it is gone, then see to it that everything else is."""
        try:
            while not (self._agent_gone or self._wire.closed):
                events = self._epoll.poll(self._timeout())
                self._keep_lease()
                # Ends before commands: what died before a stop was asked for did so by itself.
                for fd, _ in sorted(events, key=lambda event: event[0] == self._wire.number):
                    handler = self._handlers.get(fd)
                    if handler is not None:
                        handler()
                frames, self._frames = self._frames, []
                for frame in frames:
                    self._obey(frame)
                self._keep_deadlines()
                if self._sweep_due:
                    self._sweep()
            self._hear_last_words()
        finally:
            self._last_stand()

    # --- the agent's messages

    def _on_agent(self) -> None:
        self._wire.flush()
        self._expect_agent()
        self._hear()

    def _hear(self) -> bool:
        """Take in what the agent sent, as far as one read goes; False: there is nothing more."""
        frames = self._wire.hear()
        for frame in frames or ():
            if frame[0] == b"lease":  # until when, in ns; 0: for ever
                self._deadman.renew(int(frame[1]) or None)
            else:
                self._frames.append(frame)
        return frames is not None

    def _keep_lease(self) -> None:
        """Kill the workers if their lease is over."""
        if not self._deadman.over(monotonic_ns()):
            return
        while self._hear():  # a renewal may lie there
            continue
        now = monotonic_ns()
        if not self._deadman.lapses(now) or not self._workers:
            return
        self._tell(b"lapsed", 0, len(self._workers), now)
        for worker in self._workers.values():
            worker.grace = 0
            if not worker.killing:
                worker.deadline = now
        self._keep_deadlines()

    def _obey(self, frame: list[bytes]) -> None:
        match frame[0]:
            case b"spawn":
                self._spawn(frame)
            case b"adopt":
                self._adopt(frame)
            case b"signal":  # worker, signal number: to its process group
                found = self._workers.get(int(frame[1]))
                if found is not None and not found.exited:
                    self._signal(found, int(frame[2]))
            case b"stop":  # signal number, grace ns, workers
                self._stop(int(frame[1]), int(frame[2]), [int(word) for word in frame[3:]])
            case b"bye":
                self._agent_gone = True
            case word:
                raise RuntimeError(f"the agent sent a message {word!r} that no guardian knows")

    def _spawn(self, frame: list[bytes]) -> None:
        # worker, token, grace ns, then four counts (fd targets, drains, arguments, variables) and
        # that many fields each; the fds: the working directory, one per target, one per drain.
        worker = Worker(int(frame[1]), frame[2], int(frame[3]))
        counts = [int(word) for word in frame[4:8]]
        parts, at = [], 8
        for count in counts:
            parts.append(frame[at : at + count])
            at += count
        targets, paths, argv, variables = parts
        directory = self._wire.fds.pop(0)
        mapping = {int(target): self._wire.fds.pop(0) for target in targets}
        worker.drains = [(self._wire.fds.pop(0), path) for path in paths]
        env = dict(variable.split(b"=", 1) for variable in variables)
        if self._deadman.over(now := monotonic_ns()):
            for fd in (directory, *mapping.values()):
                os.close(fd)
            self._close_drains(worker)
            self._tell(b"exited", worker.worker, signal.SIGKILL, 0, now)
            self._tell(b"gone", worker.worker, 0, 0, now)
            return
        worker.exec_pipe, report = os.pipe()
        os.set_blocking(worker.exec_pipe, False)
        try:
            worker.pid = os.fork()
        except OSError as error:
            os.close(report)
            os.close(worker.exec_pipe)
            self._close_drains(worker)
            self._tell(b"refused", worker.worker, b"fork", error.errno or 0, b"")
            self._tell(b"gone", worker.worker, 0, 0, monotonic_ns())
        else:
            if worker.pid == 0:
                become(argv, env, directory, mapping, report, self._pid)
            os.close(report)
            self._workers[worker.worker] = self._by_pid[worker.pid] = worker
            worker.pidfd = os.pidfd_open(worker.pid)
            self._watch(worker.exec_pipe, partial(self._on_exec, worker))
            self._watch(worker.pidfd, partial(self._on_exit, worker))
        finally:
            for fd in (directory, *mapping.values()):
                os.close(fd)

    def _adopt(self, frame: list[bytes]) -> None:
        # worker, token, grace ns, pid, paths of the drains; the fds: its pidfd, one per drain.
        worker = Worker(int(frame[1]), frame[2], int(frame[3]))
        worker.pid, worker.pidfd = int(frame[4]), self._wire.fds.pop(0)
        worker.adopted = True
        worker.drains = [(self._wire.fds.pop(0), path) for path in frame[5:]]
        self._workers[worker.worker] = worker
        self._watch(worker.pidfd, partial(self._on_exit, worker))
        if self._deadman.over(now := monotonic_ns()):
            worker.grace, worker.deadline = 0, now

    def _stop(self, signum: int, grace: int, numbers: list[int]) -> None:
        for fd, _ in self._epoll.poll(0):  # who has ended by now did so by itself
            for worker in list(self._workers.values()):
                if fd in (worker.exec_pipe, worker.pidfd):
                    self._handlers[fd]()
        deadline = monotonic_ns() + grace
        for number in numbers:
            found = self._workers.get(number)
            if found is None:
                continue
            found.grace = min(found.grace, grace)
            if found.deadline is None or deadline < found.deadline:
                found.deadline = deadline
            if not found.exited:
                found.stopped = True
                self._signal(found, signum)
                self._signal(found, signal.SIGCONT)  # a suspended worker could not heed the first
        self._sweep_due = True

    def _signal(self, worker: Worker, signum: int) -> None:
        """Signal a worker's process group, or it alone as long as it has none of its own."""
        if worker.exec_pipe >= 0 and signum != signal.SIGKILL:
            if signum != signal.SIGCONT:
                worker.pending = signum  # the child still ignores what we ignore
        elif worker.adopted:
            if _procfs.send(worker.pidfd, 0) and _group(worker.pid) == worker.pid:
                _kill(-worker.pid, signum)
            else:
                _procfs.send(worker.pidfd, signum)
        # Not reaped: the pid is still its own.
        elif worker.status is None and not _kill(-worker.pid, signum):
            _kill(worker.pid, signum)

    # --- what the workers do

    def _on_exec(self, worker: Worker) -> None:
        try:
            report = os.read(worker.exec_pipe, 65536)
        except BlockingIOError:  # not yet
            return
        self._forget(worker.exec_pipe)
        worker.exec_pipe = -1
        if report:
            stage, code, path = report.split(b"\0", 2)
            worker.refused = True
            self._tell(b"refused", worker.worker, stage, int(code), path)
            return
        self._tell(b"started", worker.worker, worker.pid, monotonic_ns())
        if worker.pending:
            self._signal(worker, worker.pending)

    def _on_exit(self, worker: Worker) -> None:
        if worker.exited:
            return
        if not worker.adopted and worker.status is None:
            pid, wait_status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                worker.muted = True  # until SIGCHLD; its pidfd would wake us without end
                self._epoll.modify(worker.pidfd, 0)
                return
            self._reaped(pid, wait_status)
        now = monotonic_ns()
        if worker.exec_pipe >= 0:
            self._on_exec(worker)
        worker.exited = True
        self._forget(worker.pidfd)
        if not worker.refused:
            status: int | bytes = worker.status if worker.status is not None else b""
            self._tell(b"exited", worker.worker, status, int(worker.stopped), now)
        if worker.deadline is None:
            worker.deadline = now + worker.grace
        self._sweep_due = True

    def _on_sigchld(self) -> None:
        self._clear_wakeups()
        self._reap()

    def _reap(self) -> bool:
        """Collect what ended; False: no child is left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            worker = self._by_pid.get(pid)
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if worker is None:
                    continue
                if worker.exec_pipe >= 0:  # first things first
                    self._on_exec(worker)
                if os.WIFSTOPPED(status):
                    signum = os.WSTOPSIG(status)
                    self._tell(b"stopped", worker.worker, signum, monotonic_ns())
                else:
                    self._tell(b"continued", worker.worker, signal.SIGCONT, monotonic_ns())
            else:
                self._reaped(pid, status)

    def _reaped(self, pid: int, status: int) -> None:
        worker = self._by_pid.pop(pid, None)
        if worker is not None:
            worker.status = status  # told in the order of the pidfds
            if worker.muted and not worker.exited:
                self._epoll.modify(worker.pidfd, select.EPOLLIN)
        else:
            self._owners.pop(pid, None)
            self._sweep_due = True

    # --- what the workers leave behind

    def _keep_deadlines(self) -> None:
        now = monotonic_ns()
        for worker in list(self._workers.values()):
            if worker.deadline is None or now < worker.deadline:
                continue
            if worker.killing:
                if now >= worker.deadline + self._patience:
                    self._give_up(worker)
                continue
            worker.killing = True
            self._sweep_due = True
            if not worker.exited:
                if worker.adopted:  # its orphans would be lost with it: all at once
                    self._kill_adopted(worker)
                else:
                    self._signal(worker, signal.SIGKILL)

    def _give_up(self, worker: Worker) -> None:
        """Tell the agent that it need not wait; the processes stay ours until they end."""
        stuck = sum(pid in self._owners for pid in worker.left) + len(worker.relatives)
        for fd in worker.relatives.values():
            self._forget(fd)
        if not worker.exited:
            stuck += 1
            worker.exited = True
            self._forget(worker.pidfd)
            self._tell(b"exited", worker.worker, signal.SIGKILL, 1, monotonic_ns())
        self._tell_gone(worker, stuck)

    def _tell_gone(self, worker: Worker, stuck: int) -> None:
        del self._workers[worker.worker]
        self._close_drains(worker)
        self._tell(b"gone", worker.worker, len(worker.left), stuck, monotonic_ns())

    def _sweep(self) -> None:
        """Stop what ended workers left behind; tell of those of whom nothing is left."""
        self._sweep_due = False
        ended = [worker for worker in self._workers.values() if worker.exited]
        if not ended:
            return
        self._reap()
        orphans: dict[int, list[int]] = {}
        for pid in _procfs.children(self._pid, self._pid):
            if pid in self._by_pid:
                continue
            owner = self._owner(pid)
            if owner is None and not self._by_pid:
                owner = ended[-1]
            if owner is not None and owner.exited:
                orphans.setdefault(owner.worker, []).append(pid)
        for worker in ended:
            found = orphans.get(worker.worker, [])
            for pid in found:
                self._stop_orphan(worker, pid, partial(_kill, pid))
            if worker.adopted:
                self._stop_relatives(worker)
            if not found and not worker.relatives:
                self._tell_gone(worker, 0)

    def _stop_orphan(self, worker: Worker, pid: int, send: Callable[[int], object]) -> None:
        worker.left.add(pid)
        if worker.killing:
            send(signal.SIGKILL)
        elif pid not in worker.warned:
            worker.warned.add(pid)
            send(signal.SIGTERM)
            send(signal.SIGCONT)

    def _stop_relatives(self, worker: Worker) -> None:
        """As `_stop_orphan`, for those of an adopted worker's family, who are not our children."""
        # Without members its session's number may be a stranger's by the next look.
        sessions = (worker.pid,) if worker.session else ()
        found = _procfs.family(sessions, (worker.token,))
        worker.session = any(
            entry is not None and entry.session in sessions for entry in map(_procfs.stat, found)
        )
        for pid in found:
            if pid not in worker.relatives:
                try:
                    worker.relatives[pid] = fd = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                self._watch(fd, partial(self._on_relative_exit, worker, pid))
            fd = worker.relatives[pid]
            self._stop_orphan(worker, pid, partial(_procfs.send, fd))

    def _on_relative_exit(self, worker: Worker, pid: int) -> None:
        self._forget(worker.relatives.pop(pid))
        self._sweep_due = True

    def _owner(self, pid: int) -> Worker | None:
        if pid not in self._owners:
            entry, found = _procfs.stat(pid), _procfs.mark(pid)
            owner = None
            for worker in self._workers.values():
                if _procfs.belongs(found, worker.token) or (
                    entry is not None and entry.session == worker.pid
                ):
                    owner = worker
            self._owners[pid] = owner
        return self._owners[pid]

    def _kill_adopted(self, worker: Worker) -> None:
        # Stopped first, so that it starts nobody while its family is looked up.
        _procfs.send(worker.pidfd, signal.SIGSTOP)
        for pid in _procfs.family((worker.pid,), (worker.token,), roots=(worker.pid,)):
            _kill(pid, signal.SIGKILL)
        _procfs.send(worker.pidfd, signal.SIGKILL)

    # --- the end

    def on_agent_gone(self) -> None:
        """The agent has ended: so will all others."""
        self._agent_gone = True

    def _hear_last_words(self) -> None:
        """Read what the agent said before its end: workers forked by then are to die, too."""
        while self._hear():
            continue
        for frame in self._frames:
            if frame[0] == b"adopt":
                self._adopt(frame)
            elif frame[0] == b"spawn":  # its working directory, targets and drains
                for _ in range(1 + int(frame[4]) + int(frame[5])):
                    os.close(self._wire.fds.pop(0))

    def _last_stand(self) -> None:
        """Kill everything until nothing is left, and save what the dead agent had not read."""
        begun, drained = monotonic_ns(), False
        adopted = [worker for worker in self._workers.values() if worker.adopted]
        for worker in adopted:
            self._kill_adopted(worker)
        sessions, tokens = [w.pid for w in adopted], [w.token for w in adopted]
        while True:
            alive = self._reap()
            for worker in self._by_pid.values():
                _kill(-worker.pid, signal.SIGKILL)  # a group dies in one step, whoever forks in it
            for pid in _procfs.children(self._pid, self._pid):
                _kill(pid, signal.SIGKILL)
            if adopted and _procfs.kill_family(sessions, tokens, 1):
                alive = True
            if not alive:
                break
            patient = monotonic_ns() - begun < DRAIN_AFTER_NS
            if not patient and not drained:
                drained = True
                self._drain()
            select.select([self._wake], [], [], 0.05 if patient else 1)
            self._clear_wakeups()
        self._drain()

    def _drain(self) -> None:
        for worker in self._workers.values():
            for fd, path in worker.drains:
                os.set_blocking(fd, False)
                try:
                    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
                    try:
                        while data := os.read(fd, 1 << 16):
                            while data:
                                data = data[os.write(file, data) :]
                    finally:
                        os.close(file)
                except BlockingIOError:  # all that is there; a writer is left
                    continue
                except OSError as error:
                    print(f"regrow guardian: cannot save a log: {error}", file=sys.stderr)

    # --- plumbing

    def _tell(self, *fields: bytes | int) -> None:
        self._wire.tell(*fields)
        self._expect_agent()

    def _expect_agent(self) -> None:
        interest = select.EPOLLIN | (select.EPOLLOUT if self._wire.pending else 0)
        self._epoll.modify(self._wire.number, interest)

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)
        os.close(fd)

    def _clear_wakeups(self) -> None:
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            return

    def _close_drains(self, worker: Worker) -> None:
        for fd, _ in worker.drains:
            os.close(fd)

    def _timeout(self) -> float | None:
        """Seconds until the next grace, the patience after it, or the lease is over."""
        deadlines = [
            worker.deadline + (self._patience if worker.killing else 0)
            for worker in self._workers.values()
            if worker.deadline is not None
        ]
        if self._workers and (lapse := self._deadman.next()) is not None:
            deadlines.append(lapse)
        if not deadlines:
            return None
        # Rounded up: a wait that ends too early would only be begun again.
        return max(0, min(deadlines) - monotonic_ns() + 999_999) // 1_000_000 / 1000


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def main() -> None:
    """The process: argv is the agent's pid, the number of the socket to it, and the patience."""
    agent, number, patience = (int(word) for word in sys.argv[1:4])
    os.setsid()  # the terminal's Ctrl-C is the agent's to answer
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"regrow-guardian")
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != number:
            try:
                os.close(int(name))
            except OSError:  # the directory's own
                continue
    os.set_inheritable(number, False)
    try:
        agent_pidfd = os.pidfd_open(agent)
    except ProcessLookupError:
        agent_pidfd = -1
    guardian = Guardian(Wire(number), agent_pidfd, patience)
    if agent_pidfd < 0 or os.getppid() != agent:  # it died before it could be watched
        guardian.on_agent_gone()
    guardian.run()
