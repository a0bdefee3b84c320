"""The service of the store server with simulated sessions, and clients whose connections break."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sim_kernel import Simulation

from regrow.inprocess._group import End, Group, Phase
from regrow.inprocess._link import Fault
from regrow.inprocess._service import InprocessService
from regrow.store import Answer

GRACE = 0.5
"""Seconds of a session without a connection."""


class Violation(Exception):
    """A promise was broken."""


class Server:
    """The service, with its clock."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.service = InprocessService()
        self.clients: dict[Hashable, Client] = {}
        self.records: dict[int, tuple[Fault, ...]] = {}
        """Everything that was recorded, by iteration."""
        self.joined = 0
        """The ranks that have joined, while others had not."""
        self.ends: tuple[End, ...] = ()
        """How ranks ended."""
        self.over: int | None = None
        """In which iteration the call was over, if it was."""
        self._alarm: float | None = None

    def tell(self, call: Callable[[], list[Answer]]) -> None:
        """Have something told to the service, and its answers sent."""
        self.send(call())

    def send(self, answers: list[Answer]) -> None:
        entry = self.service._groups.get("job")
        if entry is not None:
            self._look(entry.state)
        for answer in answers:
            client = self.clients.get(answer.session)
            if client is not None and client.session is answer.session:
                client.answered(answer)
        at = self.service.deadline
        if at is not None and at != self._alarm:
            self._alarm = at
            self.sim.after(max(at - self.sim.now, 0.0), lambda: self._due(at))

    def _look(self, group: Group) -> None:
        if group.phase is Phase.JOINING:
            self.joined = group.here
        self.records[group.iteration] = group.faults
        if group.before is not None:
            self.records[group.iteration - 1] = group.before.faults.records
        self.ends = group.ends
        if group.phase is Phase.OVER:
            self.over = group.iteration

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
        """Questions that were put again."""
        self.unheard = False
        """Whether it began another session and had no question to put over it, so that the server
        cannot know whose it is."""
        self.alive = True
        """Whether the process is."""
        self._asked: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}
        self._number = 0
        self._cable = 0
        """Which connection it is; what is under way on another is lost."""
        self._connected = True
        self._waits_for: dict[object, int] = {}
        """Suspended sessions, and by the loss of which connection."""
        self._last = {"up": 0.0, "down": 0.0}
        self._begin()

    def _begin(self) -> None:
        self.session = object()
        self.server.clients[self.session] = self

    def ask(self, body: bytes, told: Callable[[bytes], None]) -> None:
        self._number += 1
        self._asked[self._number] = body, told
        if self._connected:
            self._send(self._number, body)

    def _send(self, number: int, body: bytes) -> None:
        session, service = self.session, self.server.service

        def arrive() -> None:
            self.server.tell(lambda: service.asked(session, number, body, self.sim.now))

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
            noticed: seconds after which the server does.
            back: seconds after which the client reaches the server again, if ever.
            closed: the client's side has closed it.
            fresh: the client has given the session up when it comes back, and begins another.
        """
        if not self._connected:
            return
        self._connected = False
        self._cable += 1
        session, cable = self.session, self._cable

        def suspended() -> None:
            if session in self.server.clients:
                self._waits_for[session] = cable
                service = self.server.service
                self.server.tell(lambda: service.suspended(session, self.sim.now))
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
        self.server.tell(lambda: service.ended(session, why, closed, self.sim.now))

    def _back(self, fresh: bool) -> None:
        if not self.alive:
            return
        self._connected = True
        if self.session in self.server.clients and not fresh:
            self._waits_for.pop(self.session, None)
            service = self.server.service
            self.server.tell(lambda: service.resumed(self.session, self.sim.now))
        else:
            self._begin()
            self.unheard = self.unheard or not self._asked
        for number, (body, _) in self._asked.items():
            self.repeated += 1
            self._send(number, body)

    def close(self) -> None:
        """Say goodbye."""
        session = self.session

        def bye() -> None:
            if self.server.clients.pop(session, None) is not None:
                service, why = self.server.service, "it closed its connection"
                self.server.tell(lambda: service.ended(session, why, True, self.sim.now))

        if self._connected:
            self._travel("up", bye)
        self.alive = False
