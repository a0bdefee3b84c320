"""`TimerReports`: starts the timer server, and turns its reports into events of the job.

The timer server (`timer_server`) starts before any other part of the job, and runs through all
attempts. So if its pipe cannot be created, the job ends before it has trained. The server's reports
arrive as messages, and the loop emits the events. So a slow event sink does not delay the end of a
hung worker.

**Comparison of several nodes.** An agent can read the stacks of its own workers only. On the node
of the first expired timer the workers are often blocked at the same place: they wait for a rank on
another node. So the report of a failure contains the places of that node's workers. Each agent that
gets the report reads the places of its own workers before it stops them. The time limit is the same
as for an expired timer. The agent compares both nodes and logs the result at once, whether the job
continues or not.

If the job continues, all nodes meet in another round. Before ranks are exchanged, each node writes
the places of its workers into the round's store. The node of the root cause reads them after the
exchange, and compares all nodes. If the store fails here, the round continues: the error is logged,
and the places are missing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any

from regrow.agent.attempt.environment import TORCHELASTIC_TIMER_FILE
from regrow.agent.features import Feature, StartedWorkers, comparison, hang
from regrow.agent.features.comparison import WorkerPlaces
from regrow.agent.features.timer_server import AgentTimerServer, timer_files
from regrow.timer.stacks.report import compare_places
from regrow.utils import SignalInterrupt, get_logger

if TYPE_CHECKING:
    from regrow.agent.features.hang import Hang
    from regrow.agent.job import Job
    from regrow.store import Store
    from regrow.timer.fifo.request import FileTimerRequest
    from regrow.workers import ProcessFailure

#: Seconds from the deadline of a timer to the end of its worker; stacks take up to half of this.
REAPED_S = 0.1
#: Further seconds for py-spy, if native stacks are on.
NATIVE_S = 2.0

logger = get_logger(__name__)


class TimerReports(Feature):
    """Serves the timers, explains failures with them, and compares workers of several nodes.

    Args:
        job: what the parts of the agent share.
        log_dir: directory of the job's logs; None if there are no logs.
        native_stacks: whether py-spy reads the native frames of hung workers.
        others_continue: returns whether the others continue after the end of a local rank.
    """

    def __init__(
        self,
        job: Job,
        log_dir: str | None,
        *,
        native_stacks: bool = False,
        others_continue: Callable[[int], bool] = lambda local_rank: False,
    ) -> None:
        self._job = job
        self._others_continue = others_continue
        self._log_dir = log_dir
        self._native_s = NATIVE_S if native_stacks else 0.0
        self._server: AgentTimerServer | None = None
        self._path = ""  # path of the server's pipe
        self._hung: dict[int, Hang] = {}  # hangs of the current attempt that got a signal, by pid
        self._elsewhere: WorkerPlaces | None = None  # from the latest report of another node's hang
        self._own: WorkerPlaces | None = None  # the places of this node's workers at that time
        # The keys of the latest round with places. Another node may still read them in that round.
        self._left: tuple[Store, list[str]] | None = None
        self._all_compared = -1  # attempt that this node, as root cause, compared on all nodes

    @property
    def reaped_s(self) -> float:
        """Seconds from the deadline of a timer to the end of its worker."""
        return REAPED_S + self._native_s

    def open(self) -> None:
        """Start the timer server.

        Raises:
            OSError: the server's pipe cannot be created.
        """
        *choices, last = timer_files(os.environ, self._log_dir)
        for path in choices:
            with suppress(OSError):
                self._server, self._path = self._new_server(path), path
                break
        else:
            self._server, self._path = self._new_server(last), last
        self._server.start()

    def _new_server(self, path: str) -> AgentTimerServer:
        return AgentTimerServer(
            path,
            self._job.handler.get_run_id(),
            native_s=self._native_s,
            on_hang=self.on_hang,
            log_event=self._log_event,
        )

    def _log_event(self, name: str, request: FileTimerRequest | None) -> None:
        record = partial(self._job.torch_events.watchdog, name, request)
        if self._server is None:  # the server is stopping, and the loop has ended
            record()
        else:
            self._job.post(record)

    def close(self) -> None:
        """See base class: stop the server."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def age(self) -> float:
        """Return the seconds since the server's last progress; its time is in whole seconds."""
        server = self._server
        return 0.0 if server is None else int(time()) - server.get_last_progress_time()

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        for environment in environments.values():
            environment[TORCHELASTIC_TIMER_FILE] = self._path

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: serve the timers of these workers."""
        self._hung = {}
        if self._server is not None:
            self._server.watch(workers)

    def on_hang(self, found: Hang) -> None:
        """Store a hang, on the server's thread, so that `explain` does not wait for the loop."""
        if found.signum > 0 and found.attempt == self._job.attempt:
            self._hung[found.pid] = found
        self._job.post(partial(self._report, found))

    def _report(self, found: Hang) -> None:
        if found.stalled is not None:
            self._report_stall(found, found.stalled)
            return
        self._job.recorder.emit("regrow.timer.expired", **hang.event(found))
        level = logging.ERROR if found.signum > 0 else logging.WARNING
        # The line of a failure that ends the attempt follows, and has the same facts.
        local, kills = found.local_rank, found.signum == signal.SIGKILL and found.is_worker
        if kills and not (local is not None and self._others_continue(local)):
            level = logging.INFO
        logger.log(level, "%s", hang.announcement(found))

    def _report_stall(self, found: Hang, text: str) -> None:
        """Report training without progress on a worker that still sends heartbeats."""
        event = hang.event(found)
        kept = ("attempt", "rank", "local_rank", "pid", "stood", "stacks")
        fields = {name: event[name] for name in kept}
        self._job.recorder.emit("regrow.heartbeat.stalled", **fields, message=text)
        stacks = f"; stacks in {found.dump.path}" if found.dump.path else ""
        logger.warning("%s; pid %s is %s%s", text, found.pid, event["stood"], stacks)

    def explain(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """See base class: add the hang to a failure that a timer caused.

        The failure gets the hang if there is no error file, or if SIGKILL was due. In the second
        case the request for the stacks may have interrupted the blocking call, so that the worker
        wrote an error file that misleads. If the signal was another one, the worker's own error
        file is kept.
        """
        for failure in failures.values():
            if self._server is not None:
                self._server.await_hang(failure.pid, self.reaped_s)
            found = self._hung.get(failure.pid)
            if found is None:
                continue
            doomed = found.signum == signal.SIGKILL and failure.failed_monotonic >= found.deadline
            if doomed or not failure.has_error_file:
                failure.error_file_data = dict(hang.error(found, time()))
                failure.message = failure.error_file_data["message"]
            if doomed:
                failure.failed_monotonic = found.deadline
        return failures

    # --- comparison of several nodes

    def places(self) -> Mapping[int, str]:
        """Return the places of the workers at the first hang of the attempt, by rank.

        Only the first hang that ends a worker has them, because the stacks of all workers were read
        then. Without such a hang the result is empty.
        """
        return next((each.places for each in list(self._hung.values()) if each.places), {})

    def read_places(self) -> Mapping[int, str]:
        """Return the current places of the workers, by rank; empty if they cannot be read."""
        if self._server is None:
            return {}
        try:
            return self._server.read_places(self._job.attempt)
        except SignalInterrupt:
            raise
        except Exception:  # no error here may prevent the stop of the workers
            logger.exception(
                "cannot read the stacks of this node's workers; the comparison is without them"
            )
            return {}

    def _compare(self, places: Mapping[int, str]) -> None:
        job = self._job
        size = job.group.workers[0].world_size  # still that of the attempt that is ending
        job.post(partial(self._report_comparison, job.attempt, places, size))

    def _report_comparison(self, attempt: int, places: Mapping[int, str], world_size: int) -> None:
        lines = compare_places(places, world_size)
        self._job.recorder.emit(
            "regrow.timer.compared", attempt=attempt, ranks=sorted(places), compared=lines
        )
        logger.warning("a worker hung; of %d ranks, %s", len(places), "; ".join(lines))

    def evidence(self) -> dict[str, Any]:
        """See base class: add the places of this node's workers, if a worker of this node hung."""
        places = self.places()
        return comparison.as_evidence(WorkerPlaces(self._job.attempt, places)) if places else {}

    def on_report(self, report: str) -> None:
        """See base class."""
        self._elsewhere = comparison.from_report(report) or self._elsewhere

    def before_stop(self) -> None:
        """See base class: read the workers' places, if another node's hang ends the attempt."""
        elsewhere, attempt = self._elsewhere, self._job.attempt
        if elsewhere is None or elsewhere.attempt != attempt:
            return
        if self._own is not None and self._own.attempt == attempt:
            return
        # If a worker hung here as well, the places of all are known already.
        own = self.places() or self.read_places()
        self._own = WorkerPlaces(attempt, own)
        if own:
            self._compare({**elsewhere.places, **own})

    def before_ranks(self, store: Store) -> None:
        """See base class."""
        own, attempt = self._own, self._job.attempt
        left, self._left = self._left, None
        if left is not None:
            self._job.leftovers.add(*left)
        if own is None or own.attempt != attempt or not own.places:
            return
        key = comparison.KEY.format(attempt)
        self._left = store, [key]
        try:
            store.append(key, json.dumps(comparison.encode(own)) + "\n")
        except SignalInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign store may raise any type
            logger.warning(
                "the other nodes compare without the stacks of this node's workers: %s", error
            )

    def after_ranks(self, store: Store) -> None:
        """See base class."""
        own, attempt = self.places(), self._job.attempt
        caused_elsewhere = self._job.caused_elsewhere
        if not own or caused_elsewhere or self._all_compared == attempt:
            return
        key = comparison.KEY.format(attempt)
        try:
            lines = store.get(key) if store.check([key]) else b""
        except SignalInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign store may raise any type
            logger.warning(
                "this node compares its own workers only: cannot read the others: %s", error
            )
            return
        if others := comparison.gather(attempt, lines):
            self._all_compared = attempt
            self._compare({**others, **own})
