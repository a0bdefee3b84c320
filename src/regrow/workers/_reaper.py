"""What workers do and leave behind: the half of the guardian that nobody asks for anything.

Everything here follows from what the kernel says: a pidfd is readable, a child was reaped, a
deadline has passed. What comes of it is told to the agent. What the agent wants is `_guardian`'s
part; see there for why nothing escapes.
"""

from __future__ import annotations

import os
import select
import signal
from functools import partial
from time import monotonic_ns

from . import _procfs
from ._ward import Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ._wire import Wire


class Reaper:
    """Workers, from their start until nothing of them is left.

    `wire` is the socket to the agent, `patience` the nanoseconds after SIGKILL in which a process
    has to end or else is given up.
    """

    def __init__(self, wire: Wire, patience: int) -> None:
        self._wire = wire
        self._patience = patience
        self._pid = os.getpid()
        self._workers: dict[int, Worker] = {}  # by the agent's number, until gone
        self._by_pid: dict[int, Worker] = {}  # our children that are workers, until reaped
        self._owners: dict[int, Worker | None] = {}  # of orphans, until reaped
        self._sweep_due = False
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._wake, wakeup = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch(self._wake, self._on_sigchld)

    def _signal(self, worker: Worker, signum: int) -> None:
        """Signal a worker's process group, or it alone as long as it has none of its own."""
        if worker.exec_pipe >= 0 and signum != signal.SIGKILL:
            if signum != signal.SIGCONT:
                worker.pending = signum  # the child still ignores what we ignore
        elif worker.adopted:
            if _procfs.send(worker.pidfd, 0) and _group(worker.pid) == worker.pid:
                kill(-worker.pid, signum)
            else:
                _procfs.send(worker.pidfd, signum)
        # Not reaped: the pid is still its own.
        elif worker.status is None and not kill(-worker.pid, signum):
            kill(worker.pid, signum)

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
                self._stop_orphan(worker, pid, partial(kill, pid))
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
            kill(pid, signal.SIGKILL)
        _procfs.send(worker.pidfd, signal.SIGKILL)

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


def kill(pid: int, signum: int) -> bool:
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
