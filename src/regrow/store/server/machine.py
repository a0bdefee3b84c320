"""The rules of the store server: sessions, requests, and at most one effect for each request.

`Machine` is deterministic and does no I/O. Its events are: a session opens, a request arrives, a
connection is lost, a grace period ends. It returns the messages to send, each with its session. The
server around it owns sockets and timers.

A session is the life of one client from the server's point of view. It begins with Hello, and
outlives its connection by a grace period. It ends with Bye or at the end of the grace period. Its
id is a secret of the client, 16 random bytes.

Changes take effect at most once. Ids ascend within a session, so an id above the last one is new. A
change with an id at or below the last one is a repetition after a reconnect. The machine answers it
from `answers`, and never runs it again. A client confirms the answers that it has received (`ack`),
which limits that memory. If a repetition is not in memory, the client broke the protocol. Then the
machine ends the session, because it does not know the right answer.

Reads without an answer yet are parked in the key space, and questions to a service are parked in
the service (`services`). They do not survive a lost connection: the client asks again. So a session
without a connection holds only a few answers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

import msgspec

from regrow.store.errors import StoreLimitError, StoreProtocolError, StoreValueError
from regrow.store.keyspace import Answer, KeySpace, NotReady, ParkedQuery
from regrow.store.limits import DEFAULT_LIMITS, Limits
from regrow.store.protocol import wire
from regrow.store.server.services import Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct

    from regrow.store.server.connection import Peer


@dataclass(slots=True, eq=False)
class ServerSession:
    """One client, from the server's point of view."""

    id: bytes
    grace: float
    """Seconds for which the session outlives a lost connection."""
    client: str
    """The name that the client gave."""
    visits: bool = False
    """Whether a lingering server may end before this session."""
    last_id: int = 0
    """The highest id of a finished change."""
    answers: OrderedDict[int, Struct] = field(default_factory=OrderedDict)
    """Answers to changes that the client has not confirmed, in the order of ids."""
    kept: int = 0
    """Number of bytes of the values in `answers`."""
    parked: dict[int, ParkedQuery] = field(default_factory=dict)
    """Blocked reads, by request id."""
    asked: dict[int, str] = field(default_factory=dict)
    """The service of each parked question, by request id."""
    services: set[str] = field(default_factory=set)
    """The services that have received a question of this session."""
    link: Peer | None = None
    """The server's connection object; None: there is no connection."""
    ended: bool = False


Outgoing = tuple[ServerSession, "Struct"]

_METHODS: Final = {message: getattr(KeySpace, name) for name, message in wire.CHANGES.items()}


