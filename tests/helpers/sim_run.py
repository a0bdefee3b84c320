"""A simulated job under faults for a while, and what must have become of it when they stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import sim_nodes
from sim_agent import Agent, SimPort
from sim_history import History, Violation
from sim_host import Host, Job, Profile
from sim_kernel import Simulation
from sim_nodes import SimBackend
from sim_server import SimServer

from regrow import utils
from regrow.rendezvous import _by_nodes, _round, _service, _shared
from regrow.rendezvous._news import Effect, Event, Seated
from regrow.rendezvous._patience import Bounds
from regrow.rendezvous._round import Round
from regrow.rendezvous._state import standing

FAULTS_UNTIL = 90.0
"""Virtual seconds."""
CALM_AT = FAULTS_UNTIL + 30.0
"""When the last fault has passed, and everyone who was killed is back."""
SETTLED_WITHIN = 50.0
"""Virtual seconds from then until everyone has a seat."""


class Outcome(NamedTuple):
    """What came of one seed."""

    seed: int
    events: int
    seconds: float
    """Of virtual time."""
    rounds: int
    losses: int
    evictions: int
    charged: int
    forgiven: int
    closed: bool
    violation: str
    """What was broken; empty if nothing was."""


def profile_of(sim: Simulation) -> Profile:
    """Draw the kind of job."""
    random = sim.random
    hosts = random.randint(2, 7)
    high = random.randint(2, hosts)
    low = random.randint(1, min(3, high))
    # Beats in the document are written one after the other: the more nodes, the faster it must be.
    apart = random.random() < 0.7
    grace = random.choice([0.5, 2.0, 15.0, 15.0])
    # The nodes may have been told of a shorter grace than this one takes.
    known = grace if random.random() < 0.5 else 0.0
    bounds = Bounds(last_call=random.choice([1.0, 1.0, 3.0, 8.0]), grace=known)
    return Profile(
        hosts=hosts,
        low=low,
        high=high,
        bounds=bounds,
        max_restarts=3 if random.random() < 0.1 else 10**6,
        delay=random.choice([0.0005, 0.01, 0.1] if apart else [0.0005, 0.01]),
        start=random.choice([0.5, 0.5, 6.0]),
        grace=grace,
        beats_apart=apart,
        watched=random.random() < 0.7,
    )


class World:
    """A job, the place where its rounds are, and the faults that befall both."""

    def __init__(self, seed: int, driver: str, profile: Profile | None = None) -> None:
        self.sim = sim = Simulation(seed)
        self.profile = profile or profile_of(sim)
        self.history = History(sim, self.profile.bounds)
        self.job = Job(sim, self.profile, self.history)
        self.job.new_agent = Agent
        self._place_troubled = 0.0
        """Until when the place may not answer."""
        self.place: SimServer | SimBackend
        self.place = SimServer(self.job) if driver == "server" else SimBackend(self.job)
        self.job.place = self.place
        for number in range(self.profile.hosts):
            host = Host(self.job, number)
            self.job.hosts.append(host)
            sim.after(sim.random.uniform(0, 3), host.start)
        self._faults: list[tuple[float, Callable[[Host], None]]] = [
            (3, self._kill_agent),
            (3, self._pause_agent),
            (2, self._freeze_host),
            (3, self._cut_line),
            (2, self._reset_connection),
            (2, self._lose_host),
            (2, self._terminate),
            (1, self._pause_place),
            (1, self._jump_wall_clock),
            (0.15, self._restart_place),
        ]

    # --- faults

    def shake(self) -> None:
        """Begin with faults, until `FAULTS_UNTIL`."""
        random = self.sim.random
        mean = random.choice([1.0, 3.0, 3.0, 6.0])

        def fault() -> None:
            if self.sim.now < FAULTS_UNTIL:
                weights = [weight for weight, _ in self._faults]
                (_, befall) = random.choices(self._faults, weights)[0]
                host = random.choice(self.job.hosts)
                if max(host.reset_until, host.frozen_until) < self.sim.now:
                    self.history.note(f"{befall.__name__} {host.name}")
                    befall(host)
                self.sim.after(random.expovariate(1 / mean), fault)

        self.sim.after(random.uniform(2, 8), fault)

    def _span(self) -> float:
        """Seconds: less than the bounds, about as long, or longer."""
        return self.sim.random.choice([0.3, 1.5, 3.0, 4.5, 8.0, 20.0]) * self.sim.random.uniform(
            0.7, 1.3
        )

    def _back(self, host: Host) -> None:
        self.sim.after(self.sim.random.uniform(0.2, 15), host.start)

    def _kill_agent(self, host: Host) -> None:
        host.kill_agent()
        self._back(host)

    def _terminate(self, host: Host) -> None:
        if host.agent is not None:
            host.agent.terminate()

    def _pause_agent(self, host: Host) -> None:
        if host.agent is not None:
            if self.sim.random.random() < 0.5:
                host.agent.stop(self._span())
            else:
                host.agent.stopped_for = self._span()

    def _freeze_host(self, host: Host) -> None:
        if self.sim.now < host.frozen_until:
            return
        span = self._span()
        host.frozen_until = self.sim.now + span
        host.trouble(host.frozen_until)
        self.history.frozen(host)
        self.sim.after(span, host.thaw)

    def _cut_line(self, host: Host) -> None:
        for way in self.sim.random.choice([["out"], ["in"], ["out", "in"], ["out", "in"]]):
            until = self.sim.now + self._span()
            host.cut_until[way] = max(until, host.cut_until[way])
            host.trouble(until + 1.0)

    def _reset_connection(self, host: Host) -> None:
        agent = host.agent
        busy = max(*host.cut_until.values(), host.frozen_until, agent.paused_until if agent else 0)
        if agent is not None and agent.alive and busy < self.sim.now:
            # It can come back within its grace. A network that resets the connections of a host
            # that lives and then lets none through makes the others believe that it has died.
            host.reset_until = self.sim.now + 1.0
            self.place.reset(agent)

    def _lose_host(self, host: Host) -> None:
        """Its power fails: nobody closes anything."""
        if host.off or self.sim.now < host.frozen_until:
            return
        host.vanish()

        def power() -> None:
            host.off = False
            host.trouble_at = max(self.sim.now, self._place_troubled, *host.cut_until.values())
            host.start()

        self.sim.after(self.sim.random.uniform(1, 20), power)

    def _pause_place(self, _host: Host) -> None:
        span = self._span()
        self._trouble_all(span)
        self.place.pause(span)

    def _trouble_all(self, span: float) -> None:
        self._place_troubled = max(self._place_troubled, self.sim.now + span)
        for host in self.job.hosts:
            host.trouble(self._place_troubled)

    def _jump_wall_clock(self, host: Host) -> None:
        host.wall += self.sim.random.choice([-3600.0, -5.0, 5.0, 3600.0])

    def _restart_place(self, _host: Host) -> None:
        state = self.place.state
        if state is None or not state.closed:  # a job that is over is not begun anew
            self._trouble_all(2.0)
            self.place.restart()

    # --- the end

    def check_settled(self) -> None:
        """Everyone who can has a seat in the same round, and workers run."""
        state = self.place.state
        hosts = self.job.hosts
        if self.history.endings or (state is not None and state.closed):
            self._check_closed()
            return
        if state is None or not state.complete:
            raise self.history.broken(
                f"no round has formed {SETTLED_WITHIN} s after the last fault: {state}"
            )
        if len(state.members) != min(len(hosts), state.max_nodes):
            raise self.history.broken(f"seats are free, and nodes wait: {state}")
        seats = {
            host.agent.id: host
            for host in hosts
            if host.agent is not None and host.agent.alive and host.agent.id in state.ranks
        }
        if seats.keys() != state.ranks.keys():
            raise self.history.broken(f"members that are not there: {state.ranks} {seats}")
        for id, host in seats.items():
            if host.guardian.round != state.number or not isinstance(standing(state, id), Seated):
                raise self.history.broken(f"{id} runs no workers in round {state.number}")

    def _check_closed(self) -> None:
        if len(self.history.endings) > 1:
            raise self.history.broken(f"the job ended in two ways: {self.history.endings}")
        if self.history.running:
            raise self.history.broken("the job is over, and workers run")


def simulate(
    seed: int,
    driver: str,
    *,
    most: int | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        driver: "server" or "nodes".
        most: end after so many events.
        trace: is told what happens.

    Returns:
        What came of it; a broken promise is in it, and not raised.
    """
    world = World(seed, driver)
    world.history.trace = trace

    def run() -> None:
        world.shake()
        world.sim.preempted = 0.02
        world.sim.run(FAULTS_UNTIL, most)
        world.sim.preempted, world.job.faults = 0.0, False
        world.sim.run(CALM_AT + SETTLED_WITHIN, most)
        if world.sim.done != most:
            world.check_settled()

    return _run(world, seed, run)


