"""The rules under virtual time, faults and delays, driven both ways that they are made for.

`ByServer`: one server applies what the nodes send, and watches for their beats. `ByNodes`: there
is only a document that can be compared and set; every node applies its own events to it, and
watches all others by its own clock, which agrees with nobody's. Messages are delayed, overtake one
another, get lost and are sent again; nodes are killed, paused, and started again.

What is checked is the history, not only the end: a round has one membership, however many hear of
it; a node never takes a seat in a round older than one it has heard of; and once the faults stop,
everyone who has a seat sits in the same round within a bound.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from regrow.rendezvous._document import decode, encode
from regrow.rendezvous._news import Event, Join, Lost, Node, Placed, RoundClosed, RoundEnded, Seated
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._round import Round, standing, step

BOUNDS = Bounds(last_call=8.0, keep_alive=1.0, misses=3)
SETTLED_WITHIN = 60.0  # virtual seconds from the last fault to the last seat
News = Seated | Placed | RoundEnded | RoundClosed | None


class Simulation:
    """A heap of things to do, a seeded source of delays, and what came of it."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.rounds: dict[int, tuple[int, str, str]] = {}
        self.ranks: dict[tuple[int, int], str] = {}
        self.done = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.done += 1
        heapq.heappush(self._heap, (self.now + seconds, self.done, do))

    def send(self, do: Callable[[], None]) -> None:
        """Deliver after a while; now and then twice or not at all."""
        for _ in range(2 if self.random.random() < self.loss else 1):
            if self.random.random() >= self.loss:
                self.after(self.random.expovariate(1 / 0.02), do)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        self.now = until

    def saw(self, seat: Seated) -> None:
        """Note a seat; two who are told of one round must be told the same."""
        same = (seat.world_size, seat.leader, seat.digest)
        assert self.rounds.setdefault(seat.round, same) == same
        assert self.ranks.setdefault((seat.round, seat.rank), seat.id) == seat.id


class Agent:
    """A host's agent: joins, works, stops its workers and joins again when it is told to."""

    def __init__(self, world: World, host: int) -> None:
        self.world, self.host = world, host
        self.clock = world.sim.random.uniform(-1e6, 1e6)
        self.life = self.paused_until = 0.0
        self.start()

    def start(self) -> None:
        sim = self.world.sim
        self.alive = True
        self.life += 1
        self.node = Node(f"host{self.host}/{self.life:g}", f"host{self.host}")
        self.token, self.seat, self.beat = 0, None, 0
        self.restarting = False
        self.heard_of = 0
        self.patience = Patience()
        life = self.life
        sim.after(sim.random.uniform(0, 2), lambda: self.tick(life))
        self.join()

    seat: Seated | None

    def join(self) -> None:
        self.restarting = False
        self.seat = None
        self.world.submit(self, Join(self.node, self.token))

    def tick(self, life: float) -> None:
        """Once a second: beat, look around, repeat what was not answered."""
        if not self.alive or life != self.life:
            return
        sim = self.world.sim
        sim.after(max(1.0, self.paused_until - sim.now), lambda: self.tick(life))
        if sim.now < self.paused_until:
            return
        self.beat += 1
        self.world.beat(self)

    def hear(self, life: float, news: News, waiting: int, version: int) -> None:
        """The latest of what this node has to know; may come late, twice or out of order."""
        if not self.alive or life != self.life or version < self.heard_of:
            return
        sim = self.world.sim
        if sim.now < self.paused_until:
            sim.after(self.paused_until - sim.now, lambda: self.hear(life, news, waiting, version))
            return
        self.heard_of = version
        match news:
            case Seated(round=round) if round > self.token:
                assert self.seat is None, "a seat while the workers of another round run"
                sim.saw(news)
                self.token, self.seat = round, news
            case Seated() if waiting and news == self.seat:
                self.restart()
            case RoundEnded(round=round) if round > self.token:
                self.token = round  # it had a seat, and no time to hear of it
                self.join()
            case RoundEnded(round=round) if self.seat and self.seat.round == round:
                self.restart()
            case None:
                self.alive = False
                self.start()

    def restart(self) -> None:
        if self.restarting:
            return
        self.restarting = True
        life = self.life

        def stopped() -> None:
            if self.alive and life == self.life:
                self.join()

        self.world.sim.after(self.world.sim.random.uniform(0, 2), stopped)


