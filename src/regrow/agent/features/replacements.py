"""`Replacements`: starts a process in place of a lost worker; charges one restart for it.

A wrapper (`regrow.inprocess`) with `replace=True` marks its worker as one that another process may
replace. When such a worker ends, its place in the group of workers is vacant. The agent then

1. charges one restart to `--max-restarts`, which all nodes count together;
2. waits until no process of the worker is left, so that no two processes have one rank;
3. starts another process with the same ranks and `REGROW_INCARNATION`, or gives the place up.

The other ranks wait for the new process in their restart. If none comes, the agent reports it to
them through the workers' store, so they continue at once and do not wait for `replace_timeout`.

A replacement that ends before its first training step is not replaced, because the cause may still
be there. The worker has then failed, which ends the attempt.

Each replacement runs on a thread of its own, because it waits for other nodes and for the guardian.
The decision itself is `reason_not_to_replace`.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from regrow._progress import INCARNATION_ENV, REPLACES_ENV
from regrow.agent.attempt.environment import HEARTBEAT_ENV
from regrow.agent.features import Feature, StartedWorkers
from regrow.rendezvous import RendezvousError
from regrow.utils import get_logger, signal_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.agent.features.progress import WorkerReports, WorkerSteps
    from regrow.agent.job import Job
    from regrow.workers import WorkerChange

REPORT_S = 10.0
"""Seconds in which the workers' store has to receive a report."""

logger = get_logger(__name__)


class EndedWorker(NamedTuple):
    """What the agent knows about a worker that has ended."""

    wanted: bool
    """Whether the wrapper of the worker has `replace=True`, and the rendezvous counts restarts."""
    incarnation: int
    """Number of processes that had the place before the worker."""
    stepped: bool
    """Whether the worker has reported a training step."""
    restarts: int
    """Restarts that the job has left, as far as this node knows."""
    leaving: bool = False
    """Whether the agent is leaving the job."""


def reason_not_to_replace(worker: EndedWorker) -> str:
    """Return why a worker that has ended is not replaced; empty if it may be."""
    if not worker.wanted:
        return "the rendezvous does not count the restarts of all nodes together"
    if worker.leaving:
        return "the job ends"
    if worker.incarnation and not worker.stepped:
        return "it replaced another process, and ended before its first step (regrow.step)"
    if worker.restarts <= 0:
        return "no restarts are left (--max-restarts)"
    return ""


def ends_attempt(worker: EndedWorker) -> bool:
    """Return whether the end of a worker ends the attempt, even if the others could continue."""
    return worker.wanted and worker.incarnation > 0 and not worker.stepped


class _Places:
    """The places of the workers of one attempt."""

    def __init__(self, workers: StartedWorkers) -> None:
        self.workers = workers
        self.incarnations: dict[int, int] = {}  # by local rank, as all others
        self.cleared: dict[int, threading.Event] = {}
        self.refusals: dict[int, str] = {}  # why a place is given up
        self.stopping = threading.Event()


