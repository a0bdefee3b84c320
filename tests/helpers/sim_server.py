"""The rounds run by a simulated store server, which runs the real service; the nodes' real drivers.

What is simulated is the store between the two: its server without the service, its clients, and
connections. Within one connection messages keep their order, whatever their delays, as TCP keeps
it; when a line is cut they wait and arrive after it is mended; when a connection breaks, what was
under way is lost, in both directions. A client makes another connection, within its grace, and asks
anew what was not answered. So a question may be heard twice, and late. A client whose grace is
over, or whose server does not know it, has lost its session, and says so to whoever waits.

The server may be paused, and it may be killed: then nobody listens for a while, or at once another
one, which knows nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from sim_agent import Agent
from sim_host import Job
from sim_kernel import Resume, Thread

from regrow.rendezvous import _service
from regrow.rendezvous._by_server import ServerDriver
from regrow.rendezvous._driver import Driver
from regrow.rendezvous._line import GRACE, SPARE_ROUND_TRIPS, Where
from regrow.rendezvous._round import Round
from regrow.store import (
    Answer,
    ConnectionState,
    StoreClosedError,
    StoreConnectionError,
    StoreSessionLost,
    StoreTimeout,
)

REACHED_WITHIN = 60.0
"""Seconds in which an agent has to reach the server at its start."""
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two tries to connect anew."""


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

    def reset(self, agent: Agent) -> None:
        """See `Place`; something in between resets it, or the kernel of an agent that has ended."""
        for link in [*self.links]:
            if link.agent is agent:
                link.break_()

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
        self._end(link, "its connection was closed", not link.agent.alive)

    def left(self, link: Link) -> None:
        """A client ends its session."""
        self._end(link, "it said goodbye", True)
        link.break_()

    def _end(self, link: Link, why: str, closed: bool) -> None:
        if self.sessions.get(link.session) is link:
            del self.sessions[link.session]
            self._send(self.service.ended(link.session, why, closed, self._clock))


class Link:
    """One connection between a client and the server; what is under way on it is in order."""

    def __init__(self, server: SimServer, client: Client) -> None:
        self.server, self.client, self.agent, self.sim = server, client, client.agent, server.sim
        self.session = 0
        """Whose connection it is, as the server knows."""
        self.open = True
        self._under_way: dict[str, deque[Callable[[], None]]] = {"out": deque(), "in": deque()}
        server.links[self] = None

    def send_out(self, do: Callable[[], None]) -> None:
        """Let the server do something once this has arrived."""
        self._transmit("out", lambda: self.server.take(do))

    def send_in(self, do: Callable[[Client], None]) -> None:
        """Let the client do something."""
        self._transmit("in", lambda: do(self.client))

    def _transmit(self, direction: str, do: Callable[[], None]) -> None:
        line = self._under_way[direction]
        line.append(do)
        if len(line) == 1:
            self.sim.after(self.server.job.delay(), lambda: self._arrive(direction))

    def _arrive(self, direction: str) -> None:
        machine = self.agent.host
        if not self.open or machine.off:  # nobody is there to take or repeat it
            return
        until = machine.cut_until[direction]
        if self.sim.now < until:
            again = until - self.sim.now + self.sim.random.uniform(0, 0.5)
            self.sim.after(again, lambda: self._arrive(direction))
            return
        line = self._under_way[direction]
        line.popleft()()
        if line and self.open:
            gap = self.server.job.delay() * 0.1
            self.sim.after(gap, lambda: self._arrive(direction))

    def break_(self) -> None:
        """It is gone, and both ends notice; a server that is another one by now knows nothing."""
        if self.open:
            self.open = False
            del self.server.links[self]
            self.server.take(lambda: self.server.broken(self))
            self.agent.when_awake(self.agent.notify)


