"""Run a simulated job under faults for a while, and check its state after the faults stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

from regrow import events, utils
from regrow.rendezvous.peer import peer_driver, shared_document
from regrow.rendezvous.protocol import rules
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.protocol.messages import Event, Seated
from regrow.rendezvous.protocol.state import Round, status_of
from regrow.rendezvous.server import copies, round_service
from simulator import nodes as sim_nodes
from simulator.agent import Agent, SimPort
from simulator.faults import FAULTS_UNTIL, Faults
from simulator.history import History
from simulator.host import Host, Job, Place, Profile
from simulator.kernel import Simulation
from simulator.nodes import SimBackend
from simulator.server import SimServer
from simulator.successors import Servers, patches
from simulator.worlds import Violation

CALM_AT = FAULTS_UNTIL + 30.0
"""Virtual time when the last fault is over and every killed agent runs again, in seconds."""
STRANGERS = (1, 2)
"""The seeds, modulo 7, in which agents without a seat close the rendezvous."""
CRASHES = (2, 3)
"""The seeds, modulo 7, in which the server's process is killed, and its agent starts another."""
SPENDING = 5
"""The seeds, modulo 7, in which agents spend restarts in running rounds.

In the even ones of these seeds the server's process is killed too.
"""
FORGOTTEN_AFTER = 28.0
"""Seconds after which a server forgets a job whose voters are lost, so that it can begin again.

No host is frozen or cut off for longer.
"""
SETTLED_WITHIN = 50.0
"""Virtual seconds from `CALM_AT` until every node has a seat."""


class Outcome(NamedTuple):
    """The result of one seed."""

    seed: int
    events: int
    seconds: float
    """Seconds of virtual time."""
    rounds: int
    losses: int
    evictions: int
    mistaken: int
    """Agents that lived but counted as dead, because the network closed their connection."""
    charged: int
    forgiven: int
    takeovers: int
    """How often a server on another host took over."""
    spent: int
    """Restarts that nodes spent in running rounds."""
    closed: bool
    violation: str
    """The broken promise; empty if none was broken."""


def profile_of(sim: Simulation, nodes: int = 0) -> Profile:
    """Draw the kind of job; `nodes` is its size, or 0 for a small job of random size."""
    random = sim.random
    if nodes:
        return _crowd_of(sim, nodes)
    hosts = random.randint(2, 7)
    high = random.randint(2, hosts)
    low = random.randint(1, min(3, high))
    # Beats in the document are written one after the other: more nodes need a faster backend.
    apart = random.random() < 0.7
    grace = random.choice([0.5, 2.0, 15.0, 15.0])
    # The nodes may know a shorter grace than the workers of this job take.
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


def _with_successors(sim: Simulation, profile: Profile) -> Profile:
    """Return the profile for a job in which other hosts may take over: three hosts or more."""
    hosts = max(profile.hosts, 3)
    successors = sim.random.choice([2, 4, 4])
    high = max(profile.high, 3)
    return profile._replace(hosts=hosts, high=high, successors=successors)


def _with_witness(sim: Simulation, profile: Profile) -> Profile:
    """Return the profile for a job with a witness: two hosts, at times three."""
    hosts = sim.random.choice([2, 2, 2, 3])
    high = sim.random.choice([2, hosts])
    low = sim.random.choice([1, 1, 1, 2])
    return profile._replace(hosts=hosts, low=low, high=high, successors=4, witness=True)


