"""Agents of one job under generated faults: none hangs, and all have the same outcome.

The decisions (`decide`), the rules of the rounds and those of a node are the real ones; processes,
threads and time are not. Each seed is a job: nodes join, workers fail and succeed,
nodes are lost and come back, are killed and get signals, and notifications arrive late and at any
moment. Then the faults stop, and the job must end with the same outcome on every node that is left.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from random import Random

import pytest

from regrow.agent import WorkerState
from regrow.agent.decisions import events as words
from regrow.agent.decisions.decide import AgentPhase, AgentState, decide
from regrow.rendezvous import RendezvousClosedError
from regrow.rendezvous.node.driver import Snapshot, answer, snapshot
from regrow.rendezvous.node.node_rules import Notified, Rejoin, SeatRequest, end_wait, notifications
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    Judged,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    NodesWaiting,
    RoundClosed,
    RoundEnded,
    Seated,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round, holds

MAX_RESTARTS = 2
NODES = 4
FAULTS = 8
MOST_TURNS = 20_000

Operation = Generator[None, None, words.Event | None]


class Job:
    """The rounds, and the data that the nodes share in them."""

    def __init__(self, least: int, most: int) -> None:
        self.round = Round(least, most)
        self.checked_in: dict[tuple[str, int], set[str]] = {}
        self.trace: list[str] = []

    def apply(self, id: str, event: Event) -> Snapshot:
        self.round, refusal = step(self.round, event)
        self.trace.append(f"{event}")
        return answer(self.round, id, refusal)

    def all_arrived(self, what: str, id: str, round: int, size: int) -> bool:
        there = self.checked_in.setdefault((what, round), set())
        there.add(id)
        return len(there) == size


class Agent:
    """A node's agent; its operations are generators that yield while they are blocked."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job = name, job
        self.state = AgentState(remaining_restarts=MAX_RESTARTS)
        self.lives, self.id, self.token = 0, "", 0
        self.notified, self.answered = Notified(), 0
        self.inbox: list[words.Event | object] = []
        self.operations: list[Operation] = []
        self.delayed = False
        self.workers = ""  # running, failed, succeeded
        self.size = 0
        self.report = ""
        self.failures = 0
        self.outcome = ""
        self.leaves = False  # a signal is under way to it
        self.root = ""
        self.rejoin_as_new()
        self.act(words.Form())

    def rejoin_as_new(self) -> None:
        self.lives += 1
        self.id, self.token = f"{self.name}.{self.lives}", 0
        self.notified, self.answered = Notified(), 0

    # --- the handler

    def call(self, event: Event) -> Snapshot:
        found = self.job.apply(self.id, event)
        if not isinstance(event, CloseRendezvous):
            self.notify(found)
        return found

    def notify(self, found: Snapshot) -> None:
        self.notified, new = notifications(self.notified, found, self.id)
        self.inbox += new

    def follow(self) -> None:
        found = snapshot(self.job.round, self.id)
        self.notify(found)
        match found.status:
            case RoundEnded(round, by) if self.token == round > self.answered and by != self.id:
                self.call(EndConfirmed(self.id, round))
                self.answered = round

    def closed(self, notification: RoundClosed) -> RendezvousClosedError:
        error = RendezvousClosedError("closed")
        error.report = notification.report
        return error

    def next_rendezvous(self) -> Generator[None, None, Seated]:
        self.notified = Notified()
        while True:
            found = self.call(JoinRound(Node(self.id, self.name), self.token))
            waiting = SeatRequest(self.token, float("inf"))
            while True:
                waiting, outcome = end_wait(waiting, found, 0.0)
                if outcome is not None:
                    break
                yield
                found = snapshot(self.job.round, self.id)
            match outcome:
                case Seated():
                    self.token, self.notified = outcome.round, Notified(outcome.round)
                    self.notify(snapshot(self.job.round, self.id))
                    return outcome
                case RoundEnded(round):
                    self.token = round
                case Rejoin():
                    self.rejoin_as_new()
                case RoundClosed():
                    raise self.closed(outcome)

    # --- operations

    def form(self, reason: str = "", announce: bool = False) -> Operation:
        if announce:
            self.call(NodeLeaving(self.id, self.token, reason))
        yield
        self.workers = ""
        while True:
            seated = yield from self.next_rendezvous()
            while self.notified.ended is None:
                if self.job.all_arrived("ranks", self.id, seated.round, seated.world_size):
                    break
                yield
            else:
                continue
            break
        self.failures, self.size, self.report = seated.failures, seated.world_size, ""
        self.workers = "running"
        return words.Formed(0.0, seated.round, shared=True, leads=seated.rank == 0)

    def report_failure(self) -> Operation:
        self.report = f"{self.id} in round {self.token}"
        round, found = self.token, self.call(WorkersFailed(self.id, self.token, self.report))
        while True:
            if isinstance(found.status, RoundClosed):
                raise self.closed(found.status)
            if found.judged is not None and found.judged.round >= round:
                return self.verdict(found.judged if found.judged.round == round else None)
            if isinstance(found.status, NodeRefused) or found.status is None:
                return self.verdict(None)
            yield
            found = snapshot(self.job.round, self.id)

    def verdict(self, judged: Judged | None) -> words.Verdict:
        if judged is None:
            return words.Verdict(False, False, False, "over", 0.0)
        mine = judged.charged and judged.cause.report == self.report
        return words.Verdict(judged.charged, judged.failures > MAX_RESTARTS, mine, "judged", 0.0)

    def pause(self, reason: str, announce: bool) -> Operation:
        if announce:
            self.call(NodeLeaving(self.id, self.token, reason))
        yield
        self.workers = ""
        self.delayed = True
        return None

    def stop(self, report: bool) -> Operation:
        if report:
            self.call(
                CloseRendezvous(self.id, "its workers failed for good", f"final: {self.report}")
            )
            self.root = self.root or f"final: {self.report}"
        yield
        self.workers = ""
        return words.Stopped()

    def barrier(self) -> Operation:
        while self.notified.ended is None:
            if self.job.all_arrived("end", self.id, self.token, self.size):
                return words.BarrierOver(0.0, passed=True)
            yield
        return words.BarrierOver(0.0, passed=False)

    def check(self) -> Operation:
        yield
        states = {"running": WorkerState.HEALTHY, "failed": WorkerState.FAILED}
        return words.CheckResult(states.get(self.workers, WorkerState.SUCCEEDED), 0, 0.0)

    # --- the loop

    def turn(self) -> None:
        message = self.inbox.pop(0)
        event = self.meaning(message)
        if event is None:
            return
        before = self.state.phase
        self.state, actions = decide(self.state, event)
        self.job.trace.append(f"{self.id} {before}: {event} -> {self.state.phase}")
        for action in actions:
            self.act(action)

    def meaning(self, message: object) -> words.Event | None:
        match message:
            case RoundEnded():
                return words.RoundOver(message.round, message.why, 0.0)
            case NodesWaiting():
                full = self.size + message.waiting >= self.job.round.max_nodes
                return words.JoinRequested(message.round, message.waiting, full, 0.0)
            case RoundClosed():
                self.root = self.root or message.report
                return words.Closed(failed=bool(message.report))
            case Judged():
                return None
            case RendezvousClosedError():
                self.root = self.root or message.report
                return words.Closed(bool(self.root), refused=True)
        assert isinstance(message, words.Event)
        return message

    def act(self, action: words.Action) -> None:
        match action:
            case words.Form():
                self.operations.append(self.form())
            case words.Restart(reason, announce):
                self.operations.append(self.form(reason, announce))
            case words.CheckWorkers():
                self.operations.append(self.check())
            case words.ReportFailure():
                self.operations.append(self.report_failure())
            case words.Delay(_, reason, announce):
                self.operations.append(self.pause(reason, announce))
            case words.StopWorkers(report):
                self.delayed = False
                self.operations.append(self.stop(report))
            case words.Barrier():
                self.operations.append(self.barrier())
            case words.Finish(state):
                self.end(state.value)
            case words.Interrupt():
                self.call(NodeLeaving(self.id, self.token, "its agent got a signal"))
                self.workers = ""
                self.job.apply(self.id, LeaveRound(self.id))
                self.outcome = "SIGNALED"
            case words.Raise():
                self.end("CLOSED")

    def end(self, outcome: str) -> None:
        if outcome == "SUCCEEDED":
            there = self.job.checked_in.get(("end", self.token), set())
            assert len(there) == self.size or self.job.round.closed, "others have not succeeded"
        self.workers = ""
        self.job.apply(self.id, CloseRendezvous(self.id))
        self.job.apply(self.id, LeaveRound(self.id))
        self.outcome = outcome

    def advance(self) -> None:
        operation = self.operations[0]
        try:
            next(operation)
        except StopIteration as done:
            self.operations.pop(0)
            if done.value is not None:
                self.inbox.append(done.value)
        except RendezvousClosedError as error:
            self.operations.pop(0)
            self.inbox.append(error)

    def choices(self) -> Iterator[str]:
        yield "follow"
        if self.inbox:
            yield "turn"
        if self.operations:
            yield "advance"
        if self.delayed and not self.operations:
            yield "delay"
        if self.workers == "running" and not holds(self.job.round, self.id, self.token):
            yield "lapse"
        if self.state.phase is AgentPhase.RUNNING and self.state.gather_until is not None:
            yield "gather"

    def do(self, choice: str) -> None:
        match choice:
            case "delay":
                self.delayed = False
                self.inbox.append(words.DelayOver())
            case "gather":
                self.inbox.append(words.GatherOver(1e9, self.job.round.waiting))
            case "lapse":  # its guardian kills them
                self.inbox.append(words.LeaseOver(self.token, "its lease was over", 0.0))
                self.finish_workers("failed")
            case "follow":
                self.follow()
            case "turn":
                self.turn()
            case "advance":
                self.advance()

    def finish_workers(self, result: str) -> None:
        self.workers = result
        if result == "failed":
            self.inbox.append(words.Failing())
        self.inbox.append(words.Changed())


