"""`RemoteJob`: the running nodes of a job on other hosts, asked at the endpoint of the job.

A thread asks each node of the running round by a key in the store of the round, twice a second, and
reads the answers that are there (`regrow.events.live_report`). So no view waits for a node, and no
node for a view. The thread asks only while the view is read. In a large job it asks less often,
because the one server of the job passes on at most `ANSWERS_PER_S`. When the server is lost, the
thread looks for the one that takes over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Condition, Event
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.events.live_report import Keys, LiveReport, decode, keys_of, read_events_after
from regrow.rendezvous import JobVisitor, RendezvousError
from regrow.store import StoreError
from regrow.utils import start_thread
from regrow.views.pages import StepSample
from regrow.views.runs import ELSEWHERE, LatestEvents, Run, run_of

if TYPE_CHECKING:
    from regrow.rendezvous import RendezvousParameters
    from regrow.store import Store

CONNECT_S = 10.0
"""Seconds in which the job must be reached at first."""
ANSWER_S = 3.0
"""Seconds in which the server must answer later; a lost one delays the view as long."""
PERIOD_S = 0.5
"""Seconds between two questions."""
ANSWERS_PER_S = 200
"""Most answers of nodes in a second."""
FIRST_S = 2.0
"""Seconds for the first answers."""
MOST_NODES = 65_536
READ_S = 5.0
"""Seconds after the last call of a view; then its thread asks no node until the next call."""
GONE_S = 30.0
"""Seconds without an answer of any node after which the job counts as gone."""


@dataclass(slots=True)
class RemoteNode:
    """What is known of an agent."""

    name: str
    report: LiveReport
    answered: float
    """Monotonic seconds of this host at which its latest answer was read."""
    kept: LatestEvents = field(default_factory=LatestEvents)
    number: int = 0
    """Number of the latest event."""

    def now(self) -> float:
        """Return the present on the monotonic clock of its host."""
        return self.report.monotonic + monotonic() - self.answered

    def silent_s(self) -> float:
        """Return the seconds since its latest answer."""
        return monotonic() - self.answered

    def samples(self) -> dict[int, StepSample]:
        """Return what its workers have reported, by local rank."""
        return {rank: StepSample(*step) for rank, step in self.report.steps.items()}

    def run(self) -> Run | None:
        """Return the agent's part of the job; None before its events have arrived."""
        return run_of(f"{ELSEWHERE}/{self.name}", self.kept.events)


class RemoteJob:
    """The nodes of a job that runs elsewhere; thread-safe.

    Args:
        params: the endpoints and the id of the job, and the keys for its credentials.

    Raises:
        ValueError: an option is invalid.
        RendezvousError: the job is not reached, or the token is missing or wrong.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._visitor = JobVisitor(params)
        self._changed = Condition()  # guards the fields below
        self._nodes: dict[tuple[str, int, int], RemoteNode] = {}
        self._fault = ""
        self._answered = self._wanted = monotonic()
        self._closing = Event()
        try:
            store = self._visitor.running_round(CONNECT_S)
        except BaseException:
            self._visitor.close()
            raise
        self._size = 1  # nodes of the round, as far as is known
        self._asked = 0  # greatest number of nodes that were asked
        self._stale: set[bytes] = set()  # answers to earlier views
        start_thread(lambda: self._follow(store), "regrow-remote-job")

    def runs(self) -> list[Run]:
        """Return the parts of the agents that have answered."""
        self._want()
        with self._changed:
            return [run for node in self._nodes.values() if (run := node.run()) is not None]

    def node(self, run: Run) -> RemoteNode | None:
        """Return the agent of a run, if it has answered."""
        self._want()
        with self._changed:
            return self._nodes.get((run.host, *run.agent)) if run.agent else None

    def events(self, run: Run) -> list[dict[str, Any]]:
        """Return the latest events of an agent."""
        with self._changed:
            node = self._nodes.get((run.host, *run.agent)) if run.agent else None
            return list(node.kept.events) if node is not None else []

    def fault(self) -> str:
        """Return why the job is not reached now; "" if it is."""
        with self._changed:
            return self._fault

    def is_gone(self) -> bool:
        """Return whether no node has answered for so long that the job has probably ended."""
        with self._changed:
            return monotonic() - self._answered >= GONE_S

    def wait(self, timeout: float = FIRST_S) -> None:
        """Wait for the first answers of all nodes."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) >= self._size, timeout)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._want()

    def _want(self) -> None:
        with self._changed:
            self._wanted = monotonic()
            self._changed.notify_all()

    # --- the thread

    def _rest(self) -> None:
        """Wait until the view is read."""
        with self._changed:
            if monotonic() - self._wanted > READ_S:
                self._changed.wait_for(lambda: monotonic() - self._wanted <= READ_S)
                self._answered = monotonic()

    def _follow(self, store: Store | None) -> None:
        while not self._closing.is_set():
            self._rest()
            fault = ""
            try:
                if store is None:
                    store = self._visitor.running_round(ANSWER_S)
                fault = self._ask(store)
                store = self._visitor.running_round(ANSWER_S)
            except (RendezvousError, StoreError, ValueError) as error:
                store, fault = None, str(error)
                self._closing.wait(PERIOD_S)
            with self._changed:
                self._fault = fault
                self._changed.notify_all()
        self._visitor.close()

    def _ask(self, store: Store) -> str:
        """Ask all nodes, and read the answers that are there; return what is wrong with one."""
        store.set_timeout(timedelta(seconds=ANSWER_S))
        keys = [keys_of(rank) for rank in range(self._size)]
        self._stale.update(text for _, text in _answers(store, keys[self._asked :]))
        self._asked = max(self._asked, len(keys))
        store.multi_set([each.ask for each in keys], [b""] * len(keys))
        self._closing.wait(max(PERIOD_S, len(keys) / ANSWERS_PER_S))
        fault = ""
        for each, text in _answers(store, keys):
            if text not in self._stale:
                try:
                    self._learn(store, each.events, decode(text))
                except ValueError as error:
                    fault = f"an agent of another release of regrow? {error}"
        return fault

    def _learn(self, store: Store, events: str, report: LiveReport) -> None:
        agent, now = (report.host, report.pid, report.start_ticks), monotonic()
        node = self._nodes.get(agent)
        if node is not None and report.monotonic <= node.report.monotonic:
            return  # it has not answered since
        number = node.number if node is not None else 0
        further = []
        if report.events > number:
            further = read_events_after(store.get(events), number)
        with self._changed:
            if node is None:
                name = f"{report.host}_{report.pid}".replace("/", "_")
                node = RemoteNode(name, report, now)
                self._nodes[agent] = node
            node.report, node.answered, self._answered = report, now, now
            node.kept.add([event for _, event in further])
            node.number = max([node.number, *(number for number, _ in further)])
            self._size = max(1, min(report.nodes, MOST_NODES))


def _answers(store: Store, keys: list[Keys]) -> Iterator[tuple[Keys, bytes]]:
    """Return the answers of those nodes that have answered."""
    if not store.check([each.report for each in keys]):
        keys = [each for each in keys if store.check([each.report])]
    texts = store.multi_get([each.report for each in keys]) if keys else []
    return zip(keys, texts, strict=True)
