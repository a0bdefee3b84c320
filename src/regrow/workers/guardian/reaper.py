"""The guardian's reactions to events of the kernel: ends of workers, and what they leave behind.

Such an event is a readable pidfd, a reaped child or a passed deadline. The reaper reports it to the
agent, and stops what ended workers left behind. `process` handles the agent's requests, and
explains why no process escapes.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import os
from time import monotonic_ns

from . import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .process import Poller
    from .records import WorkerRecord, WorkerRecords


class Reaper:
    """Watches workers from their start until no process of theirs is left.

    Args:
        records: records of the workers.
        poller: wakes the guardian.
        send: sends a message to the agent.
    """

    def __init__(self, records: WorkerRecords, poller: Poller, send: Callable[..., None]) -> None:
        self._records = records
        self._poller = poller
        self._send = send
        self._pid = os.getpid()
        self.sweep_due = False
        self.is_of_helper: Callable[[int], bool] = lambda pid: False
        """Whether a child is a template, or a standby that is no worker yet."""
        poller.on_child = self.reap

    def watch(self, record: WorkerRecord) -> None:
        """Watch a worker that was started or adopted."""
        self._records.add(record)
        if record.exec_pipe >= 0:
            self._poller.watch(record.exec_pipe, lambda: self._on_exec(record))
        self._poller.watch(record.pidfd, lambda: self._on_exit(record))

    def signal(self, record: WorkerRecord, signum: int) -> None:
        """Signal a worker's process group, or the worker alone before it has a group."""
        # Until the worker is reaped, no other process or group gets its number. A child that does
        # not run its program yet blocks the signals that would end it.
        if procfs.send(record.pidfd, 0) and not kill(-record.pid, signum):
            procfs.send(record.pidfd, signum)

    def note_ends(self) -> None:
        """Report the workers that have ended by now, before any other action."""
        fds = {
            fd for each in self._records.by_number.values() for fd in (each.exec_pipe, each.pidfd)
        }
        for fd in self._poller.wait(0):
            if fd in fds:
                self._poller.handle(fd)

    def reap(self) -> bool:
        """Collect ended children; return False if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                self._note_reaped(pid, status)
            elif (record := self._records.by_pid.get(pid)) is not None:
                if record.exec_pipe >= 0:  # `started` must come first
                    self._on_exec(record)
                stopped = os.WIFSTOPPED(status)
                signum = os.WSTOPSIG(status) if stopped else signal.SIGCONT
                kind = b"stopped" if stopped else b"continued"
                self._send(kind, record.number, signum, monotonic_ns())

    def keep_deadlines(self) -> None:
        """Kill the workers after their grace; give up on those that did not end after SIGKILL."""
        to_kill, to_give_up = self._records.due(monotonic_ns())
        for record in to_kill:
            self.sweep_due = True
            if not record.exited:
                if record.adopted:
                    # With its descendants: they are not children of the guardian, so SIGKILL must
                    # not orphan them.
                    self.kill_adopted(record)
                else:
                    self.signal(record, signal.SIGKILL)
        for record in to_give_up:
            self._give_up(record)

    def sweep(self) -> None:
        """Stop what ended workers left behind; report workers without any process left."""
        self.sweep_due = False
        if not self._records.ended():
            return
        self.reap()
        children = procfs.children(self._pid, self._pid)
        orphans = self._records.orphans_of_ended(
            [pid for pid in children if not self.is_of_helper(pid)], procfs.mark_and_session
        )
        for record in self._records.ended():
            found = orphans.get(record.number, [])
            for pid in found:
                for signum in record.orphan_signals(pid):
                    kill(pid, signum)
            if record.adopted:
                self._stop_relatives(record)
            if not found and not record.relatives:
                self._send_gone(record, 0)

    def kill_adopted(self, record: WorkerRecord) -> None:
        """Kill an adopted worker, which is not a child of the guardian, with its family."""
        # Stopped first, so that it starts no process during the search for its family.
        procfs.send(record.pidfd, signal.SIGSTOP)
        for pid in procfs.family((record.pid,), (record.token,), roots=(record.pid,)):
            kill(pid, signal.SIGKILL)
        procfs.send(record.pidfd, signal.SIGKILL)

    def send_started(self, record: WorkerRecord) -> None:
        """Report that a worker's program runs, and from what it has started."""
        self._send(b"started", record.number, record.pid, record.source, monotonic_ns())

    def send_exited(
        self, record: WorkerRecord, status: int | bytes, stopping: int, now: int
    ) -> None:
        """Report the end of a worker's process.

        If the guardian was resumed meanwhile, the report has the time of that SIGCONT (else 0),
        because the end may be older than `now`.
        """
        resumed = self._poller.resumptions[-1] if self._poller.resumptions else 0
        self._send(b"exited", record.number, status, stopping, resumed, now)

    # --- events of the workers

    def _on_exec(self, record: WorkerRecord) -> None:
        try:
            failure = os.read(record.exec_pipe, 65536)
        except BlockingIOError:  # not ready yet
            return
        self._poller.forget(record.exec_pipe)
        record.exec_pipe = -1
        if failure:
            stage, code, path = failure.split(b"\0", 2)
            record.refused = True
            self._send(b"refused", record.number, stage, int(code), path)
            return
        self.send_started(record)

    def _on_exit(self, record: WorkerRecord) -> None:
        if record.exited:
            return
        if not record.adopted and record.status is None:
            pid, status = os.waitpid(record.pid, os.WNOHANG)
            if pid == 0:
                # Until SIGCHLD, because its pidfd would wake the guardian without end.
                record.traced = True
                self._poller.watch_for(record.pidfd, 0)
                return
            self._note_reaped(pid, status)
        now = monotonic_ns()
        if record.exec_pipe >= 0:
            self._on_exec(record)
        record.end(now)
        self._poller.forget(record.pidfd)
        if not record.refused:
            known = record.status if record.status is not None else b""
            self.send_exited(record, known, int(record.stopped), now)
        self.sweep_due = True

    def _note_reaped(self, pid: int, status: int) -> None:
        record = self._records.reaped(pid, status)
        if record is None:
            self.sweep_due = True
        elif record.traced and not record.exited:
            self._poller.watch_for(record.pidfd)  # reported in the order of the pidfds

    # --- processes that workers leave behind

    def _give_up(self, record: WorkerRecord) -> None:
        """Notify the agent not to wait; the guardian keeps the processes until they end."""
        stuck = self._records.stuck(record)
        for fd in record.relatives.values():
            self._poller.forget(fd)
        if not record.exited:
            stuck += 1
            record.exited = True
            self._poller.forget(record.pidfd)
            self.send_exited(record, signal.SIGKILL, 1, monotonic_ns())
        self._send_gone(record, stuck)

    def _send_gone(self, record: WorkerRecord, stuck: int) -> None:
        del self._records.by_number[record.number]
        close_drains(record)
        self._send(b"gone", record.number, len(record.orphans), stuck, monotonic_ns())

    def _stop_relatives(self, record: WorkerRecord) -> None:
        """Stop the family of an adopted worker: processes that are not the guardian's children."""
        # Without members, its session's number may belong to an unrelated process at the next poll.
        sessions = (record.pid,) if record.session else ()
        found = procfs.family(sessions, (record.token,))
        record.session = any(
            entry is not None and entry.session in sessions for entry in map(procfs.stat, found)
        )
        for pid in found:
            if pid not in record.relatives:
                try:
                    self._watch_relative(record, pid)
                except ProcessLookupError:
                    continue
            for signum in record.orphan_signals(pid):
                procfs.send(record.relatives[pid], signum)

    def _watch_relative(self, record: WorkerRecord, pid: int) -> None:
        record.relatives[pid] = fd = os.pidfd_open(pid)
        self._poller.watch(fd, lambda: self._on_relative_exit(record, pid))

    def _on_relative_exit(self, record: WorkerRecord, pid: int) -> None:
        self._poller.forget(record.relatives.pop(pid))
        self.sweep_due = True


def close_drains(record: WorkerRecord) -> None:
    """Close a worker's pipes that no longer need to be emptied."""
    for fd, _ in record.drains:
        os.close(fd)


def kill(pid: int, signum: int) -> bool:
    """Signal a process or a group; False: it is gone, or belongs to another user."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
