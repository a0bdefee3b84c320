"""The simulated agents of all hosts: they start other processes in the place of ended ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.inprocess.group import group_messages as messages
from simulator.restarts.rank import Rank
from simulator.restarts.server import Client

if TYPE_CHECKING:
    from simulator.restarts.run import Job

MOST = 5
"""Most processes in the place of one rank after its first one."""


class Agent:
    """Decides what follows when a process has ended, or is taken for ended."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self._client = Client(job.server, job.profile.delay)

    def on_end(self, ended: Rank) -> None:
        """Start another process, report that none follows, or do nothing."""
        wait = self.job.profile.replacement
        if not wait or ended.followed or not ended.others_go_on:
            return
        ended.followed = True
        chance = self.sim.random
        kind = chance.choice(["start"] * 8 + ["report", "nothing"])
        if ended.incarnation >= MOST and kind == "start":
            kind = "report"
        source, after = self._source(wait)
        self.job.note(f"the agent of {ended.process}: {kind} in {after:.4f} s, {source}")
        if kind == "start":
            self.sim.after(after, lambda: self._start(ended))
        elif kind == "report":
            self.sim.after(after, lambda: self._report(ended))

    def _source(self, wait: float) -> tuple[str, float]:
        """Return where the next process comes from, and the seconds until it begins to join.

        A standby or a template may be killed when it is asked; then the start is cold.
        """
        chance = self.sim.random
        cold = chance.uniform(0.0, 1.5 * wait)
        source, after = chance.choice(
            [
                ("standby", 0.01 * chance.random()),
                ("template", 0.6 * chance.random()),
                ("cold", 0.0),
            ]
        )
        if source == "cold":
            return source, cold
        if chance.random() < 0.2:
            return f"cold, because the {source} is killed", after + cold
        return source, after

    def _start(self, ended: Rank) -> None:
        process = Rank(self.job, ended.rank, ended.incarnation + 1)
        self.job.add(process)
        process.program.spawn(process.main())
        chance = self.sim.random
        if not process.is_calm() and chance.random() < 0.2:
            self.sim.after(chance.choice([0.5, 5.0]) * chance.random(), process.die)

    def _report(self, ended: Rank) -> None:
        self.job.note(f"no process follows {ended.process}")
        self._client.ask(messages.encode(messages.NotReplaced(ended.rank)), lambda body: None)
