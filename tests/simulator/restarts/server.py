"""The real service of in-process restart with simulated sessions, and clients that lose them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import Group
from regrow.inprocess.group.group_messages import Fault, NotReplaced
from regrow.inprocess.group.group_rules import Event
from regrow.store import Answer
from simulator.kernel import Simulation
from simulator.restarts.bugs import Bug
from simulator.restarts.observer import Observer, Violation

GRACE = 0.5
"""Seconds for which a session lasts without a connection."""


class Server:
    """The service, with its clock."""

    def __init__(self, sim: Simulation, bug: Bug, observer: Observer) -> None:
        self.sim, self.observer = sim, observer
        self._rules = bug.step
        self.service = bug.service(self._step, bug.reply)
        self.clients: dict[Hashable, Client] = {}
        self.records: dict[tuple[int, int], tuple[Fault, ...]] = {}
        """All recorded faults, by group and iteration."""
        self._alarm: float | None = None

    def received(self, session: Hashable, id: int, body: bytes) -> None:
        """Handle a request of a client.

        If it is from a process that another one has replaced, check that it changes nothing.
        """
        observer, asked = self.observer, messages.decode_question(body)
        old = not isinstance(asked, NotReplaced) and observer.is_old(asked.rank, asked.process)
        before = observer.group, observer.state
        answers = self.service.asked(session, id, body, self.sim.now)
        if old:
            replies = [messages.decode_reply(answer.body) for answer in answers]
            refused = [isinstance(reply, messages.GroupRefusal) for reply in replies] == [True]
            if not refused or before[0] != observer.group or before[1] is not observer.state:
                raise Violation(f"{asked} of an old process had an effect: {replies}")
        self.send(answers)

    def send(self, answers: list[Answer]) -> None:
        """Send the replies of the service, and call it at its next deadline."""
        for answer in answers:
            client = self.clients.get(answer.session)
            if client is not None and client.session is answer.session:
                body = client.bodies.get(answer.id)
                asked = None if body is None else messages.decode_question(body)
                if isinstance(asked, messages.Join):
                    self.observer.answers_join(asked, messages.decode_reply(answer.body))
                client.answered(answer)
        at = self.service.deadline
        if at is not None and at != self._alarm:
            self._alarm = at
            self.sim.after(max(at - self.sim.now, 0.0), lambda: self._due(at))

    def _step(self, group: Group, event: Event, now: float) -> Group:
        """Apply the rules, and record the state for the checks."""
        before, group, observer = group, self._rules(group, event, now), self.observer
        lost_at = observer.last_loss
        observer.stepped(before, event, group, now)
        if observer.last_loss not in (lost_at, float("-inf")):
            wait = group.timeouts.replacement + 0.001
            self.sim.after(wait, lambda: observer.check_wait(self.sim.now))
        self.records[observer.group, group.iteration] = group.faults
        if group.before is not None:
            self.records[observer.group, group.iteration - 1] = group.before.faults.records
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
        self.bodies: dict[int, bytes] = {}
        """All requests, by number."""
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
        self.bodies[self._number] = body
        if self.connected:
            self._send(self._number, body)

    def _send(self, number: int, body: bytes) -> None:
        session = self.session
        self._travel("up", lambda: self.server.received(session, number, body))

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
