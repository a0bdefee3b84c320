"""The agent's timer server: compares the stacks of this node's workers, then kills a hung one.

The server is a thread of the agent's process. It does not run in the agent's loop, because a slow
loop must not delay the end of a hung worker. It knows the workers of the current attempt
and keeps the timers of their processes only.

Before the server kills a worker, it reads the stacks of all workers of the node at the same time.
In most hangs one rank is blocked at the wrong place, and all others wait for it. The others often
have shorter timers. So the worker with the expired timer is often not the cause. The comparison
runs once for each attempt: after that the agent stops the other workers, and the server kills them
only if their timers expire as well. The cause may be on another node. So the server also reads the
stacks when a worker of another node hung.

The results go to files beside the worker's logs. A separate thread writes them. The server waits
for it at most `FILES_S`, because a hanging file system is a common cause of hanging training. In
that case the server kills the worker without the files. The results go to the agent's loop too, so
the failure is explained with or without an error file.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, time
from typing import TYPE_CHECKING

from regrow.agent.attempt.environment import TORCHELASTIC_TIMER_FILE
from regrow.agent.features import hang as account
from regrow.agent.features.hang import Hang
from regrow.timer.fifo.server import FileTimerServer, Reaping
from regrow.timer.processes import GONE
from regrow.timer.stacks.answering import Signals
from regrow.timer.stacks.capture import Target, capture
from regrow.timer.stacks.report import Dump, compare_places, dump_path, save, where
from regrow.utils import start_thread
from regrow.workers.errors import ErrorHandler
from regrow.workers.guardian import procfs

if TYPE_CHECKING:
    from regrow.agent.features import StartedWorkers
    from regrow.timer.fifo.request import FileTimerRequest

#: Seconds to read the Python stacks.
STACKS_S = 0.05
#: Seconds to wait for the files about a hang before the worker gets its signal.
FILES_S = 0.03
_MOST_ANCESTORS = 64


def timer_files(environ: Mapping[str, str], log_dir: str | None = None) -> list[str]:
    """Return the possible paths of an agent's pipe, best first.

    Args:
        environ: environment of the agent. The path in `TORCHELASTIC_TIMER_FILE` is used, unless
            the agent runs inside a worker of another agent. Such an agent has inherited the
            variable, and the outer agent reads that pipe.
        log_dir: directory of the job's logs, if there is one: for a host without a writable
            directory for temporary files.
    """
    given = environ.get(TORCHELASTIC_TIMER_FILE)
    if given and not (procfs.MARK in environ and _is_read(given)):
        return [given]
    from regrow.workers.logs.specs import temporary_directory

    name = f"watchdog_timer_{os.urandom(16).hex()}"
    return [os.path.join(place, name) for place in (temporary_directory(), log_dir) if place]


def _is_read(path: str) -> bool:
    """Return whether a process has this pipe open for reading."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def owner(workers: StartedWorkers, pid: int) -> int | None:
    """Return the local rank of the worker that is `pid` or has started it; None if unknown.

    It is unknown for a process outside the workers. It is also unknown for a process that has left
    its worker's session and lost its parent.
    """
    ranks = {worker: rank for rank, worker in workers.context.pids().items()}
    if pid in ranks:  # the worker may have ended in the meantime
        return ranks[pid]
    related = (candidate for ancestor in _lineage(pid) for candidate in ancestor)
    return next((ranks[each] for each in related if each in ranks), None)


def includes(workers: StartedWorkers, pid: int) -> bool:
    """Return whether `pid` is a process of any worker."""
    guardian = workers.guardian.pid
    if pid in (guardian, os.getpid()):
        return False
    if owner(workers, pid) is not None:
        return True
    # All processes below the guardian belong to workers, including one that just starts.
    return any(guardian == ancestor for ancestor, _ in _lineage(pid))


def _error_file(workers: StartedWorkers, local_rank: int | None) -> str:
    """Return the path of a worker's error file; empty if there is none."""
    path = workers.context.error_files.get(local_rank, "") if local_rank is not None else ""
    return "" if path == os.devnull else path


