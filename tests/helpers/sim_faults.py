"""What befalls a simulated job: hosts, agents, lines, and the place where its rounds are.

A fault befalls one host, or in a job of many as well a tenth of them at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable

from sim_host import Host, Job

FAULTS_UNTIL = 90.0
"""Virtual seconds."""


class Faults:
    """The faults of one job, which are drawn by its simulation.

    Args:
        job: with all of its hosts.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.sim, self.history = job, job.sim, job.history
        self._place_troubled = 0.0
        """Until when the place may not answer."""
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
        """How often, how many hosts at most, and what happens to each of them."""

    def begin(self) -> None:
        """Let them happen until `FAULTS_UNTIL`."""
        random = self.sim.random
        mean = random.choice([1.0, 3.0, 3.0, 6.0])

        def fault() -> None:
            if self.sim.now < FAULTS_UNTIL:
                weights = [weight for weight, _, _ in self._faults]
                (_, most, befall) = random.choices(self._faults, weights)[0]
                for host in random.sample(self.job.hosts, random.choice([1, most])):
                    if host.frozen_until < self.sim.now:
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
        """Something in between does, by a reset or by a close, as if the agent had ended.

        The next connection it lets through at once, or refuses or loses all of them for a while. An
        agent whose connection was closed is taken for dead if it does not come back within its
        grace, and lives.
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
        self.job.place.pause(span)

    def _trouble_all(self, span: float) -> None:
        self._place_troubled = max(self._place_troubled, self.sim.now + span)
        for host in self.job.hosts:
            host.trouble(self._place_troubled)

    def _jump_wall_clock(self, host: Host) -> None:
        host.wall += self.sim.random.choice([-3600.0, -5.0, 5.0, 3600.0])

    def _restart_place(self, _host: Host) -> None:
        state = self.job.place.state
        if state is None or not state.closed:  # a job that is over is not begun anew
            self._trouble_all(2.0)
            self.job.place.restart()
