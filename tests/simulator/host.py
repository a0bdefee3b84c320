"""The hosts of a simulated job: machines, the guardians of their workers, and the workers.

The guardian is a separate program. It continues while the agent is paused, and kills the workers
when the lease is over by its clock. A host that is frozen as a whole is the exception: there, the
guardian checks the lease when the host thaws.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.settings import RendezvousSettings, RendezvousTimeout
from simulator.history import History
from simulator.kernel import Machine, Simulation

if TYPE_CHECKING:
    from regrow.rendezvous.node.driver import Driver
    from regrow.rendezvous.protocol.state import Round
    from simulator.agent import Agent


class Place(Protocol):
    """The place that holds the rounds of a job: a server, or a backend."""

    @property
    def state(self) -> Round | None:
        """The current state of the rounds; None before the first round, and after a loss."""
        ...

    def connect(self, agent: Agent) -> Driver:
        """Return an agent's driver; called in a thread of the agent."""
        ...

    def epoch(self, driver: Driver) -> int:
        """Return the number of the job's life that a driver belongs to."""
        ...

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """Break the connection of an agent.

        Args:
            agent: the agent; it may have ended.
            closed: the server sees the same as when an agent ends, although the agent lives.
        """

    def vanished(self, host: Host) -> None:
        """Note that a host has lost its power."""

    def pause(self, seconds: float) -> None:
        """Answer late, or not at all, for `seconds`."""

    def restart(self) -> None:
        """Restart with as little state as a restart is guaranteed to keep."""

    def crash(self) -> None:
        """Kill the process of the place, while its agent lives."""


class Profile(NamedTuple):
    """The kind of job and environment that a seed simulates."""

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
    """Whether the backend keeps beats separate from the document."""
    watched: bool
    """Whether the backend wakes the clients that wait for a change."""
    most: int = 1
    """Most hosts that one fault strikes."""
    spending: bool = False
    """Whether agents spend restarts in running rounds."""
    successors: int = 0
    """Most hosts besides that of the server that may take over."""
    witness: bool = False
    """Whether the hosts have a directory for a witness."""

    @property
    def settings(self) -> RendezvousSettings:
        """The profile as settings for the drivers."""
        bounds = self.bounds
        return RendezvousSettings(
            "job",
            self.low,
            self.high,
            RendezvousTimeout(last_call=timedelta(seconds=bounds.last_call)),
            timedelta(seconds=bounds.keep_alive),
            bounds.misses,
            shutdown_timeout=timedelta(seconds=bounds.grace),
            successors=self.successors,
            witness="/shared" if self.witness else "",
        )


class Job:
    """All hosts of a job, and their shared state."""

    def __init__(self, sim: Simulation, profile: Profile, history: History) -> None:
        self.sim, self.profile, self.history = sim, profile, history
        self.hosts: list[Host] = []
        self.faults = True
        self.place: Place
        self.new_agent: Callable[[Host], Agent]

    def delay(self) -> float:
        """Draw the seconds that a message takes."""
        random = self.sim.random
        delay = random.expovariate(1 / self.profile.delay)
        if not self.faults:
            return min(delay, 3 * self.profile.delay)
        return random.uniform(0, 0.5) if random.random() < 0.02 else delay

    def workers_ended(self, host: Host, round: int) -> None:
        """Doom the workers of the other hosts: they fail in their next collective."""
        random = self.sim.random
        for other in self.hosts:
            group = other.guardian
            if group.round != round or group.doomed:
                continue
            if random.random() < 0.7:
                run, group.doomed = group.runs, True
                self.sim.after(random.uniform(0, 3), lambda g=group, r=run: g.fail(r))  # type: ignore[misc]