class Client:
    """An agent's session with the server: what of `regrow.store.StoreClient` a driver uses.

    Its constructor is `regrow.store.connect`; it blocks.
    """

    server = "server:1"
    local_host = "here"

    def __init__(
        self,
        place: SimServer,
        agent: Agent,
        *,
        timeout: float,
        refusal_is_final: bool,
        **_: Any,
    ) -> None:
        self.place, self.agent, self.sim = place, agent, place.sim
        self.state = ConnectionState.SUSPENDED
        self._session = 0
        self._link: Link | None = None
        self._welcome = 0
        self._asked = 0
        self._calls: dict[int, tuple[bytes, Resume]] = {}
        agent.wait(lambda resume: agent.spawn(self._dial_first(timeout, refusal_is_final, resume)))

    def ask(self, service: str, body: bytes, timeout: float, **_: Any) -> bytes:
        """See `StoreClient.ask`."""
        self._check()
        self._asked += 1
        id = self._asked

        def waits(resume: Resume) -> None:
            self._calls[id] = body, resume
            if self.state is ConnectionState.CONNECTED:
                self._question(id, body)
            self.agent.machine.after(timeout, lambda: self._expired(id))

        answer: bytes = self.agent.wait(waits)
        return answer

    def close(self, timeout: float) -> None:
        """See `StoreClient.close`; nobody waits here until the server has heard of it."""
        link, server = self._link, self.place
        if self.agent.alive:
            if self.state is ConnectionState.CONNECTED and link is not None:
                link.send_out(lambda: server.left(link))
            self._end(ConnectionState.CLOSED)
            self.agent.notify()

    def _check(self) -> None:
        if self.state is ConnectionState.LOST:
            raise StoreSessionLost("the session is lost")
        if self.state is ConnectionState.CLOSED:
            raise StoreClosedError("the client was closed")

    def _end(self, state: ConnectionState) -> None:
        self.state = state
        calls, self._calls = self._calls, {}
        error = StoreSessionLost if state is ConnectionState.LOST else StoreClosedError
        for _, resume in calls.values():
            self.sim.after(0.0, partial(resume, error("the session is over")))

    def _question(self, id: int, body: bytes) -> None:
        link, server = self._link, self.place
        assert link is not None
        link.send_out(lambda: server.asked(link, id, body))

    def _expired(self, id: int) -> None:
        if id in self._calls:
            resume = self._calls.pop(id)[1]
            link, server = self._link, self.place
            if link is not None and link.open:
                link.send_out(lambda: server.cancelled(link, id))
            resume(StoreTimeout("no answer came"))

    def answered(self, id: int, body: bytes) -> None:
        """The server answers."""
        if id in self._calls:
            self.agent.heard()
            self._calls.pop(id)[1](body)

    def welcomed(self, session: int) -> None:
        """The server greets; with -1 if it does not know the session."""
        self._welcome = session
        self.agent.when_awake(self.agent.notify)

    # --- the client's own thread

    def _dial_first(self, timeout: float, refusal_is_final: bool, resume: Resume) -> Thread:
        deadline, pause = self.agent.machine.clock + timeout, FIRST_PAUSE
        while True:
            failure = yield from self._dial(deadline)
            if failure is None:
                break
            refused = isinstance(failure, StoreConnectionError)
            if (refused and refusal_is_final) or self.agent.machine.clock >= deadline:
                resume(failure)
                return
            yield self.agent.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        resume(None)
        yield from self._keep()

    def _keep(self) -> Thread:
        agent = self.agent
        while True:
            yield agent.until(lambda: self._is_over() or not (self._link and self._link.open))
            if self._is_over():
                return
            self.state = ConnectionState.SUSPENDED
            deadline, pause = agent.machine.clock + self.place.grace, FIRST_PAUSE
            while (yield from self._dial(deadline)) is not None:
                if self._is_over():
                    return
                if self._welcome < 0 or agent.machine.clock >= deadline:
                    self._end(ConnectionState.LOST)
                    return
                yield agent.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    def _is_over(self) -> bool:
        return self.state is ConnectionState.CLOSED

    def _dial(self, deadline: float) -> Thread:
        """Connect, and begin or resume the session; returns what went wrong."""
        agent, place = self.agent, self.place
        if self.sim.now < place.down_until:
            yield agent.sleep(place.job.delay())
            return StoreConnectionError("nobody listens there")
        self._welcome, self._link = 0, (link := Link(place, self))
        session = self._session
        link.send_out(lambda: place.greeted(link, session))
        left = deadline - agent.machine.clock
        yield agent.until(lambda: self._welcome != 0 or not link.open, max(left, 0.0))
        if self._welcome <= 0 or self._is_over():
            link.break_()
            return StoreTimeout("the server does not answer")
        self._session, self.state = self._welcome, ConnectionState.CONNECTED
        for id, (body, _) in list(self._calls.items()):
            self._question(id, body)
        return None