def simulate_many(nodes: int) -> Outcome:
    """Let thousands of nodes meet at one server, lose some of them, and meet again.

    They must have met within the last call and the time of three messages, and again within that
    of a silence, of a stop of the workers, and of three messages.
    """
    bounds = Bounds(last_call=5.0, grace=2.0)
    profile = Profile(nodes, nodes - 100, nodes, bounds, 0, 0.005, 1.0, 2.0, True, True)
    world = World(0, "server", profile)

    def run() -> None:
        world.job.faults = False
        world.sim.run(3.0 + bounds.last_call + 1.0)
        _complete(world, 1, nodes)
        world.sim.run(world.sim.now + 3.0)
        lost = world.sim.random.sample(world.job.hosts, 50)
        for host in lost[:25]:
            host.kill_agent()
        for host in lost[25:]:
            host.vanish()
        again = bounds.lease + bounds.kill + bounds.keep_alive + profile.grace + 3.0
        world.sim.run(world.sim.now + again)
        _complete(world, 2, nodes - len(lost))

    return _run(world, 0, run)


def _complete(world: World, round: int, nodes: int) -> None:
    state = world.place.state
    if state is None or not state.complete or state.number < round or len(state.ranks) != nodes:
        raise world.history.broken(f"round {round} of {nodes} nodes has not formed")


def _run(world: World, seed: int, run: Callable[[], None]) -> Outcome:
    history = world.history
    violation = ""

    def step(before: Round, event: Event) -> tuple[Round, tuple[Effect, ...]]:
        after, effects = _round.step(before, event)
        history.changed(before, event, after, effects)
        return after, effects

    # The documents are the same for all nodes, so each is read once.
    logging.disable()
    with (
        mock.patch.object(utils, "PortReservation", SimPort),
        mock.patch.object(_service, "step", step),
        mock.patch.object(_by_nodes, "step", sim_nodes.step),
        mock.patch.object(_shared, "unseal", sim_nodes.read),
    ):
        try:
            run()
        except Violation as error:
            violation = str(error)
        except Exception as error:
            error.add_note(f"in seed {seed}")
            raise
        finally:
            for host in world.job.hosts:
                if host.agent is not None:
                    host.agent.kill()
            logging.disable(logging.NOTSET)
    return Outcome(
        seed,
        world.sim.done,
        world.sim.now,
        len(history.rounds),
        history.losses,
        history.evictions,
        history.charged,
        history.forgiven,
        bool(history.endings),
        violation,
    )
