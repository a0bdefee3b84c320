"""`LiveReports`: reports the steps and the latest events of this node to views on other hosts.

A view has the token of the job, and asks through the store of the round (`regrow.views`). So it
needs no port of the agents. A thread of its own waits for a question and answers it, at most twice
a second, however many views ask. A view that stops asking gets nothing. A view that does not read
costs nothing, because an answer replaces the one before it. The agent's loop takes no part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Final

from regrow.agent.features import Feature
from regrow.agent.features.round_keys import await_key, is_served
from regrow.utils import get_logger, start_thread, start_ticks

if TYPE_CHECKING:
    from regrow.agent.features import StartedWorkers
    from regrow.agent.features.progress import WorkerReports
    from regrow.agent.job import Job
    from regrow.events.live_report import LiveReport, RecentEvents
    from regrow.store import Store

PAUSE_S: Final = 0.5
"""Seconds from an answer to the next one."""

logger = get_logger(__name__)


class LiveReports(Feature):
    """Answers the questions of views.

    Args:
        job: what the parts of the agent share.
        reports: returns the workers' page of steps.
    """

    def __init__(self, job: Job, reports: Callable[[], WorkerReports | None]) -> None:
        self._job = job
        self._reports = reports
        self._events: RecentEvents | None = None
        self._round: object = None  # identifies the attempt in whose store the thread waits

    def open(self) -> None:
        """See base class: keep the events from now on, if other nodes may take part."""
        if self._job.handler.max_nodes != 1 and self._events is None:
            from regrow.events.live_report import RecentEvents

            self._events = RecentEvents()
            self._job.recorder.sinks += (self._events,)

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: wait for questions in the store of this round."""
        self._round = round = object()
        store = self._job.group.store
        if self._events is not None and store is not None and is_served(store):
            answer = partial(self._answer_all, store, round, self._events)
            start_thread(answer, "regrow-live-reports")

    def close(self) -> None:
        """See base class."""
        self._round = None

    def _answer_all(self, store: Store, round: object, events: RecentEvents) -> None:
        from regrow.events import live_report

        group = self._job.group
        keys = live_report.keys_of(group.group_rank or 0)
        nodes, sent, pause = group.group_world_size or 1, 0, Event()
        is_asked = False
        while await_key(store, keys.ask, lambda: self._round is round) is not None:
            if not is_asked:
                is_asked = True
                self._job.leftovers.add(store, keys)
            try:
                store.delete_key(keys.ask)
                number, text = events.text()
                found = {keys.report: live_report.encode(self._report(nodes, number))}
                # Another server that has taken over has no keys.
                if number != sent or not store.check([keys.events]):
                    found[keys.events] = text
                store.multi_set(list(found), list(found.values()))
                sent = number
            except Exception as error:  # noqa: BLE001 - of any store; the next question is answered
                logger.debug("a view is not answered: %s", error)
            pause.wait(PAUSE_S)

    def _report(self, nodes: int, number: int) -> LiveReport:
        from regrow.events.live_report import LiveReport, LiveStep

        pid, reports = os.getpid(), self._reports()
        steps = {}
        if reports is not None:
            phases, beats = reports.phases(), reports.heartbeats()
            for rank, step in reports.read().items():
                steps[rank] = LiveStep(*step, phases.get(rank, ""), beats.get(rank, 0.0))
        host, ticks = os.uname().nodename, start_ticks(pid) or 0
        return LiveReport(host, pid, ticks, nodes, self._job.attempt, monotonic(), number, steps)