class World(ABC):
    """What the agents meet in."""

    def __init__(self, sim: Simulation, low: int, high: int) -> None:
        self.sim = sim
        self.begin = Round(low, high)
        self.agents: list[Agent] = []

    @abstractmethod
    def submit(self, agent: Agent, event: Event) -> None:
        """Let an agent's event take effect some time."""

    @abstractmethod
    def beat(self, agent: Agent) -> None:
        """Show that an agent lives."""

    @property
    @abstractmethod
    def state(self) -> Round:
        """The state as it is, whoever knows."""


class ByServer(World):
    """The store server runs the rules; connections and beats are its own business."""

    def __init__(self, sim: Simulation, low: int, high: int) -> None:
        super().__init__(sim, low, high)
        self._state = self.begin
        self.patience = Patience()
        self.beats: dict[str, int] = {}
        self.agent_of: dict[str, Agent] = {}
        self.ended: set[str] = set()  # sessions of nodes that were given up
        self.look()

    @property
    def state(self) -> Round:
        return self._state

    def submit(self, agent: Agent, event: Event) -> None:
        node = agent.node

        def arrived() -> None:
            self.agent_of[node.id] = agent
            if node.id not in self.ended:
                self.apply(event)

        self.sim.send(arrived)

    def beat(self, agent: Agent) -> None:
        id, beat, waits = agent.node.id, agent.beat, agent.seat is None and not agent.restarting
        token, node = agent.token, agent.node

        def arrived() -> None:
            self.beats[id] = max(beat, self.beats.get(id, 0))
            # It has had no answer, so it repeats its call along with the beat.
            if waits and id not in self.ended:
                self.apply(Join(node, token))
            self.tell(agent, id)

        self.sim.send(arrived)

    def apply(self, event: Event) -> None:
        before = self._state
        self._state, effects = step(before, event)
        assert self._state.number >= before.number
        if effects or self._state is not before:
            for id in {**before.members, **self._state.members}:
                if id in self.agent_of:
                    self.tell(self.agent_of[id], id)

    def tell(self, agent: Agent, id: str) -> None:
        if agent.node.id != id:
            return
        news, waiting, version = standing(self._state, id), self._state.waiting, self._state.version
        life = agent.life
        self.sim.send(lambda: agent.hear(life, news, waiting, version))

    def look(self) -> None:
        self.patience, due, _ = look(
            self.patience, self._state, self.beats, BOUNDS, self.sim.now + 12345.0
        )
        for event in due:
            self.apply(event)
            if isinstance(event, Lost):
                self.ended.add(event.id)
        self.sim.after(0.5, self.look)


class ByNodes(World):
    """A document and a version; nobody runs the rules but the nodes."""

    def __init__(self, sim: Simulation, low: int, high: int) -> None:
        super().__init__(sim, low, high)
        self.document = encode(self.begin)
        self.version = 0
        self.beats: dict[str, int] = {}
        self.calls: set[Agent] = set()  # whose join has not taken effect yet

    @property
    def state(self) -> Round:
        return decode(self.document)

    def submit(self, agent: Agent, event: Event) -> None:
        """Read, apply, compare and set; again if somebody was faster."""
        node = agent.node

        def attempt() -> None:
            if not agent.alive or agent.node != node:
                return
            if self.sim.now < agent.paused_until:
                self.sim.after(agent.paused_until - self.sim.now, attempt)
                return
            version, before = self.version, self.state
            after, _ = step(before, event)
            if after is before:
                self.calls.discard(agent)
                self.read(agent)
            else:
                self.sim.after(self.sim.random.uniform(0, 0.05), lambda: publish(version, after))

        def publish(version: int, after: Round) -> None:
            if version != self.version:
                self.sim.after(self.sim.random.uniform(0, 0.2), attempt)
                return
            self.version += 1
            self.document = encode(after)
            if isinstance(event, Join):
                self.calls.discard(agent)
            for other in self.agents:
                self.sim.send(lambda other=other: self.read(other))  # type: ignore[misc]

        if isinstance(event, Join):
            self.calls.add(agent)
        self.sim.after(self.sim.random.uniform(0, 0.02), attempt)

    def read(self, agent: Agent) -> None:
        state, id = self.state, agent.node.id
        news = standing(state, id)
        if news is None and agent in self.calls:
            return  # its join is still on the way
        agent.hear(agent.life, news, state.waiting, state.version)

    def beat(self, agent: Agent) -> None:
        self.beats[agent.node.id] = agent.beat
        self.sim.send(lambda: self.read(agent))
        now = agent.clock + self.sim.now
        me = agent.node.id
        agent.patience, due, _ = look(agent.patience, self.state, self.beats, BOUNDS, now, me)
        for event in due:
            self.submit(agent, event)


