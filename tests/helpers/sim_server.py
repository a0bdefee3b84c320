"""The rounds run by a simulated store server, which runs the real service.

A session is a connection that is made again when it breaks. Within one connection messages keep
their order, whatever their delays, as TCP keeps it; when a line is cut they wait and arrive after
it is mended; when a connection breaks, what was under way is lost, in both directions, and the
client asks anew what was not answered. So a question may be heard twice, and late.

The server may be paused, and it may be killed: then another one begins, which knows nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from sim_agent import Agent, JobLost, Unreachable
from sim_host import Job
from sim_kernel import Resume, Thread

from regrow.rendezvous import _questions as questions
from regrow.rendezvous import _service
from regrow.rendezvous._driver import View
from regrow.rendezvous._news import Event, Join, subject
from regrow.rendezvous._round import Round
from regrow.store import Answer

NOTHING = View(0, None, 0, None)
GRACE = 0.5
"""Seconds in which a client may come back to its session."""


class SimServer:
    """The server's process."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.paused_until = 0.0
        self.lines: list[Line] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._due_at: float | None = None
        self._begin()
        job.connect = self.connect

    def _begin(self) -> None:
        self.life = f"life{self.job.history.epoch}"
        self.service = _service.RendezvousService(lambda: self.life)
        self.sessions: dict[object, Line] = {}

    @property
    def state(self) -> Round | None:
        """The rounds as they are now."""
        job = self.service._jobs.get("job")
        return None if job is None else job.state

    def connect(self, agent: Agent) -> Line:
        line = Line(self, agent)
        self.lines.append(line)
        return line

    def restart(self) -> None:
        """Lose the state and all connections."""
        self.job.history.forgotten()
        self._begin()
        for line in self.lines:
            if line.agent.alive:
                line.break_(by_server=True)

    def reset(self, agent: Agent) -> None:
        """Something in between resets an agent's connection."""
        for line in self.lines:
            if line.agent is agent:
                line.break_()

    def pause(self, seconds: float) -> None:
        """The server's process stands still."""
        self.paused_until = max(self.paused_until, self.sim.now + seconds)

    def settings(self) -> questions.Settings:
        profile, bounds = self.job.profile, self.job.profile.bounds
        return questions.Settings(
            profile.low,
            profile.high,
            bounds.keep_alive,
            bounds.misses,
            bounds.last_call,
            bounds.grace,
        )

    # --- what arrives; it waits while the server is paused, and keeps its order

    def take(self, do: Callable[[], None]) -> None:
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
            self.send(self.service.due(self._clock))
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

    def send(self, answers: Iterable[Answer]) -> None:
        # In an order that does not hang on that of a set of names, which no seed decides.
        waiting = [(self.sessions[a.session], a) for a in answers if a.session in self.sessions]
        for line, answer in sorted(waiting, key=lambda pair: pair[0].number):
            line.answer(answer)

    def asked(self, session: object, id: int, body: bytes) -> None:
        self.send(self.service.asked(session, id, body, self._clock))

    def cancelled(self, session: object, id: int) -> None:
        self.service.cancelled(session, id)

    def suspended(self, session: object) -> None:
        if session in self.sessions:
            self.send(self.service.suspended(session, self._clock))

    def resumed(self, session: object) -> None:
        self.send(self.service.resumed(session, self._clock))

    def ended(self, session: object, why: str, closed: bool) -> None:
        if self.sessions.pop(session, None) is not None:
            self.send(self.service.ended(session, why, closed, self._clock))