class Guardian:
    """Runs one host's workers, and kills them when the lease is over or the agent has ended."""

    def __init__(self, host: Host) -> None:
        self.host, self.job, self.sim = host, host.job, host.job.sim
        self.round = 0
        """Round of the running workers; 0 if no workers run."""
        self.runs = 0
        """Counts the starts of workers."""
        self.lease = 0.0
        """When the workers must end, by the machine's clock."""
        self.agent: Agent | None = None
        self._stopped_at: float | None = None
        """When the workers were asked to stop; None if they were not."""
        self.doomed = False
        """Whether the workers have lost a peer, and will fail."""

    def start(self, agent: Agent, round: int, lease: float) -> None:
        self.agent, self.round, self.lease = agent, round, lease
        self.runs += 1
        self._stopped_at, self.doomed = None, False
        self.job.history.started(self.host, agent.id, agent.epoch, round, lease)
        self.watch(self.runs)
        random, run = self.sim.random, self.runs
        if self.job.faults and random.random() < min(0.3, 2.1 / self.job.profile.hosts):
            self.sim.after(random.uniform(0, 20), lambda: self.fail(run))

    def renew(self, lease: float) -> None:
        """Set the end of the lease, which may be sooner than before."""
        sooner, self.lease = lease < self.lease, lease
        if sooner and self.round:
            self.watch(self.runs)

    def watch(self, run: int) -> None:
        """Wait until the current lease is over, then kill the workers unless it was renewed."""
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
            self.watch(run)

    def when_thawed(self, do: Callable[[], None]) -> None:
        until = self.host.frozen_until
        if self.sim.now < until:
            self.sim.after(until - self.sim.now, lambda: self.when_thawed(do))
        else:
            do()

    def kill(self, run: int, within: float) -> None:
        """End the workers after at most `within` seconds."""
        seconds = self.sim.random.uniform(0.001, within)
        self.sim.after(seconds, lambda: self.when_thawed(lambda: self.ended(run)))

    def stop(self, within: float) -> None:
        """Ask the workers to stop."""
        if self._stopped_at is None:
            self._stopped_at = self.sim.now
            self.kill(self.runs, within)

    def fail(self, run: int) -> None:
        """Let the workers fail by themselves."""
        if run == self.runs and self.round:
            self.when_thawed(lambda: self.ended(run))

    def vanish(self) -> None:
        """Lose the workers, because the host lost its power."""
        self.agent = None
        self.ended(self.runs)

    def ended(self, run: int) -> None:
        if run != self.runs or not self.round:
            return
        round, self.round = self.round, 0
        self.job.history.worlds.ended(self.host, self.lease)
        self.job.workers_ended(self.host, round)
        if self.agent is not None:
            self.agent.when_awake(self.agent.notify)


class Host(Machine):
    """A machine that runs an agent most of the time."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job.sim, f"host{number}")
        self.job = job
        self.lives = 0
        self.guardian = Guardian(self)
        self.agent: Agent | None = None
        self.off = False
        """Whether the host is without power."""
        self.refused_until = 0.0
        """The virtual time until which the network refuses the host's connections."""

    def start(self) -> None:
        """Start an agent, as soon as nothing remains of the previous one.

        No agent starts in a job that is over and forgotten. If an agent that still runs begins the
        job again, the other hosts start theirs.
        """
        if self.agent is not None and self.agent.alive:
            return
        over = self.job.history.endings and self.job.place.state is None
        if over or self.guardian.round or self.off or self.sim.now < self.frozen_until:
            self.sim.after(0.5, self.start)
        else:
            self.agent = self.job.new_agent(self)

    def kill_agent(self) -> None:
        """Kill the agent; its guardian notices."""
        if self.agent is not None and self.agent.alive:
            self.trouble(self.sim.now)
            self.agent.die()
            self.guardian.kill(self.guardian.runs, within=0.3)

    def vanish(self) -> None:
        """Lose the power, so that no process closes a connection."""
        self.off = True
        self.trouble(self.sim.now + 1e9)
        if self.agent is not None:
            self.agent.kill()
        self.job.place.vanished(self)
        self.guardian.vanish()

    def thaw(self) -> None:
        """Resume the host; it checks the lease first."""
        guardian = self.guardian
        if guardian.round and self.clock > guardian.lease:
            guardian.ended(guardian.runs)
        self.job.history.worlds.thawed(self)