def _crowd_of(sim: Simulation, nodes: int) -> Profile:
    """Draw a job of many nodes, with lines and a backend that are fast enough for them."""
    random = sim.random
    grace = random.choice([0.5, 2.0])
    return Profile(
        hosts=nodes,
        low=nodes // 2,
        high=random.choice([nodes, nodes - nodes // 10]),
        bounds=Bounds(last_call=random.choice([3.0, 8.0]), grace=grace),
        max_restarts=10**6,
        delay=random.choice([0.0005, 0.005]),
        start=random.choice([0.5, 2.0]),
        grace=grace,
        beats_apart=True,
        watched=True,
        most=max(nodes // 10, 1),
    )


class World:
    """A job, and the place that holds its rounds."""

    def __init__(
        self, seed: int, driver: str, nodes: int = 0, profile: Profile | None = None
    ) -> None:
        self.sim = sim = Simulation(seed)
        self.profile = profile or profile_of(sim, nodes)
        if driver == "hosts":
            self.profile = _with_successors(sim, self.profile)
        if driver == "witness":
            self.profile = _with_witness(sim, self.profile)
        if seed % 7 == SPENDING:
            # A job that ended early would be forgotten by its server before the end of the seed.
            self.profile = self.profile._replace(spending=True, max_restarts=10**6)
        self.history = History(sim, self.profile.bounds)
        self.job = Job(sim, self.profile, self.history)
        self.job.new_agent = Agent
        places: dict[str, Callable[[Job], Place]] = {
            "server": SimServer,
            "nodes": SimBackend,
            "hosts": Servers,
            "witness": Servers,
        }
        self.job.place = places[driver](self.job)
        for number in range(self.profile.hosts):
            host = Host(self.job, number)
            self.job.hosts.append(host)
            sim.after(sim.random.uniform(0, 3), host.start)

    def check_settled(self) -> None:
        """Check that every possible node has a seat in the same round, and that workers run."""
        state = self.job.place.state
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
            if host.guardian.round != state.number or not isinstance(status_of(state, id), Seated):
                raise self.history.broken(f"{id} runs no workers in round {state.number}")

    def _check_closed(self) -> None:
        if len(self.history.endings) > 1:
            raise self.history.broken(f"the job ended in two ways: {self.history.endings}")
        if self.history.worlds.running:
            raise self.history.broken("the job is over, and workers run")


def simulate(
    seed: int,
    driver: str,
    *,
    nodes: int = 0,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        driver: "server", "nodes", "hosts", or "witness" for two hosts and a directory.
        nodes: see `profile_of`.
        trace: receives a line for each event.

    Returns:
        The outcome; it contains a broken promise, which is not raised.
    """
    world = World(seed, driver, nodes)
    world.history.trace = trace

    def run() -> None:
        faults = Faults(world.job)
        faults.begin()
        if seed % 7 in STRANGERS:
            faults.begin_strangers(seed)
        crashes = seed % 7 in CRASHES or (seed % 7 == SPENDING and seed % 2 == 0)
        if driver != "nodes" and crashes:
            faults.begin_crashes(seed)
        if isinstance(world.job.place, Servers) and world.job.place.directory is not None:
            world.job.place.directory.begin_faults(seed, FAULTS_UNTIL, faults.trouble_all)
        world.sim.preempted = 0.02
        world.sim.run(FAULTS_UNTIL)
        world.sim.preempted, world.job.faults = 0.0, False
        world.sim.run(CALM_AT + SETTLED_WITHIN)
        world.check_settled()

    return _run(world, seed, run)


def simulate_many(nodes: int) -> Outcome:
    """Let thousands of nodes form a round at one server, lose some, and form the next round.

    The first round must form within the last call and the time of three messages. The second round
    must form within the time of a silence, of a stop of the workers, and of three messages.
    """
    bounds = Bounds(last_call=5.0, grace=2.0)
    profile = Profile(nodes, nodes - 100, nodes, bounds, 0, 0.005, 1.0, 2.0, True, True)
    world = World(0, "server", profile=profile)

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
    state = world.job.place.state
    if state is None or not state.complete or state.number < round or len(state.ranks) != nodes:
        raise world.history.broken(f"round {round} of {nodes} nodes has not formed")


def _run(world: World, seed: int, run: Callable[[], None]) -> Outcome:
    history = world.history
    violation = ""

    def step(before: Round, event: Event) -> rules.Step:
        after, refusal = rules.step(before, event)
        history.changed(before, event, after)
        return after, refusal

    place = world.job.place
    if isinstance(place, Servers):
        step = place.step

    # The documents are the same for all nodes, so each is decoded once.
    logging.disable()
    with (
        ExitStack() as stack,
        mock.patch.object(utils, "PortReservation", SimPort),
        mock.patch.object(events, "construct_and_record_rdzv_event"),
        mock.patch.object(round_service, "step", step),
        mock.patch.object(peer_driver, "step", sim_nodes.step),
        mock.patch.object(shared_document, "unseal", sim_nodes.read),
    ):
        if isinstance(place, Servers):
            stack.enter_context(mock.patch.object(copies, "FORGET_JOB", FORGOTTEN_AFTER))
            for (owner, name), replacement in patches(place).items():
                stack.enter_context(mock.patch.object(owner, name, replacement))
        try:
            run()
        except Violation as error:
            violation = str(error)
        except Exception as error:
            error.add_note(f"in seed {seed} of a job of {world.profile.hosts} nodes")
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
        history.worlds.mistaken,
        history.charged,
        history.forgiven,
        place.takeovers if isinstance(place, Servers) else 0,
        history.spends,
        bool(history.endings),
        violation,
    )