def fault(random: Random, job: Job, agents: list[Agent]) -> None:
    """Inject one fault."""
    agent = random.choice([agent for agent in agents if not agent.outcome])
    stay = sum(not other.outcome and not other.leaves for other in agents)
    match random.randrange(7):
        case 0 | 1 | 2 if agent.workers == "running":
            agent.finish_workers("failed")
        case 3 if agent.workers == "running":
            agent.finish_workers("succeeded")
        case 4:
            job.apply(agent.id, NodeLost(agent.id, "no heartbeat arrived"))
        case 5 if stay > job.round.min_nodes and not agent.leaves:
            job.apply(agent.id, NodeLost(agent.id, "its connection broke"))
            agent.outcome, agent.workers = "KILLED", ""
        case 6 if stay > job.round.min_nodes and not agent.leaves:
            agent.leaves = True
            agent.inbox.insert(0, words.Signaled(15))


def ending(agent: Agent) -> str:
    """Return the outcome of an agent.

    If its workers failed and the job was closed without a failure, an agent ends with the
    failure of its workers.
    """
    return "CLOSED" if agent.outcome == "FAILED" and not agent.root else agent.outcome


@pytest.mark.parametrize("seed", range(50))
def test_a_failure_in_a_job_that_is_closed_ends_all_agents_with_it(seed: int) -> None:
    random = Random(seed)
    job = Job(NODES, NODES)
    agents = [Agent(f"n{number}", job) for number in range(NODES)]
    closed = failed = False
    for _ in range(MOST_TURNS):
        living = [agent for agent in agents if not agent.outcome]
        if not living:
            break
        running = [agent for agent in living if agent.workers == "running"]
        if not closed and len(running) == NODES:
            closed = True
            job.apply(random.choice(agents).id, CloseRendezvous(random.choice(agents).id))
        elif closed and not failed and running and random.random() < 0.1:
            failed = True
            random.choice(running).finish_workers("failed")
        agent = random.choice(living)
        agent.do(random.choice([*agent.choices()]))
    trace = "\n".join(job.trace[-60:])
    assert failed
    assert {agent.outcome for agent in agents} == {"FAILED"}, trace
    assert len({agent.root for agent in agents}) == 1, trace