class Line:
    """One agent's session with the server; a `SimDriver`."""

    def __init__(self, server: SimServer, agent: Agent) -> None:
        self.server, self.agent, self.sim = server, agent, server.sim
        self.number = len(server.lines)
        self.connection = 0
        """Counts the connections; what was under way on an older one is lost."""
        self.connected = False
        self._life = ""
        self._asked = 0
        self._beats = 0
        self._pending: dict[int, tuple[bytes, Resume]] = {}
        self._under_way: dict[str, deque[Callable[[], None]]] = {}
        self._heard: tuple[str, View] = ("", NOTHING)
        self.session: object = None
        self._open()

    # --- SimDriver

    def submit(self, event: Event, timeout: float) -> Thread:
        id = subject(event)
        body = questions.submit("job", self.server.settings(), event)
        said = yield from self._ask(body, timeout)
        return self._view(id, said, isinstance(event, Join))

    def follow(self, id: str, seen: View | None) -> Thread:
        follow = questions.Follow("job", self.server.settings(), id, questions.mark(seen))
        try:
            said = yield from self._ask(questions.encode(follow), 60.0)
        except Unreachable:
            return None
        return self._view(id, said, False)

    def beat(self, id: str, token: int, timeout: float) -> Thread:
        body = questions.encode(questions.Beat("job", id, token, self._beats))
        said = yield from self._ask(body, timeout)
        assert isinstance(said, questions.Beaten), said
        self._beats += 1
        self._check_life(said.life)
        return said.holds

    def peek(self, id: str) -> View:
        of, view = self._heard
        return view if of == id else NOTHING

    def end(self) -> None:
        """The agent is gone, and its kernel closes the connection."""
        self._pending.clear()
        self.break_(by_server=False)

    def _view(self, id: str, said: questions.Answer, joins: bool) -> View:
        assert isinstance(said, questions.Told), said
        self._check_life(said.life)
        view = questions.read_view(said)
        if joins and view.news is not None:
            self._life = said.life
        self._heard = id, view
        return view

    def _check_life(self, life: str) -> None:
        if self._life and life != self._life:
            raise JobLost

    def _ask(self, body: bytes, timeout: float) -> Thread:
        self._asked += 1
        id = self._asked

        def waits(resume: Resume) -> None:
            self._pending[id] = body, resume
            if self.connected:
                self._question(id, body)
            self.agent.machine.after(timeout, expired)

        def expired() -> None:
            if id in self._pending:
                resume = self._pending.pop(id)[1]
                session = self.session
                if self.connected:
                    self._transmit("out", lambda: self.server.cancelled(session, id))
                resume(Unreachable())

        said = yield waits
        return said

    @property
    def epoch(self) -> int:
        return int(self._life.removeprefix("life") or 0)

    # --- the connection

    def _open(self) -> None:
        self.connected = True
        self._under_way = {"out": deque(), "in": deque()}
        session = self.session
        if session is None:
            session = self.session = object()
            self.server.sessions[session] = self
        else:
            self._transmit("out", lambda: self.server.resumed(session))
        for id, (body, _) in list(self._pending.items()):
            self._question(id, body)

    def _question(self, id: int, body: bytes) -> None:
        session = self.session
        self._transmit("out", lambda: self.server.asked(session, id, body))

    def answer(self, answer: Answer) -> None:
        """The server answers."""
        if self.connected:
            self._transmit("in", lambda: self._answered(answer.id, answer.body))

    def _answered(self, id: int, body: bytes) -> None:
        if id in self._pending:
            resume = self._pending.pop(id)[1]
            resume(questions.decode_answer(body))

    def _transmit(self, direction: str, do: Callable[[], None]) -> None:
        """Let a message arrive after those that were sent before it."""
        line = self._under_way[direction]
        line.append(do)
        if len(line) == 1:
            connection = self.connection
            self.sim.after(self.server.job.delay(), lambda: self._arrive(direction, connection))

    def _arrive(self, direction: str, connection: int) -> None:
        if connection != self.connection:
            return
        machine = self.agent.host
        until = machine.cut_until[direction]
        if machine.off:  # nobody is there to take or repeat it
            return
        if self.sim.now < until:
            again = until - self.sim.now + self.sim.random.uniform(0, 0.5)
            self.sim.after(again, lambda: self._arrive(direction, connection))
            return
        line = self._under_way[direction]
        do = line.popleft()
        if direction == "out":
            self.server.take(do)
        else:
            do()
        if line and connection == self.connection:
            gap = self.server.job.delay() * 0.1
            self.sim.after(gap, lambda: self._arrive(direction, connection))

    def break_(self, *, by_server: bool = False) -> None:
        """The connection breaks, and both ends notice; the client makes another if it lives."""
        if not self.connected:
            return
        self.connected = False
        self.connection += 1
        session, connection = self.session, self.connection
        if by_server:
            self.session = None
        else:
            self.server.take(lambda: self.server.suspended(session))
            self.sim.after(GRACE, lambda: self._grace_over(session, connection))
        if self.agent.alive:
            soon = self.sim.random.uniform(0.01, 0.3)
            self.sim.after(soon, lambda: self._reconnect(connection))

    def _reconnect(self, connection: int) -> None:
        machine = self.agent.machine
        until = max(*machine.cut_until.values(), self.agent.paused_until, machine.frozen_until)
        if self.sim.now < until:
            self.sim.after(until - self.sim.now + 0.05, lambda: self._reconnect(connection))
        elif self.agent.alive:
            if self.session not in self.server.sessions:
                self.session = None
            self._open()

    def _grace_over(self, session: object, connection: int) -> None:
        if self.connection == connection and not self.connected:
            why, closed = "its connection was closed", not self.agent.alive
            self.server.take(lambda: self.server.ended(session, why, closed))
