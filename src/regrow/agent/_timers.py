"""The timer server of an agent: whose timers it keeps, and what is known of a worker it reaps.

It is a thread of the agent's process, and not a part of the agent's loop: the loop may be slow to
turn, and whoever hangs should not gain by that. It knows the workers of the running attempt
(`Watched`) and keeps timers of their processes only.

Before a worker is reaped, all workers of the node are asked for their stacks, at the same time: in
most hangs one rank stands where it should not and all the others wait for it, often with shorter
timers, so that the one to be reaped is not the one to be looked at. After that there is nothing to
compare: the others are stopped, and reaped only if their timers ran out as well. The rank to be
looked at may be another node's; so the workers are asked as well when one of another node hung.

What is known goes to files beside the worker's logs, in a thread of its own that is waited for
`FILES_S` and no longer: a file system that hangs is a common reason for a training to hang, and
then the worker is reaped without. What is known goes to the agent's loop as well, so the failure is
explained whether there is an error file or not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, time
from typing import TYPE_CHECKING

from regrow.agent import _hang
from regrow.agent._environment import TORCHELASTIC_TIMER_FILE
from regrow.agent._hang import Hang
from regrow.timer._capture import Target, capture
from regrow.timer._dump_file import save
from regrow.timer._file_server import FileTimerServer, Reaping
from regrow.timer._file_workers import GONE
from regrow.timer._frames import Dump, where
from regrow.timer._places import compare_places
from regrow.timer._stacks import Signals
from regrow.workers import _procfs
from regrow.workers.errors import ErrorHandler

if TYPE_CHECKING:
    from regrow.agent._watched import Watched
    from regrow.timer._file_request import FileTimerRequest

#: Seconds that the stacks of Python may take.
STACKS_S = 0.05
#: Seconds that a reaping waits for the files about it to be written.
FILES_S = 0.03


def timer_file(environ: Mapping[str, str]) -> str:
    """Where an agent's pipe is to be.

    Args:
        environ: of the agent. What `TORCHELASTIC_TIMER_FILE` says is taken, unless the agent runs
            in a worker of another one, which has inherited the variable and reads that pipe.
    """
    given = environ.get(TORCHELASTIC_TIMER_FILE)
    if given and not (_procfs.MARK in environ and _is_read(given)):
        return given
    from regrow.workers._logs import temporary_directory

    return os.path.join(temporary_directory(), f"watchdog_timer_{os.urandom(16).hex()}")


def _is_read(path: str) -> bool:
    """Whether some process has this pipe open for reading."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Watchdog(FileTimerServer):
    """The timer server of one agent, for all its attempts.

    Args:
        file_path: of the pipe, which is made now.
        run_id: the job's.
        native_s: seconds that py-spy may take for native stacks; 0: it is not asked.
        on_hang: called from the server's thread with every `Hang`, before the process is signalled;
            it must not block. A process may end of having been looked at before this is called:
            see `await_hang`.
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
        self._watched: Watched | None = None
        self._compared = -1  # the attempt whose workers have been compared
        self._looked_at: frozenset[int] = frozenset()  # the processes that are about to be reaped
        self._told = threading.Event()  # what is known of those
        self._files: threading.Thread | None = None  # writes about the latest hang
        self._saving: threading.Thread | None = None  # the stacks of those that were only asked

    def watch(self, watched: Watched) -> None:
        """Keep the timers of these workers from now on."""
        self._watched = watched

    def await_hang(self, pid: int, timeout: float) -> None:
        """Return when `on_hang` was called for a process that is about to be reaped, if it is.

        Args:
            pid: of the process, which may have ended.
            timeout: seconds to wait at most.
        """
        if pid in self._looked_at:
            self._told.wait(timeout)

    def stop(self) -> None:
        """End the server; see `FileTimerServer.stop`."""
        super().stop()
        if self._saving is not None:
            self._saving.join(FILES_S)

    def _refusal(self, pid: int) -> str | None:
        watched = self._watched
        if watched is None or not watched.includes(pid):
            if _procfs.stat(pid) is None:  # so that nobody can tell whose it was
                return GONE
            return "is of a process that is none of this agent's workers, nor started by one"
        return super()._refusal(pid)

    def _before_reaping(self, reapings: list[Reaping]) -> None:
        watched = self._watched
        if watched is None:
            return
        self._told.clear()
        self._looked_at = frozenset(each.pid for each in reapings if each.signal > 0)
        try:
            self._look_at(watched, reapings)
        finally:
            self._looked_at = frozenset()
            self._told.set()

    def _look_at(self, watched: Watched, reapings: list[Reaping]) -> None:
        workers = watched.context.pids().values()  # whose end is that of the attempt
        ends = any(each.signal > 0 and each.pid in workers for each in reapings)
        compare_all = ends and self._compared != watched.attempt
        if compare_all:
            self._compared = watched.attempt
        dumps, places = self._ask(watched, reapings, self._native_s, all_workers=compare_all)
        hangs = [_hang_of(watched, each, dumps[each.pid], places) for each in reapings]
        for hang in self._with_files(watched, hangs, dumps):
            self._on_hang(hang)

    def _with_files(
        self, watched: Watched, hangs: list[Hang], dumps: Mapping[int, Dump]
    ) -> list[Hang]:
        """Write what is known, if that takes no longer than it may."""
        if self._files is not None and self._files.is_alive():
            return hangs  # the file system hangs still
        done: list[list[Hang]] = []
        self._files = threading.Thread(
            target=lambda: done.append(_written(watched, hangs, dumps)),
            name="regrow-hang",
            daemon=True,
        )
        self._files.start()
        self._files.join(FILES_S)
        return done[0] if done else hangs

    def ask(self, attempt: int) -> dict[int, str]:
        """Where the workers of an attempt stand now, by rank; those that have ended left out.

        It takes `STACKS_S` at most. The stacks are written in a thread of their own, for which
        nobody waits. For another thread than the server's.
        """
        watched = self._watched
        if watched is None or watched.attempt != attempt:
            return {}
        dumps, _ = self._ask(watched, [], 0.0, all_workers=True)
        there = {pid: dump for pid, dump in dumps.items() if dump.outcome != "gone"}
        self._saving = threading.Thread(
            target=_save, args=(watched, there), name="regrow-stacks", daemon=True
        )
        self._saving.start()
        return {r: where(there[pid]) for r, pid in watched.pids().items() if pid in there}

    def _ask(
        self, watched: Watched, reapings: list[Reaping], native_s: float, *, all_workers: bool
    ) -> tuple[dict[int, Dump], dict[int, str]]:
        """The stacks of those to be reaped, and of all workers if they are to be compared.

        Returns:
            the stacks by pid, and where those stand that are to be compared, by rank.
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
                with suppress(OSError):  # it has ended, or descriptors are used up
                    opened.append(os.pidfd_open(pid))
                    targets[pid] = Target(pid, opened[-1])
            dumps = capture(list(targets.values()), STACKS_S, native_s)
        finally:
            for fd in opened:
                os.close(fd)
        for each in reapings:
            gone = Dump(each.pid, "gone", "it has ended, or the agent has no descriptors left")
            dumps.setdefault(each.pid, gone)
        return dumps, {ranks[pid]: where(dump) for pid, dump in dumps.items() if pid in ranks}


def _hang_of(watched: Watched, reaping: Reaping, dump: Dump, places: Mapping[int, str]) -> Hang:
    local_rank = watched.owner(reaping.pid)
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


def _written(watched: Watched, hangs: Sequence[Hang], dumps: Mapping[int, Dump]) -> list[Hang]:
    """Write what is known beside the workers' logs; returns the hangs with the paths of stacks."""
    saved = _save(watched, dumps)
    found = [hang._replace(dump=saved[hang.pid]) for hang in hangs]
    for hang in found:
        path = watched.error_file(hang)
        if path and not os.path.exists(path) and not _survives(hang):
            ErrorHandler()._write_json(path, _hang.error(hang, time()))
    return found


def _save(watched: Watched, dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    return {pid: save(dump, watched.stacks_file(pid)) for pid, dump in dumps.items()}


def _survives(hang: Hang) -> bool:
    """Whether the process may go on after its signal, or end in a way of its own."""
    if hang.signum <= 0:
        return True
    try:
        with open(f"/proc/{hang.pid}/status", "rb") as status:
            signals = Signals.of(status.read())
    except OSError:  # it has ended
        return False
    return bool((signals.caught | signals.ignored) >> (hang.signum - 1) & 1)