@pytest.mark.parametrize("seed", range(100))
def test_agents_end_together_after_any_faults(seed: int) -> None:
    random = Random(seed)
    job = Job(random.randint(1, 2), NODES)
    agents = [Agent(f"n{number}", job) for number in range(NODES)]
    faults = random.randrange(FAULTS)
    for _ in range(MOST_TURNS):
        living = [agent for agent in agents if not agent.outcome]
        if not living:
            break
        if faults and random.random() < 0.02:
            faults -= 1
            fault(random, job, agents)
            continue
        if job.round.last_call and random.random() < 0.02:
            job.round, _ = step(job.round, LastCallOver(job.round.last_call))
        agent = random.choice(living)
        agent.do(random.choice([*agent.choices()]))
        rounds = {agent.token for agent in agents if agent.workers == "running"}
        running = [agent for agent in living if agent.workers == "running"]
        if not faults and random.random() < 0.05 and running and len(rounds) == 1:
            random.choice(running).finish_workers("succeeded")
    trace = "\n".join(job.trace[-60:])
    outcomes = {agent.name: agent.outcome for agent in agents}
    assert all(outcomes.values()), f"{outcomes}, {[a.state for a in agents]}\n{trace}"
    left = {ending(agent) for agent in agents if agent.outcome not in ("KILLED", "SIGNALED")}
    # A node that waits for a round when the others have succeeded finds the rendezvous closed, as
    # in torch.
    assert left in ({"SUCCEEDED"}, {"SUCCEEDED", "CLOSED"}, {"FAILED"}, set()), (
        f"{outcomes}\n{trace}"
    )
    roots = {agent.root for agent in agents if agent.outcome == "FAILED"}
    assert len(roots) <= 1, f"{roots}\n{trace}"