def shake(kind: type[World], seed: int, hosts: int, low: int, high: int, loss: float) -> World:
    """A job under faults for a while, then left in peace until it must have settled."""
    sim = Simulation(seed, loss)
    world = kind(sim, low, high)
    world.agents.extend(Agent(world, host) for host in range(hosts))

    def fault() -> None:
        if sim.now > 100.0:
            return
        agent = sim.random.choice(world.agents)
        if not agent.alive:
            agent.start()
        elif sim.random.random() < 0.5:
            agent.alive = False
        else:
            agent.paused_until = sim.now + sim.random.choice([0.5, 1.5, 6.0, 20.0])
        sim.after(sim.random.expovariate(1 / 4.0), fault)

    sim.after(5.0, fault)
    sim.run(130.0)
    sim.loss = 0.0
    for agent in world.agents:
        agent.paused_until = 0.0
        if not agent.alive:
            agent.start()
    sim.run(130.0 + SETTLED_WITHIN)
    return world


def check_settled(world: World, hosts: int) -> None:
    state = world.state
    assert state.complete
    assert len(state.members) == min(hosts, state.max_nodes)
    seated = {agent.node.id for agent in world.agents if agent.seat is not None}
    assert seated == state.ranks.keys()
    for agent in world.agents:
        if agent.seat is not None:
            assert agent.seat == standing(state, agent.node.id)
            assert not agent.restarting


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [ByServer, ByNodes])
def test_after_any_faults_everyone_meets_again(kind: type[World], seed: int) -> None:
    world = shake(kind, seed, hosts=6, low=2, high=5, loss=0.05)
    check_settled(world, 6)
    assert len(world.sim.rounds) > 3, "nothing happened"


def test_a_simulation_is_repeated_from_its_seed() -> None:
    first, second = (shake(ByServer, 7, hosts=6, low=2, high=5, loss=0.05) for _ in range(2))
    assert first.sim.rounds == second.sim.rounds
    assert first.sim.done == second.sim.done


def test_many_nodes_form_their_first_round_at_once_when_all_have_come() -> None:
    sim = Simulation(1, loss=0.0)
    world = ByServer(sim, 1, 300)
    world.agents.extend(Agent(world, host) for host in range(300))
    sim.run(3.0)
    assert list(world.state.ranks.values()) == list(range(300))
    assert [node.addr for node in map(world.state.members.__getitem__, world.state.ranks)] == [
        f"host{n}" for n in range(300)
    ]
    assert world.state.number == 1


def test_many_nodes_that_lose_one_meet_again_without_waiting_for_a_last_call() -> None:
    sim = Simulation(2, loss=0.0)
    world = ByServer(sim, 1, 100)
    world.agents.extend(Agent(world, host) for host in range(100))
    sim.run(5.0)
    world.agents[50].alive = False
    sim.run(12.0)  # three missed beats and two seconds to stop the workers; the last call is 8 s
    assert world.state.number == 2
    assert len(world.state.ranks) == 99
    kept = [a.seat.rank for a in world.agents if a.seat and a.seat.round == 2]
    assert sorted(kept) == list(range(99))
    assert kept[:50] == list(range(50))
    assert kept[50:98] == list(range(51, 99))
