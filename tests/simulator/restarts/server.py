"""The real service of in-process restart with simulated sessions, and clients that lose them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from regrow.inprocess.group.group import End, Group, Phase
from regrow.inprocess.group.group_messages import Fault
from regrow.inprocess.group.group_rules import Event
from regrow.store import Answer
from simulator.kernel import Simulation
from simulator.restarts.bugs import Bug

GRACE = 0.5
"""Seconds for which a session lasts without a connection."""


class Violation(Exception):
    """A promise was broken."""


class Server:
    """The service, with its clock."""

    def __init__(self, sim: Simulation, bug: Bug) -> None:
        self.sim = sim
        self._rules = bug.step
        self.service = bug.service(self._step, bug.reply)
        self.clients: dict[Hashable, Client] = {}
        self.records: dict[int, tuple[Fault, ...]] = {}
        """All recorded faults, by iteration."""
        self.joined = 0
        """The ranks that have joined, as a bit mask, at the last check before all had joined."""
        self.ends: tuple[End, ...] = ()
        """The ends of ranks, with their reasons."""
        self.over: int | None = None
        """The iteration in which the call was over; None if it is not."""
        self._alarm: float | None = None

    def send(self, answers: list[Answer]) -> None:
        """Send the replies of the service, and call it at its next deadline."""
        for answer in answers:
            client = self.clients.get(answer.session)
            if client is not None and client.session is answer.session:
                client.answered(answer)
        at = self.service.deadline
        if at is not None and at != self._alarm:
            self._alarm = at
            self.sim.after(max(at - self.sim.now, 0.0), lambda: self._due(at))

    def _step(self, group: Group, event: Event, now: float) -> Group:
        """Apply the rules, and record the state for the checks."""
        group = self._rules(group, event, now)
        if group.phase is Phase.JOINING:
            self.joined = group.here
        self.records[group.iteration] = group.faults
        if group.before is not None:
            self.records[group.iteration - 1] = group.before.faults.records
        self.ends = group.ends
        if group.phase is Phase.OVER:
            self.over = group.iteration
        return group

    def _due(self, at: float) -> None:
        if self._alarm == at:
            self._alarm = None
        if self.service.deadline is not None and self.service.deadline <= self.sim.now:
            self.send(self.service.due(self.sim.now))
        else:
            self.send([])


class Client:
    """A session of one process, and its connection."""

    def __init__(self, server: Server, delay: float) -> None:
        self.server, self.sim, self.delay = server, server.sim, delay
        self.repeated = 0
        """Number of requests that were sent again."""
        self.unknown = False
        """Whether it began another session without a request to repeat.

        The server then cannot know which rank the session belongs to.
        """
        self.alive = True
        """Whether the process is alive."""
        self._asked: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}
        self._number = 0
        self._cable = 0
        """Number of the current connection; messages under way on another one are lost."""
        self.connected = True
        self._waits_for: dict[object, int] = {}
        """Suspended sessions, and the connection that each session lost."""
        self._last = {"up": 0.0, "down": 0.0}
        self._begin()

    def _begin(self) -> None:
        self.session = object()
        self.server.clients[self.session] = self

    def ask(self, body: bytes, on_reply: Callable[[bytes], None]) -> None:
        self._number += 1
        self._asked[self._number] = body, on_reply
        if self.connected:
            self._send(self._number, body)

    def _send(self, number: int, body: bytes) -> None:
        session, service = self.session, self.server.service

        def arrive() -> None:
            self.server.send(service.asked(session, number, body, self.sim.now))

        self._travel("up", arrive)

    def answered(self, answer: Answer) -> None:
        def arrive() -> None:
            asked = self._asked.pop(answer.id, None)
            if asked is not None and self.alive:
                asked[1](answer.body)

        self._travel("down", arrive)

    def _travel(self, way: str, arrive: Callable[[], None]) -> None:
        cable = self._cable
        at = max(self._last[way], self.sim.now + self.sim.random.uniform(0.1, 1.0) * self.delay)
        self._last[way] = at

        def come() -> None:
            if cable == self._cable:
                arrive()

        self.sim.after(at - self.sim.now, come)

    def cut(
        self, noticed: float, back: float | None, closed: bool = False, fresh: bool = False
    ) -> None:
        """Lose the connection.

        Args:
            noticed: seconds after which the server notices.
            back: seconds after which the client reconnects; None: never.
            closed: the client's side has closed the connection.
            fresh: on its return, the client has dropped the session, and begins another one.
        """
        if not self.connected:
            return
        self.connected = False
        self._cable += 1
        session, cable = self.session, self._cable

        def suspended() -> None:
            if session in self.server.clients:
                self._waits_for[session] = cable
                service = self.server.service
                self.server.send(service.suspended(session, self.sim.now))
                self.sim.after(GRACE, lambda: self._over(session, closed, cable))

        self.sim.after(noticed, suspended)
        if back is not None:
            back = back if fresh else max(back, noticed + 1e-6)
            self.sim.after(back, lambda: self._back(fresh))

    def _over(self, session: object, closed: bool, cable: int) -> None:
        if self._waits_for.get(session) != cable or session not in self.server.clients:
            return
        del self.server.clients[session]
        service, why = self.server.service, "its connection broke"
        self.server.send(service.ended(session, why, closed, self.sim.now))

    def _back(self, fresh: bool) -> None:
        if not self.alive:
            return
        self.connected = True
        if self.session in self.server.clients and not fresh:
            self._waits_for.pop(self.session, None)
            service = self.server.service
            self.server.send(service.resumed(self.session, self.sim.now))
        else:
            self._begin()
            self.unknown = self.unknown or not self._asked
        for number, (body, _) in self._asked.items():
            self.repeated += 1
            self._send(number, body)

    def close(self) -> None:
        """End the session with a goodbye message."""
        session = self.session

        def bye() -> None:
            if self.server.clients.pop(session, None) is not None:
                service, why = self.server.service, "it closed its connection"
                self.server.send(service.ended(session, why, True, self.sim.now))

        if self.connected:
            self._travel("up", bye)
        self.alive = False
