"""Rounds run by a simulated store server with the real service, and the nodes' real drivers.

The simulated part is the store between the two: its server without the service, and its clients
(`client.py`). The server may be paused or killed. After a kill, no server listens for a while, or
another server starts at once. The next server knows nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from helpers.rendezvous.kept_records import Records
from regrow.rendezvous.node.driver import Driver
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.server import round_service
from regrow.rendezvous.server.server_driver import ServerDriver, Where
from regrow.store import Answer
from simulator.agent import Agent
from simulator.client import Client, Link
from simulator.host import Host, Job
from simulator.kernel import Machine

REACHED_WITHIN = 60.0
"""Seconds in which an agent must reach the server when the agent starts."""


class SimServer:
    """The server's process."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.dead = False
        """Whether the process has ended."""
        self.paused_until = 0.0
        self.down_until = 0.0
        """The virtual time until which no server listens."""
        self.links: dict[Link, None] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._due_at: float | None = None
        self._sessions = 0
        self._begin()

    def _begin(self) -> None:
        self.journal = Records()
        self._serve()

    def _serve(self) -> None:
        self.service = round_service.RendezvousService(self._new_life)
        with self.job.history.replayed():
            self.service.remember(cast("Any", self.journal), self._clock, self.job.history.note)
        self.sessions: dict[int, Link] = {}

    def _new_life(self) -> str:
        self.job.history.forgotten()
        return f"life{self.job.history.epoch}"

    @property
    def silent(self) -> bool:
        """Whether nothing on its host answers, not even the kernel."""
        return False

    @property
    def state(self) -> Round | None:
        """The current state of the rounds."""
        job = self.service.jobs.get("job")
        return None if job is None else job.state

    def connect(self, agent: Agent) -> Driver:
        """See `Place`."""
        return ServerDriver(
            Where("server:1", b""),
            self.job.profile.settings,
            REACHED_WITHIN,
            clock=lambda: agent.host.clock,
            threads=agent.threading,
            connect=lambda endpoint, **how: cast(
                "Any", Client(self._listening, agent, endpoint, **how)
            ),
        )

    def _listening(self) -> SimServer | None:
        return None if self.sim.now < self.down_until else self

    def cut_until(self, machine: Machine, direction: str) -> float:
        """Return until when the server's own line to a machine is cut; this one has none."""
        return 0.0

    def epoch(self, driver: Driver) -> int:
        """See `Place`."""
        assert isinstance(driver, ServerDriver)
        return int(driver.life.removeprefix("life") or 0)

    def restart(self) -> None:
        """Lose the state and all connections."""
        self._begin()
        self._inbox.clear()
        if self.sim.random.random() < 0.5:
            self.down_until = self.sim.now + self.sim.random.uniform(0.1, 2.0)
        for link in [*self.links]:
            link.break_()

    def crash(self) -> None:
        """Kill the process; its agent starts another one, and the nodes wait for it."""
        state = self.state
        self._serve()
        if state is not None:
            self.job.history.recovered(state, self.state)
        self._inbox.clear()
        self.paused_until = max(self.paused_until, self.sim.now + self.sim.random.uniform(0.1, 2.0))
        for link in [*self.links]:
            link.break_()

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """See `Place`; the network breaks it, or the kernel of an agent that has ended."""
        for link in [*self.links]:
            if link.agent is agent:
                link.break_(closed=closed or not agent.alive)

    def vanished(self, host: Host) -> None:
        """See `Place`; the server is on no host of the job."""

    def pause(self, seconds: float) -> None:
        """Stop the server's process for a while."""
        self.paused_until = max(self.paused_until, self.sim.now + seconds)

    # --- arriving messages; they wait while the server is paused, and keep their order

    def take(self, do: Callable[[], None]) -> None:
        """Call `do` as soon as the server runs."""
        self._inbox.append(do)
        self._drain()

    def _drain(self) -> None:
        if self.sim.now < self.paused_until:
            self.sim.after(self.paused_until - self.sim.now, self._drain)
            return
        while self._inbox:
            self._inbox.popleft()()
        # Only after all messages that have arrived are read.
        deadline = self.service.deadline
        if deadline is not None and deadline <= self._clock:
            self._send(self.service.due(self._clock))
            deadline = self.service.deadline
        if deadline is not None and (self._due_at is None or deadline < self._due_at):
            self._due_at = deadline
            self.sim.after(max(deadline - self._clock, 0.0), lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        if self._due_at == deadline:
            self._due_at = None
        self._drain()

    @property
    def _clock(self) -> float:
        return self.sim.now + 1234.5

    def _send(self, answers: Iterable[Answer]) -> None:
        # Sorted, because the order of a set of names is not determined by the seed.
        for answer in sorted(answers, key=lambda answer: cast("int", answer.session)):
            link = self.sessions.get(cast("int", answer.session))
            if link is not None:
                link.send_in(lambda to, answer=answer: to.answered(answer.id, answer.body))  # type: ignore[misc]

    def greeted(self, link: Link, session: int) -> None:
        """Handle a client that begins a session (0), or resumes one."""
        if not session:
            self._sessions += 1
            session = self._sessions
        elif session in self.sessions:
            self._send(self.service.resumed(session, self._clock))
        else:
            link.send_in(lambda to: to.welcomed(-1))
            return
        self.sessions[session], link.session = link, session
        link.send_in(lambda to: to.welcomed(session))

    def asked(self, link: Link, id: int, body: bytes) -> None:
        """Handle a client's request to the service."""
        if self.sessions.get(link.session) is link:
            self._send(self.service.asked(link.session, id, body, self._clock))

    def cancelled(self, link: Link, id: int) -> None:
        """Handle a client's cancellation of a request."""
        if self.sessions.get(link.session) is link:
            self.service.cancelled(link.session, id)

    def broken(self, link: Link) -> None:
        """Handle the loss of a connection."""
        if self.sessions.get(link.session) is link:
            self._send(self.service.suspended(link.session, self._clock))
            self.sim.after(link.client.grace, lambda: self.take(lambda: self._ended(link)))

    def _ended(self, link: Link) -> None:
        if link.closed and self.sessions.get(link.session) is link:
            for job in self.service.jobs.values():
                for id in [id for id, session in job.lives.items() if session == link.session]:
                    self.job.history.taken_for_dead(id, link.broken_at)
        self._end(link, "its connection was closed", link.closed)

    def left(self, link: Link) -> None:
        """Handle a client that ends its session."""
        self._end(link, "its client ended the session", True)
        link.break_()

    def _end(self, link: Link, why: str, closed: bool) -> None:
        if self.sessions.get(link.session) is link:
            del self.sessions[link.session]
            self._send(self.service.ended(link.session, why, closed, self._clock))
