"""The hosts of a simulated job: machines, the guardians of their workers, and the workers.

The guardian is a program of its own. It goes on when the agent is paused, and kills the workers
when the lease is over by its clock; a host that is frozen as a whole is the exception, there the
lease is looked at when it thaws.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sim_history import History
from sim_kernel import Machine, Simulation

from regrow.rendezvous._patience import Bounds
from regrow.rendezvous._settings import RendezvousSettings, RendezvousTimeout

if TYPE_CHECKING:
    from sim_agent import Agent

    from regrow.rendezvous._driver import Driver
    from regrow.rendezvous._round import Round


class Place(Protocol):
    """Where the rounds of a job are."""

    @property
    def state(self) -> Round | None:
        """The rounds as they are now; None before there are any, and when they are forgotten."""
        ...

    def connect(self, agent: Agent) -> Driver:
        """Return an agent's driver; called in a thread of the agent."""
        ...

    def epoch(self, driver: Driver) -> int:
        """Return which life of the job a driver is in."""
        ...

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """Break the connection of an agent.

        Args:
            agent: whose; it may have ended.
            closed: what is heard of it is what is heard when an agent ends, though it lives.
        """

    def pause(self, seconds: float) -> None:
        """Answer nothing for a while, or late."""

    def restart(self) -> None:
        """Begin anew, with no more than is safe from that."""


class Profile(NamedTuple):
    """What kind of job and surroundings a seed is about."""

    hosts: int
    low: int
    high: int
    bounds: Bounds
    max_restarts: int
    delay: float
    """Mean seconds that a message takes."""
    start: float
    """Most seconds from a seat to the start of workers."""
    grace: float
    """Most seconds that workers take to stop."""
    beats_apart: bool
    """Whether the backend keeps beats beside the document."""
    watched: bool
    """Whether the backend wakes those who wait for a change."""
    most: int = 1
    """Hosts that one fault befalls at most."""

    @property
    def settings(self) -> RendezvousSettings:
        """The same, as the drivers take it."""
        bounds = self.bounds
        return RendezvousSettings(
            "job",
            self.low,
            self.high,
            RendezvousTimeout(last_call=timedelta(seconds=bounds.last_call)),
            timedelta(seconds=bounds.keep_alive),
            bounds.misses,
            shutdown_timeout=timedelta(seconds=bounds.grace),
        )


class Job:
    """All hosts of a job, and what they share."""

    def __init__(self, sim: Simulation, profile: Profile, history: History) -> None:
        self.sim, self.profile, self.history = sim, profile, history
        self.hosts: list[Host] = []
        self.faults = True
        self.place: Place
        self.new_agent: Callable[[Host], Agent]

    def delay(self) -> float:
        """Seconds that a message takes."""
        random = self.sim.random
        delay = random.expovariate(1 / self.profile.delay)
        if not self.faults:
            return min(delay, 3 * self.profile.delay)
        return random.uniform(0, 0.5) if random.random() < 0.02 else delay

    def workers_ended(self, host: Host, round: int) -> None:
        """The workers of one host are gone: those of the others fail in their next collective."""
        random = self.sim.random
        for other in self.hosts:
            group = other.guardian
            if group.round != round or group.doomed:
                continue
            if random.random() < 0.7:
                run, group.doomed = group.runs, True
                self.sim.after(random.uniform(0, 3), lambda g=group, r=run: g.fail(r))  # type: ignore[misc]