def _stacks_file(workers: StartedWorkers, pid: int) -> str:
    """Return the path for the stacks of a process; empty if there are no logs."""
    beside = _error_file(workers, owner(workers, pid))
    return dump_path(os.path.join(os.path.dirname(beside), "stacks"), pid) if beside else ""


def _lineage(pid: int) -> list[tuple[int, int]]:
    """Return a process and its ancestors, each with its session."""
    found: list[tuple[int, int]] = []
    while pid > 1 and len(found) < _MOST_ANCESTORS and (entry := procfs.stat(pid)) is not None:
        found.append((pid, entry.session))
        pid = entry.parent
    return found


class AgentTimerServer(FileTimerServer):
    """The timer server of one agent, for all attempts.

    Args:
        file_path: path of the pipe, which the constructor creates.
        run_id: the job's id.
        native_s: seconds that py-spy may take for native stacks; 0: no native stacks.
        on_hang: called on the server's thread with each `Hang`, before the process gets its signal.
            It must not block. The request for its stacks may end the process before this call: see
            `await_hang`.
        log_event: as in `FileTimerServer`; it must not block either.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        *,
        native_s: float,
        on_hang: Callable[[Hang], None],
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        super().__init__(file_path, run_id, log_event=log_event)
        self._native_s = native_s
        self._on_hang = on_hang
        self._watched: StartedWorkers | None = None
        self._compared = -1  # the latest attempt with compared workers
        self._examined: frozenset[int] = frozenset()  # processes that get their signal soon
        self._hangs_known = threading.Event()  # set when `on_hang` was called for these processes
        self._writer: threading.Thread | None = None  # writes the latest files

    def watch(self, workers: StartedWorkers) -> None:
        """Keep the timers of these workers from now on."""
        self._watched = workers

    def await_hang(self, pid: int, timeout: float) -> None:
        """Wait for the `on_hang` call of a process that is about to get its signal.

        Return at once for any other process.

        Args:
            pid: the process, which may have ended.
            timeout: maximum wait in seconds.
        """
        if pid in self._examined:
            self._hangs_known.wait(timeout)

    def stop(self) -> None:
        """End the server; see `FileTimerServer.stop`."""
        super().stop()
        if self._writer is not None:
            self._writer.join(FILES_S)

    def refusal(self, pid: int) -> str | None:
        watched = self._watched
        if watched is None or not includes(watched, pid):
            if procfs.stat(pid) is None:  # the process has ended, so its worker is unknown
                return GONE
            return "is of a process that is neither a worker of this agent nor started by one"
        return super().refusal(pid)

    def before_reaping(self, reapings: list[Reaping]) -> None:
        watched = self._watched
        if watched is None:
            return
        self._hangs_known.clear()
        self._examined = frozenset(each.pid for each in reapings if each.signal > 0)
        try:
            self._examine(watched, reapings)
        finally:
            self._examined = frozenset()
            self._hangs_known.set()

    def _examine(self, watched: StartedWorkers, reapings: list[Reaping]) -> None:
        workers = watched.context.pids().values()  # the end of one ends the attempt
        ends = any(each.signal > 0 and each.pid in workers for each in reapings)
        compare_all = ends and self._compared != watched.attempt
        if compare_all:
            self._compared = watched.attempt
        dumps, places = self._read_stacks(watched, reapings, all_workers=compare_all)
        hangs = [_hang_of(watched, each, dumps[each.pid], places) for each in reapings]
        for hang in self._with_files(watched, hangs, dumps):
            self._on_hang(hang)

    def _with_files(
        self, watched: StartedWorkers, hangs: list[Hang], dumps: Mapping[int, Dump]
    ) -> list[Hang]:
        """Write the files of the hangs, within `FILES_S`; return the hangs with the paths."""
        written: list[list[Hang]] = []
        self._start_writer(lambda: written.append(_written(watched, hangs, dumps)))
        if self._writer is not None:
            self._writer.join(FILES_S)
        return written[0] if written else hangs

    def _start_writer(self, write: Callable[[], object]) -> None:
        """Write files on a separate thread, unless the file system still hangs in the latest."""
        if self._writer is None or not self._writer.is_alive():
            self._writer = start_thread(write, "regrow-hang")

    def read_places(self, attempt: int) -> dict[int, str]:
        """Return the current places of an attempt's workers, by rank, without ended workers.

        It takes at most `STACKS_S`. A separate thread writes the stacks to files, and no call waits
        for it. Call it on another thread than the server's.
        """
        watched = self._watched
        if watched is None or watched.attempt != attempt:
            return {}
        dumps, _ = self._read_stacks(watched, [], all_workers=True)
        there = {pid: dump for pid, dump in dumps.items() if dump.outcome != "gone"}
        self._start_writer(lambda: _save(watched, there))
        return {r: where(there[pid]) for r, pid in watched.pids().items() if pid in there}

    def _read_stacks(
        self, watched: StartedWorkers, reapings: list[Reaping], *, all_workers: bool
    ) -> tuple[dict[int, Dump], dict[int, str]]:
        """Read the stacks of hung processes, and of all workers for a comparison.

        Returns:
            The stacks by pid, and the places of the compared workers by rank.
        """
        ranks = {pid: rank for rank, pid in watched.pids().items()} if all_workers else {}
        targets = {
            each.pid: Target(each.pid, each.pidfd, each.signal == signal.SIGKILL)
            for each in reapings
            if each.pidfd >= 0
        }
        opened = []
        try:
            for pid in ranks.keys() - targets.keys():
                with suppress(OSError):  # the process has ended, or no descriptor is free
                    opened.append(os.pidfd_open(pid))
                    targets[pid] = Target(pid, opened[-1])
            native_s = self._native_s if reapings else 0.0
            dumps = capture(list(targets.values()), STACKS_S, native_s)
        finally:
            for fd in opened:
                os.close(fd)
        for each in reapings:
            gone = Dump(each.pid, "gone", "it has ended, or the agent has no descriptors left")
            dumps.setdefault(each.pid, gone)
        return dumps, {ranks[pid]: where(dump) for pid, dump in dumps.items() if pid in ranks}


def _hang_of(
    watched: StartedWorkers, reaping: Reaping, dump: Dump, places: Mapping[int, str]
) -> Hang:
    local_rank = owner(watched, reaping.pid)
    return Hang(
        attempt=watched.attempt,
        local_rank=local_rank,
        rank=None if local_rank is None else watched.ranks[local_rank],
        pid=reaping.pid,
        worker_pid=None if local_rank is None else watched.context.pids().get(local_rank),
        request=reaping.expired[0],
        deadline=reaping.deadline,
        noticed=reaping.noticed,
        signum=reaping.signal,
        dump=dump,
        compared=compare_places(places, watched.world_size) if len(places) > 1 else [],
        over=monotonic() - reaping.deadline,
        places=places,
    )


def _written(
    watched: StartedWorkers, hangs: Sequence[Hang], dumps: Mapping[int, Dump]
) -> list[Hang]:
    """Write the hangs beside the workers' logs; return them with the paths of their stacks."""
    saved = _save(watched, dumps)
    found = [hang._replace(dump=saved[hang.pid]) for hang in hangs]
    for hang in found:
        path = _error_file(watched, hang.local_rank) if hang.is_worker else ""
        if path and not os.path.exists(path) and not _survives(hang):
            ErrorHandler()._write_json(path, account.error(hang, time()))
    return found


def _save(watched: StartedWorkers, dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    return {pid: save(dump, _stacks_file(watched, pid)) for pid, dump in dumps.items()}


def _survives(hang: Hang) -> bool:
    """Return whether the process may survive its signal, or handle it before its end."""
    if hang.signum <= 0:
        return True
    try:
        with open(f"/proc/{hang.pid}/status", "rb") as status:
            signals = Signals.of(status.read())
    except OSError:  # the process has ended
        return False
    return bool((signals.caught | signals.ignored) >> (hang.signum - 1) & 1)
