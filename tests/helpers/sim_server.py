"""The rounds run by a simulated store server, which runs the real service; the nodes' real drivers.

What is simulated is the store between the two: its server without the service, and its clients
(`sim_client`). The server may be paused, and it may be killed: then nobody listens for a while, or
at once another one, which knows nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from sim_agent import Agent
from sim_client import Client, Link
from sim_host import Job

from regrow.rendezvous import _service
from regrow.rendezvous._by_server import ServerDriver
from regrow.rendezvous._driver import Driver
from regrow.rendezvous._line import GRACE, SPARE_ROUND_TRIPS, Where
from regrow.rendezvous._round import Round
from regrow.store import Answer

REACHED_WITHIN = 60.0
"""Seconds in which an agent has to reach the server at its start."""


class SimServer:
    """The server's process."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.grace = GRACE + SPARE_ROUND_TRIPS * 2 * job.profile.delay
        """Seconds in which a client may come back to its session."""
        self.paused_until = 0.0
        self.down_until = 0.0
        """Until when nobody listens."""
        self.links: dict[Link, None] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._due_at: float | None = None
        self._sessions = 0
        self._begin()

    def _begin(self) -> None:
        self.service = _service.RendezvousService(self._new_life)
        self.sessions: dict[int, Link] = {}

    def _new_life(self) -> str:
        self.job.history.forgotten()
        return f"life{self.job.history.epoch}"

    @property
    def state(self) -> Round | None:
        """The rounds as they are now."""
        job = self.service._jobs.get("job")
        return None if job is None else job.state

    def connect(self, agent: Agent) -> Driver:
        """See `Place`."""
        return ServerDriver(
            Where("server:1", b""),
            self.job.profile.settings,
            REACHED_WITHIN,
            clock=lambda: agent.host.clock,
            threads=agent.threading,
            connect=lambda endpoint, **how: cast("Any", Client(self, agent, **how)),
        )

    def epoch(self, driver: Driver) -> int:
        """See `Place`."""
        assert isinstance(driver, ServerDriver)
        return int(driver._life.removeprefix("life") or 0)

    def restart(self) -> None:
        """Lose the state and all connections."""
        self._begin()
        self._inbox.clear()
        if self.sim.random.random() < 0.5:
            self.down_until = self.sim.now + self.sim.random.uniform(0.1, 2.0)
        for link in [*self.links]:
            link.break_()

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """See `Place`; something in between does it, or the kernel of an agent that has ended."""
        for link in [*self.links]:
            if link.agent is agent:
                link.break_(closed=closed or not agent.alive)

    def pause(self, seconds: float) -> None:
        """The server's process stands still."""
        self.paused_until = max(self.paused_until, self.sim.now + seconds)

    # --- what arrives; it waits while the server is paused, and keeps its order

    def take(self, do: Callable[[], None]) -> None:
        """Let something be done once the server runs."""
        self._inbox.append(do)
        self._drain()

    def _drain(self) -> None:
        if self.sim.now < self.paused_until:
            self.sim.after(self.paused_until - self.sim.now, self._drain)
            return
        while self._inbox:
            self._inbox.popleft()()
        # Only after everything that has arrived was read.
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
        # In an order that does not hang on that of a set of names, which no seed decides.
        for answer in sorted(answers, key=lambda answer: cast("int", answer.session)):
            link = self.sessions.get(cast("int", answer.session))
            if link is not None:
                link.send_in(lambda to, answer=answer: to.answered(answer.id, answer.body))  # type: ignore[misc]

    def greeted(self, link: Link, session: int) -> None:
        """A client begins a session, 0, or wants to go on with one."""
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
        """A client asks the service."""
        if self.sessions.get(link.session) is link:
            self._send(self.service.asked(link.session, id, body, self._clock))

    def cancelled(self, link: Link, id: int) -> None:
        """A client does not wait for an answer any more."""
        if self.sessions.get(link.session) is link:
            self.service.cancelled(link.session, id)

    def broken(self, link: Link) -> None:
        """A connection is gone."""
        if self.sessions.get(link.session) is link:
            self._send(self.service.suspended(link.session, self._clock))
            self.sim.after(self.grace, lambda: self.take(lambda: self._ended(link)))

    def _ended(self, link: Link) -> None:
        client = self.service._clients.get(link.session)
        if client is not None and link.closed and self.sessions.get(link.session) is link:
            for _, id in client.lives:
                self.job.history.taken_for_dead(id, link.broken_at)
        self._end(link, "its connection was closed", link.closed)

    def left(self, link: Link) -> None:
        """A client ends its session."""
        self._end(link, "it said goodbye", True)
        link.break_()

    def _end(self, link: Link, why: str, closed: bool) -> None:
        if self.sessions.get(link.session) is link:
            del self.sessions[link.session]
            self._send(self.service.ended(link.session, why, closed, self._clock))