class Guardian:
    """Keeps one host's workers, and kills them when the lease is over or the agent is gone."""

    def __init__(self, host: Host) -> None:
        self.host, self.job, self.sim = host, host.job, host.job.sim
        self.round = 0
        """Of the workers that run; 0: none run."""
        self.runs = 0
        """Counts the starts of workers."""
        self.lease = 0.0
        """Until when they may run, by the machine's clock."""
        self.agent: Agent | None = None
        self._stopped_at: float | None = None
        """When the workers were asked to end."""
        self.doomed = False
        """The workers have lost a peer, and will fail."""

    def start(self, agent: Agent, round: int, lease: float) -> None:
        self.agent, self.round, self.lease = agent, round, lease
        self.runs += 1
        self._stopped_at, self.doomed = None, False
        self.job.history.started(self.host, agent.id, agent.epoch, round, lease)
        self._watch(self.runs)
        random, run = self.sim.random, self.runs
        if self.job.faults and random.random() < min(0.3, 2.1 / self.job.profile.hosts):
            self.sim.after(random.uniform(0, 20), lambda: self.fail(run))

    def renew(self, lease: float) -> None:
        """Take over until when the workers may run; it may be sooner than was said before."""
        sooner, self.lease = lease < self.lease, lease
        if sooner and self.round:
            self._watch(self.runs)

    def _watch(self, run: int) -> None:
        """Look at the lease when it is over as it is now."""
        left = self.lease - self.host.clock
        if left > 0:
            self.host.after(left, lambda: self.when_thawed(lambda: self._watch_on(run)))
        else:
            if self._stopped_at is not None:
                asked = self.sim.now - self._stopped_at
                self.job.history.killed_while_stopping(self.host, asked)
            self.kill(run, within=0.5)

    def _watch_on(self, run: int) -> None:
        if run == self.runs and self.round:
            self._watch(run)

    def when_thawed(self, do: Callable[[], None]) -> None:
        until = self.host.frozen_until
        if self.sim.now < until:
            self.sim.after(until - self.sim.now, lambda: self.when_thawed(do))
        else:
            do()

    def kill(self, run: int, within: float) -> None:
        """Have no workers left after that many seconds at most."""
        seconds = self.sim.random.uniform(0.001, within)
        self.sim.after(seconds, lambda: self.when_thawed(lambda: self._ended(run)))

    def stop(self, within: float) -> None:
        """Ask the workers to end."""
        if self._stopped_at is None:
            self._stopped_at = self.sim.now
            self.kill(self.runs, within)

    def fail(self, run: int) -> None:
        """The workers fail by themselves."""
        if run == self.runs and self.round:
            self.when_thawed(lambda: self._ended(run))

    def vanish(self) -> None:
        """The host has lost its power, and its workers are gone."""
        self.agent = None
        self._ended(self.runs)

    def _ended(self, run: int) -> None:
        if run != self.runs or not self.round:
            return
        round, self.round = self.round, 0
        self.job.history.worlds.ended(self.host, self.lease)
        self.job.workers_ended(self.host, round)
        if self.agent is not None:
            self.agent.when_awake(self.agent.notify)


class Host(Machine):
    """A machine with an agent, most of the time."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job.sim, f"host{number}")
        self.job = job
        self.lives = 0
        self.guardian = Guardian(self)
        self.agent: Agent | None = None
        self.off = False
        """Without power."""
        self.refused_until = 0.0
        """Until when whatever is in between refuses its connections."""

    def start(self) -> None:
        """Start an agent, once nothing of the one before is left."""
        if self.job.history.endings and self.job.place.state is None:
            return  # a job that is over and forgotten is not begun anew
        if self.guardian.round or self.off or self.sim.now < self.frozen_until:
            self.sim.after(0.5, self.start)
        elif self.agent is None or not self.agent.alive:
            self.agent = self.job.new_agent(self)

    def kill_agent(self) -> None:
        """Kill the agent; its guardian notices."""
        if self.agent is not None and self.agent.alive:
            self.trouble(self.sim.now)
            self.agent.die()
            self.guardian.kill(self.guardian.runs, within=0.3)

    def vanish(self) -> None:
        """Lose the power: nobody is left to close a connection."""
        self.off = True
        self.trouble(self.sim.now + 1e9)
        if self.agent is not None:
            self.agent.kill()
        self.guardian.vanish()

    def thaw(self) -> None:
        """The host goes on: the lease is the first thing looked at."""
        guardian = self.guardian
        if guardian.round and self.clock > guardian.lease:
            guardian._ended(guardian.runs)
        self.job.history.worlds.thawed(self)