class Machine:
    """All sessions of a store and its keys.

    Args:
        new_id: returns a new random session id; a parameter, so that tests are repeatable.
        limits: limits that the store refuses to exceed.
        board: the services; None for a store without services.
    """

    def __init__(
        self,
        new_id: Callable[[], bytes],
        limits: Limits = DEFAULT_LIMITS,
        board: Switchboard | None = None,
    ) -> None:
        self.limits = limits
        self.board = board or Switchboard({}, limits, lambda: 0.0, lambda line: None)
        self.sessions: dict[bytes, ServerSession] = {}
        self.visitors = 0
        """How many of them a lingering server does not wait for."""
        self._new_id = new_id
        self._space = KeySpace(limits)

    def open(self, hello: wire.Hello) -> tuple[ServerSession, wire.Welcome]:
        """Start a session, or resume the session in `hello` if it still exists.

        If it does not, the client gets another session, which has ended.

        Raises:
            StoreLimitError: too many sessions are open.
        """
        session = self.sessions.get(hello.session)
        if session is None:
            if not hello.session and len(self.sessions) >= self.limits.sessions:
                raise StoreLimitError(
                    f"the store is full: {self.limits.sessions} sessions are open (Limits.sessions)"
                )
            grace = min(hello.grace, self.limits.session_grace_seconds)
            session = ServerSession(self._new_id(), grace, hello.client, hello.visits)
            # A client with an ended session must not get a new one that it did not request.
            session.ended = bool(hello.session)
            if not session.ended:
                self.sessions[session.id] = session
                self.visitors += session.visits
        return session, wire.Welcome(session.id, session.grace, self.limits.frame_bytes)

    def suspend(self, session: ServerSession) -> list[Outgoing]:
        """Handle the loss of a session's connection: remove its parked calls."""
        self._unpark(session)
        return self.board.report(session, "suspended")

    def resume(self, session: ServerSession) -> list[Outgoing]:
        """Handle a session's new connection."""
        return self.board.report(session, "resumed")

    def end(
        self, session: ServerSession, why: str = "its connection broke", closed: bool = True
    ) -> list[Outgoing]:
        """End a session: drop its parked calls, and report the end to its services.

        Args:
            session: the session; the call does nothing if it has already ended.
            why: what happened to its client, for the services.
            closed: whether the client's side closed its last connection, for the services.
        """
        if session.ended:
            return []
        session.ended = True
        self._unpark(session)
        if self.sessions.pop(session.id, None) is not None:
            self.visitors -= session.visits
        return self.board.report(session, "ended", why, closed)

    def handle(self, session: ServerSession, request: wire.Request) -> list[Outgoing]:
        """Run a request; return the messages to send, the session's own answer first.

        Raises:
            StoreProtocolError: the client broke the protocol; its session cannot continue.
        """
        if isinstance(request, wire.Mutation):
            return self._change(session, request)
        id = request.id
        if id in session.parked or id in session.asked:
            if not isinstance(request, wire.Cancel):
                raise StoreProtocolError(f"request id {id} is already in use")
            if id in session.asked:
                self.board.cancel(session, id)
            else:
                self._space.unpark(session.parked.pop(id))
            return [(session, wire.Failed(id, "cancelled", ""))]
        try:
            if isinstance(request, wire.Read):
                return self._read(session, request)
            if isinstance(request, wire.Ask):
                self._check_blocked(session)
                return self.board.ask(session, request)
        except StoreLimitError as error:
            return [(session, wire.Failed(id, "limit", str(error)))]
        if isinstance(request, wire.Bye):
            done = (session, wire.Done(id))
            return [done, *self.end(session, "it closed its connection")]
        return []  # a Cancel that arrived after the answer

    # ------------------------------------------------------------------ helpers

    def _unpark(self, session: ServerSession) -> None:
        for parked in session.parked.values():
            self._space.unpark(parked)
        session.parked.clear()
        session.asked.clear()

    def _change(self, session: ServerSession, request: wire.Mutation) -> list[Outgoing]:
        answers = session.answers
        while answers and next(iter(answers)) < request.ack:
            session.kept -= _weight(answers.popitem(last=False)[1])
        if request.id <= session.last_id:
            if request.id not in answers:
                raise StoreProtocolError(
                    f"the client repeats request {request.id}, although it has confirmed the "
                    f"answer: run the same release of regrow in all processes"
                )
            return [(session, answers[request.id])]
        if len(answers) >= self.limits.unconfirmed or session.kept > self.limits.outgoing_bytes:
            raise StoreProtocolError(
                f"the client has {len(answers)} unconfirmed answers ({session.kept} bytes); the "
                f"limits are {self.limits.unconfirmed} answers (Limits.unconfirmed) and "
                f"{self.limits.outgoing_bytes} bytes (Limits.outgoing_bytes); run the same release "
                f"of regrow in all processes, or raise these limits"
            )
        answer: Struct
        try:
            _, _, *args = msgspec.structs.astuple(request)
            answer = wire.Done(request.id, _METHODS[type(request)](self._space, *args))
        except StoreLimitError as error:
            answer = wire.Failed(request.id, "limit", str(error))
        except StoreValueError as error:
            answer = wire.Failed(request.id, "value", str(error))
        session.last_id = request.id
        answers[request.id] = answer
        session.kept += _weight(answer)
        return self._woken([(session, answer)])

    def _read(self, session: ServerSession, request: wire.Read) -> list[Outgoing]:
        query = request.query
        answer = self._space.answer(query)
        if not isinstance(answer, NotReady):
            return [(session, _reply(request.id, answer, self.limits))]
        if not request.waits:
            return [(session, wire.Failed(request.id, "cancelled", ""))]
        self._check_blocked(session)
        if len(query.keys) > 1:
            waited = sum(len(parked.query.keys) for parked in session.parked.values())
            if waited + len(query.keys) > self.limits.keys_per_call + self.limits.parked:
                raise StoreLimitError(
                    f"this client waits for {waited} keys already (Limits.keys_per_call)"
                )
        session.parked[request.id] = self._space.park(query, (session, request.id))
        return []

    def _check_blocked(self, session: ServerSession) -> None:
        if len(session.parked) + len(session.asked) >= self.limits.parked:
            raise StoreLimitError(
                f"{self.limits.parked} calls of this client are blocked already (Limits.parked)"
            )

    def _woken(self, out: list[Outgoing]) -> list[Outgoing]:
        for parked in self._space.take_woken():
            session, id = cast("tuple[ServerSession, int]", parked.tag)
            del session.parked[id]
            out.append((session, _reply(id, cast("Answer", parked.answer), self.limits)))
        return out


def _weight(answer: Struct) -> int:
    result = answer.result if isinstance(answer, wire.Done) else None
    return len(result) if isinstance(result, bytes) else 0


def _reply(id: int, answer: Answer, limits: Limits) -> Struct:
    size = sum(map(len, answer)) + 8 * len(answer) if isinstance(answer, list) else 0
    if size + 64 > limits.frame_bytes:
        return wire.Failed(
            id,
            "limit",
            f"the answer has {size} bytes, and a message holds at most {limits.frame_bytes} "
            f"(Limits.frame_bytes); ask for fewer keys at once",
        )
    return wire.Done(id, answer)