class Replacements(Feature):
    """Replaces lost workers of this host.

    Args:
        job: what the parts of the agent share.
        reports: returns the page of steps of the latest attempt.
        report: reports to the ranks of the latest attempt that a rank is not replaced.
    """

    def __init__(
        self,
        job: Job,
        reports: Callable[[], WorkerReports | None],
        report: Callable[[int], None],
    ) -> None:
        self._job = job
        self._reports = reports
        self._report = report
        self._places: _Places | None = None  # of the latest attempt
        self._threads: list[threading.Thread] = []
        self._spending = threading.Lock()  # each restart has a number of its own

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        self._places = _Places(workers)

    def before_stop(self) -> None:
        """See base class: no process takes a place any more."""
        places = self._places
        if places is not None:
            places.stopping.set()
            for cleared in list(places.cleared.values()):
                cleared.set()

    def close(self) -> None:
        """See base class: end the threads."""
        self.before_stop()
        deadline = monotonic() + REPORT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def incarnation(self, local_rank: int) -> int:
        """Return how many processes had the place of a worker before."""
        return 0 if self._places is None else self._places.incarnations.get(local_rank, 0)

    # --- questions of the process context, when a worker has ended; they must not block

    def vacates(self, local_rank: int) -> bool:
        """Return whether another process may take the place of a worker that has ended."""
        return not reason_not_to_replace(self._ended(local_rank))

    def ends_attempt(self, local_rank: int) -> bool:
        """Return whether the end of a worker ends the attempt; see `ends_attempt`."""
        return ends_attempt(self._ended(local_rank))

    def _ended(self, local_rank: int) -> EndedWorker:
        reports = self._reports()
        return EndedWorker(
            self._job.shared and reports is not None and reports.may_be_replaced(local_rank),
            self.incarnation(local_rank),
            reports is not None and local_rank in reports.read(),
            self._job.remaining_restarts,
            self._job.leaving,
        )

    # --- changes of a worker

    def on_change(self, change: WorkerChange) -> None:
        """Handle the end of a worker; called by the process context on its own thread."""
        local_rank, places = change.local_rank, self._places
        if places is None:
            return
        match change.kind:
            case "vacant":
                reports = self._reports()
                assert reports is not None
                cleared = places.cleared[local_rank] = threading.Event()
                self._start_thread(partial(self._replace, places, reports, change, cleared))
            case "cleared" if local_rank in places.cleared:
                places.cleared[local_rank].set()
            case "replaced":
                self._on_replaced(places, change)
            case "lost" | "exited" if change.kind == "lost" or change.status == 0:
                reports = self._reports()
                if reports is not None and reports.may_be_replaced(local_rank):
                    refused = places.refusals.get(local_rank)
                    refused = refused or reason_not_to_replace(self._ended(local_rank))
                    why = refused or "it ended with exit code 0"
                    self._start_thread(partial(self._report_not_replaced, places, local_rank, why))

    def _start_thread(self, run: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name="regrow-replacement", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- on a thread of its own

    def _replace(
        self,
        places: _Places,
        reports: WorkerReports,
        change: WorkerChange,
        cleared: threading.Event,
    ) -> None:
        context, local_rank = places.workers.context, change.local_rank
        before = places.incarnations.get(local_rank, 0)
        incarnation = before + 1
        ended = self._describe_end(places, change, reports.read())
        account = reports.accounts().get(local_rank)
        ended["account"] = None if account is None else account._asdict()
        self._emit(places, "regrow.worker.vacated", local_rank, incarnation=before, **ended)
        if places.stopping.is_set():
            return
        why = self._spend()
        cleared.wait()
        if places.stopping.is_set():
            return
        if why:
            places.refusals[local_rank] = why
            context.give_up(local_rank)
            return
        reports.clear(local_rank)
        _keep_error_file(context.error_files.get(local_rank, ""), incarnation)
        places.incarnations[local_rank] = incarnation
        # Heartbeats between workers begin together, so a new process cannot take part in them.
        env = {INCARNATION_ENV: str(incarnation), HEARTBEAT_ENV: ""}
        step = "" if ended["last_step"] is None else f" after step {ended['last_step']}"
        host = socket.gethostname()
        env[REPLACES_ENV] = f"pid {change.pid} on {host} ended {ended['how']}{step}"
        if not context.replace(local_rank, env):
            return
        logger.warning(
            "rank %s: another process takes the place of pid %s, which ended %s; the other ranks "
            "wait for it",
            places.workers.ranks[local_rank],
            change.pid,
            ended["how"],
        )

    def _on_replaced(self, places: _Places, change: WorkerChange) -> None:
        self._emit(
            places,
            "regrow.worker.replaced",
            change.local_rank,
            incarnation=places.incarnations.get(change.local_rank, 0),
            pid=change.pid,
            started_from=places.workers.context.sources().get(change.local_rank, "exec"),
            started_monotonic=change.monotonic,
            restarts_left=self._job.remaining_restarts,
        )

    def _describe_end(
        self, places: _Places, change: WorkerChange, steps: dict[int, WorkerSteps]
    ) -> dict[str, object]:
        status = change.status
        how = f"by {signal_text(-status)}" if status < 0 else f"with exit code {status}"
        failure = places.workers.context.ended(change.local_rank)
        step = steps.get(change.local_rank)
        return {
            "pid": change.pid,
            "exitcode": status,
            "how": how,
            "message": failure.summary if failure is not None else "",
            "last_step": None if step is None else step.last_step,
            "ended_monotonic": change.monotonic,
        }

    def _spend(self) -> str:
        """Charge the job with one restart; return why that is not possible, empty if it is."""
        job = self._job
        limit = job.group.spec.max_restarts
        try:
            with self._spending:
                failures = job.handler.spend_restart()
        except RendezvousError as error:
            return str(error)
        if failures is None:
            return "the rendezvous does not count the restarts of all nodes together"
        job.post(partial(self._count, failures))
        return "" if failures <= limit else "no restarts are left (--max-restarts)"

    def _count(self, failures: int) -> None:
        self._job.count_failures(failures)

    def _report_not_replaced(self, places: _Places, local_rank: int, why: str) -> None:
        rank = places.workers.ranks[local_rank]
        self._emit(places, "regrow.worker.not_replaced", local_rank, reason=why)
        logger.warning("rank %s is not replaced: %s", rank, why)
        if places.stopping.is_set():  # no rank waits; those of the next attempt have the rank
            return
        try:
            self._report(rank)
        except Exception as error:  # noqa: BLE001 - the ranks then wait for replace_timeout
            logger.warning("the other ranks wait for rank %s until their time-out: %s", rank, error)

    def _emit(self, places: _Places, name: str, local_rank: int, **fields: object) -> None:
        rank = places.workers.ranks[local_rank]
        attempt, emit = places.workers.attempt, self._job.recorder.emit
        self._job.post(
            lambda: emit(name, attempt=attempt, rank=rank, local_rank=local_rank, **fields)
        )


def _keep_error_file(path: str, incarnation: int) -> None:
    """Rename the error file of a worker, so that it is not taken for that of its replacement."""
    if path and path != os.devnull:
        with suppress(OSError):
            Path(path).replace(f"{path}.{incarnation - 1}")
