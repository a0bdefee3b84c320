"""A simulated client of the store server, and its connections.

Within one connection messages keep their order as in TCP, with any delays. While a line is
cut, messages wait; they arrive after it is restored. When a connection breaks, the messages under
way are lost in both directions. A client then reconnects within its grace, and repeats the requests
without a reply. So the server may receive a request twice, and late. A client loses its session
when its grace is over, or when the server does not know the session. It then fails the calls that
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from regrow.rendezvous.settings import SPARE_ROUND_TRIPS
from regrow.store import (
    ConnectionState,
    StoreClosedError,
    StoreConnectionError,
    StoreSessionLost,
    StoreTimeout,
)
from simulator.agent import Agent
from simulator.kernel import Resume, Thread

if TYPE_CHECKING:
    from simulator.server import SimServer

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two attempts to reconnect: the first pause, and the longest."""


class Link:
    """One connection between a client and the server; messages on it keep their order."""

    def __init__(self, server: SimServer, client: Client) -> None:
        self.server, self.client, self.agent, self.sim = server, client, client.agent, server.sim
        self.session = 0
        """The id of the session that uses this connection, as the server knows it."""
        self.open = True
        self.closed = False
        """Whether the server sees the end of this connection as it sees the end of an agent."""
        self.broken_at = 0.0
        """When the connection broke, by the clock of the client's machine."""
        self._under_way: dict[str, deque[Callable[[], None]]] = {"out": deque(), "in": deque()}
        server.links[self] = None

    def send_out(self, do: Callable[[], None]) -> None:
        """Send a message to the server; on arrival, the server calls `do`."""
        self._transmit("out", lambda: self.server.take(do))

    def send_in(self, do: Callable[[Client], None]) -> None:
        """Send a message to the client; on arrival, the client calls `do`."""
        self._transmit("in", lambda: do(self.client))

    def _transmit(self, direction: str, do: Callable[[], None]) -> None:
        line = self._under_way[direction]
        line.append(do)
        if len(line) == 1:
            self.sim.after(self.server.job.delay(), lambda: self._arrive(direction))

    def _arrive(self, direction: str) -> None:
        machine = self.agent.host
        if not self.open or machine.off:  # no process is left to receive or repeat it
            return
        if self.server.dead:
            if not self.server.silent:
                self.break_()
            return
        until = max(machine.cut_until[direction], self.server.cut_until(machine, direction))
        if self.sim.now < until:
            again = until - self.sim.now + self.sim.random.uniform(0, 0.5)
            self.sim.after(again, lambda: self._arrive(direction))
            return
        line = self._under_way[direction]
        line.popleft()()
        if line and self.open:
            gap = self.server.job.delay() * 0.1
            self.sim.after(gap, lambda: self._arrive(direction))

    def break_(self, *, closed: bool = False) -> None:
        """Break the connection; both ends notice, but a restarted server does not know it."""
        if self.open:
            self.open, self.closed, self.broken_at = False, closed, self.agent.host.clock
            del self.server.links[self]
            self.server.take(lambda: self.server.broken(self))
            self.agent.when_awake(self.agent.notify)


class Client:
    """An agent's session with the server: the part of `regrow.store.StoreClient` that drivers use.

    Its constructor is `regrow.store.connect`; it blocks.
    """

    local_host = "here"

    def __init__(
        self,
        find: Callable[[], SimServer | None],
        agent: Agent,
        endpoint: str,
        *,
        timeout: float,
        refusal_is_final: bool,
        session_grace: float,
        refusal_ends: Callable[[], bool],
        **_: Any,
    ) -> None:
        self._find, self.agent, self.sim = find, agent, agent.sim
        self._refusal_ends = refusal_ends
        self.server = endpoint
        self.grace = session_grace + SPARE_ROUND_TRIPS * 2 * agent.job.profile.delay
        """Seconds in which the client may resume its session."""
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
        """See `StoreClient.close`; does not wait until the server has received it."""
        link = self._link
        if self.agent.alive:
            if self.state is ConnectionState.CONNECTED and link is not None:
                link.send_out(lambda: link.server.left(link))
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
        link = self._link
        assert link is not None
        link.send_out(lambda: link.server.asked(link, id, body))

    def _expired(self, id: int) -> None:
        if id in self._calls:
            resume = self._calls.pop(id)[1]
            link = self._link
            if link is not None and link.open:
                link.send_out(lambda: link.server.cancelled(link, id))
            resume(StoreTimeout("no answer came"))

    def answered(self, id: int, body: bytes) -> None:
        """Receive the server's reply to a request."""
        if id in self._calls:
            self.agent.received()
            self._calls.pop(id)[1](body)

    def welcomed(self, session: int) -> None:
        """Receive the server's greeting; `session` is -1 if the server does not know it."""
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
            deadline, pause = agent.machine.clock + self.grace, FIRST_PAUSE
            while (failure := (yield from self._dial(deadline))) is not None:
                if self._is_over():
                    return
                refused = isinstance(failure, StoreConnectionError) and self._refusal_ends()
                if refused or self._welcome < 0 or agent.machine.clock >= deadline:
                    self._end(ConnectionState.LOST)
                    return
                yield agent.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    def _is_over(self) -> bool:
        return self.state is ConnectionState.CLOSED

    def _dial(self, deadline: float) -> Thread:
        """Connect, and begin or resume the session; returns the failure, or None."""
        agent, place = self.agent, self._find()
        if place is None or self.sim.now < agent.host.refused_until:
            yield agent.sleep(agent.job.delay())
            refused = StoreConnectionError("no process listens there")
            refused.__cause__ = ConnectionRefusedError()
            return refused
        self._welcome, self._link = 0, (link := Link(place, self))
        session = self._session
        link.send_out(lambda: place.greeted(link, session))
        left = deadline - agent.machine.clock
        yield agent.until(lambda: self._welcome != 0 or not link.open, max(left, 0.0))
        if self._welcome <= 0 or self._is_over():
            link.break_(closed=True)
            return StoreTimeout("the server does not answer")
        self._session, self.state = self._welcome, ConnectionState.CONNECTED
        for id, (body, _) in list(self._calls.items()):
            self._question(id, body)
        return None
