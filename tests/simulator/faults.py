"""Faults of a simulated job: on its hosts, agents and lines, and at the place of its rounds.

A fault strikes one host. In a large job it may also strike a tenth of the hosts at one moment.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simulator.agent import Stranger
from simulator.host import Host, Job

FAULTS_UNTIL = 90.0
"""Virtual time until which faults happen, in seconds."""


class Faults:
    """The faults of one job, drawn by its simulation.

    Args:
        job: the job, with all of its hosts.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.sim, self.history = job, job.sim, job.history
        self._place_troubled = 0.0
        """The virtual time until which the place may not answer."""
        most = job.profile.most
        self._faults: list[tuple[float, int, Callable[[Host], None]]] = [
            (3, most, self._kill_agent),
            (3, most, self._pause_agent),
            (2, most, self._freeze_host),
            (3, most, self._cut_line),
            (4, most, self._break_connection),
            (2, most, self._lose_host),
            (2, most, self._terminate),
            (1, 1, self._pause_place),
            (1, most, self._jump_wall_clock),
            (0.15, 1, self._restart_place),
        ]
        """Weight of the fault, largest number of hosts, and function that strikes one host."""

    def begin(self) -> None:
        """Schedule faults until `FAULTS_UNTIL`."""
        random = self.sim.random
        mean = random.choice([1.0, 3.0, 3.0, 6.0])

        def fault() -> None:
            if self.sim.now < FAULTS_UNTIL:
                weights = [weight for weight, _, _ in self._faults]
                (_, most, strike) = random.choices(self._faults, weights)[0]
                for host in random.sample(self.job.hosts, random.choice([1, most])):
                    if host.frozen_until < self.sim.now:
                        self.history.note(f"{strike.__name__} {host.name}")
                        strike(host)
                        if self.job.profile.successors:
                            self.trouble_all(self._outage(host))
                self.sim.after(random.expovariate(1 / mean), fault)

        self.sim.after(random.uniform(2, 8), fault)

    def _outage(self, host: Host) -> float:
        """Seconds until all is well again after a fault of a host that may serve."""
        return (0.0 if host.off else max(host.trouble_at - self.sim.now, 0.0)) + 8.0

    def begin_crashes(self, seed: int) -> None:
        """Kill the server's process at times, until `FAULTS_UNTIL`; see `begin_strangers`."""
        random = Random(seed)

        def crash() -> None:
            if self.sim.now < FAULTS_UNTIL:
                self.trouble_all(4.0)
                self.job.place.crash()
                self.sim.after(random.expovariate(1 / 15), crash)

        self.sim.after(random.uniform(2, 20), crash)

    def begin_strangers(self, seed: int) -> None:
        """Let agents without a seat close the rendezvous, until `FAULTS_UNTIL`.

        The random numbers are separate from the simulation's, so seeds without strangers keep their
        history.
        """
        random = Random(seed)

        def stranger() -> None:
            if self.sim.now < FAULTS_UNTIL:
                host = random.choice(self.job.hosts)
                id = random.choice([f"{host.name}/stranger", *sorted(self.history.given_up)[-3:]])
                if not host.off and host.frozen_until < self.sim.now:
                    self.history.note(f"{id} closes the rendezvous, and has no seat")
                    Stranger(host, id)
                self.sim.after(random.expovariate(1 / 10), stranger)

        self.sim.after(random.uniform(2, 20), stranger)

    def _span(self) -> float:
        """Draw a duration in seconds: shorter than the bounds, about as long, or longer."""
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
        self.history.worlds.frozen(host)
        self.sim.after(span, host.thaw)

    def _cut_line(self, host: Host) -> None:
        for way in self.sim.random.choice([["out"], ["in"], ["out", "in"], ["out", "in"]]):
            self._cut(host, way, self._span())

    def _cut(self, host: Host, way: str, span: float) -> None:
        until = self.sim.now + span
        host.cut_until[way] = max(until, host.cut_until[way])
        host.trouble(until + 1.0)

    def _break_connection(self, host: Host) -> None:
        """Break a connection from the network, by a reset or by a close as if the agent had ended.

        The network accepts the next connection at once, or it refuses or loses all connections for
        a while. If the connection was closed, the agent lives but counts as dead, unless it
        reconnects within its grace.
        """
        agent, random = host.agent, self.sim.random
        if agent is not None and agent.alive:
            span = random.choice([0.0, 0.2, 1.0, 4.0]) * random.uniform(0.7, 1.3)
            host.trouble(self.sim.now + span)
            if random.random() < 0.5:
                host.refused_until = self.sim.now + span
            else:
                for way in ("out", "in"):
                    self._cut(host, way, span)
            self.job.place.reset(agent, closed=random.random() < 0.5)

    def _lose_host(self, host: Host) -> None:
        """Cut the power of a host, so that no process closes a connection."""
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
        self.trouble_all(span)
        self.job.place.pause(span)

    def trouble_all(self, span: float) -> None:
        """Note that no host may be well for some seconds."""
        self._place_troubled = max(self._place_troubled, self.sim.now + span)
        for host in self.job.hosts:
            host.trouble(self._place_troubled)

    def _jump_wall_clock(self, host: Host) -> None:
        host.wall += self.sim.random.choice([-3600.0, -5.0, 5.0, 3600.0])

    def _restart_place(self, _host: Host) -> None:
        state = self.job.place.state
        if state is None or not state.closed:  # a job that is over does not start again
            self.trouble_all(2.0)
            self.job.place.restart()
