"""Nodes that join a running job at almost the same time cost its workers one restart.

The rules of the rounds, the handler's decisions, and the agents' decisions are the real ones. Time
is a number.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.decisions import events as words
from regrow.agent.decisions.decide import AgentPhase, AgentState, decide
from regrow.rendezvous.node.driver import snapshot
from regrow.rendezvous.node.node_rules import Notified, notifications
from regrow.rendezvous.protocol.messages import (
    Event,
    JoinRound,
    LastCallOver,
    Node,
    NodeLeaving,
    NodesWaiting,
    RoundEnded,
    Seated,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round, status_of

ARRIVALS = 10
SEATS = 20


class Job:
    """The rounds, and the agents of two nodes with workers in the first round."""

    def __init__(self) -> None:
        self.now = 200.0
        self.rounds = Round(2, SEATS)
        self.agents: list[Agent] = []
        for id in ("a", "b"):
            self.apply(JoinRound(Node(id, id)))
        self.apply(LastCallOver(self.rounds.last_call))
        self.agents = [Agent(self, id) for id in ("a", "b")]

    def apply(self, event: Event) -> None:
        self.rounds, _ = step(self.rounds, event)
        for agent in self.agents:
            agent.receive()

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        for agent in self.agents:
            at = agent.state.gather_until
            if at is not None and at <= until:
                self.now = at
                agent.decide(words.GatherOver(at, self.rounds.waiting))
        self.now = until


class Agent:
    """A node's agent: its notifications from the rounds, and its decisions."""

    def __init__(self, job: Job, id: str) -> None:
        self.job, self.id = job, id
        self.state = AgentState(3, AgentPhase.FORMING)
        self.restarts: list[str] = []
        self.seat()

    def seat(self) -> None:
        """Start workers in the complete round."""
        seat = status_of(self.job.rounds, self.id)
        assert isinstance(seat, Seated)
        self.round, self.notified = seat.round, Notified(seat.round)
        self.decide(words.Formed(self.job.now, seat.round, shared=True, leads=seat.rank == 0))
        self.receive()

    def receive(self) -> None:
        self.notified, new = notifications(
            self.notified, snapshot(self.job.rounds, self.id), self.id
        )
        for notification in new:
            match notification:
                case NodesWaiting(round, waiting):
                    full = len(self.job.rounds.members) + waiting == SEATS
                    self.decide(words.JoinRequested(round, waiting, full, self.job.now))
                case RoundEnded(round, _, why):
                    self.decide(words.RoundOver(round, why, self.job.now))

    def decide(self, event: words.Event) -> None:
        self.state, actions = decide(self.state, event)
        for action in actions:
            if isinstance(action, words.Restart):
                self.restarts.append(action.reason)
                if action.announce:
                    self.job.apply(NodeLeaving(self.id, self.round, action.reason))


@given(st.lists(st.floats(0.0, 0.45), min_size=ARRIVALS - 1, max_size=ARRIVALS - 1))
def test_ten_arrivals_within_a_moment_cost_one_restart(gaps: list[float]) -> None:
    job = Job()
    for number, gap in enumerate([*gaps, 1.0]):
        job.apply(JoinRound(Node(f"new{number}", "there")))
        job.wait(gap)
    assert [agent.restarts for agent in job.agents] == [["10 nodes wait to join"]] * 2
    for agent in job.agents:
        job.apply(JoinRound(Node(agent.id, agent.id), agent.round))
    assert (job.rounds.number, len(job.rounds.ranks)) == (2, 2 + ARRIVALS)
    for agent in job.agents:
        agent.seat()
    job.wait(60.0)
    assert [len(agent.restarts) for agent in job.agents] == [1, 1]
    assert job.rounds.failures == 0
