"""The rules of the store server: sessions, requests, and at most one effect for each.

`Machine` is deterministic and does no I/O: it is told that a session opens, that a request
came, that a connection was lost, that a grace ran out, and returns the messages to send,
each with the session it goes to. The server around it owns sockets and timers.

A session is the life of one client as the server sees it. It begins with Hello, outlives
its connection by a grace, and ends with Bye or when the grace runs out; then its ephemeral
keys are deleted. Its id is a secret of the client, 16 random bytes.

Changes take effect at most once. Ids ascend within a session, so an id above the last one
is new, and a change with an id at or below it is a repetition after a reconnect: it is
answered from `answers`, never carried out again. A client confirms what it has received
(`ack`), which bounds that memory. If a repetition is not in memory the client broke the
protocol, and its session is ended rather than guessed about.

Reads that cannot be answered yet are parked in the key space, and questions to a service
with the service (`_service`). They do not survive a lost connection: the client asks again,
and a watch misses nothing because it says what it last saw. So a session without a
connection holds nothing but its keys and a few answers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, cast

from regrow.store import _wire as wire
from regrow.store._api import Changes
from regrow.store._errors import StoreLimitError, StoreProtocolError, StoreValueError
from regrow.store._keyspace import Answer, KeySpace, NotReady, Parked, Query
from regrow.store._limits import DEFAULT_LIMITS, Limits
from regrow.store._service import Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct


class Session:
    """One client, as the server sees it."""

    __slots__ = (
        "answers",
        "asked",
        "client",
        "ended",
        "grace",
        "id",
        "kept",
        "last_id",
        "link",
        "parked",
        "services",
    )

    def __init__(self, id: bytes, grace: float, client: str) -> None:
        self.id = id
        self.grace = grace
        """Seconds that it outlives a lost connection."""
        self.client = client
        """How the client named itself."""
        self.last_id = 0
        """The highest id of a change that was carried out."""
        self.answers: OrderedDict[int, Struct] = OrderedDict()
        """Answers to changes that the client has not confirmed, in the order of ids."""
        self.kept = 0
        """Bytes of the values in `answers`."""
        self.parked: dict[int, Parked] = {}
        """Blocked reads by request id."""
        self.asked: dict[int, str] = {}
        """Parked questions by request id: the service that has to answer."""
        self.services: set[str] = set()
        """The services that know this session."""
        self.link: object | None = None
        """The server's: the connection, or None while there is none."""
        self.ended = False


Outgoing = tuple[Session, "Struct"]


class Machine:
    """All sessions of a store and its keys.

    Args:
        new_id: returns a fresh random session id; given, so that tests can repeat.
        limits: what the store refuses to exceed.
        board: the services; None for a store without any.
    """

    def __init__(
        self,
        new_id: Callable[[], bytes],
        limits: Limits = DEFAULT_LIMITS,
        board: Switchboard | None = None,
    ) -> None:
        self.limits = limits
        self.board = board or Switchboard({}, limits, lambda: 0.0, lambda line: None)
        self.sessions: dict[bytes, Session] = {}
        self._new_id = new_id
        self._space = KeySpace(limits)

    def open(self, hello: wire.Hello) -> tuple[Session, wire.Welcome]:
        """Begin a session, or go on with the one named if it is still there.

        Raises:
            StoreLimitError: there are too many sessions.
        """
        session = self.sessions.get(hello.session)
        if session is None:
            if len(self.sessions) >= self.limits.sessions:
                raise StoreLimitError(
                    f"the store is full: {self.limits.sessions} sessions are open (Limits.sessions)"
                )
            grace = min(hello.grace, self.limits.session_grace_seconds)
            session = Session(self._new_id(), grace, hello.client)
            # A client whose session is over must not get another one unasked.
            if not hello.session:
                self.sessions[session.id] = session
        limits = self.limits
        return session, wire.Welcome(
            session.id,
            session.grace,
            limits.key_bytes,
            limits.value_bytes,
            limits.frame_bytes,
            limits.keys_per_call,
        )

    def suspend(self, session: Session) -> list[Outgoing]:
        """The session's connection was lost: forget what it waits for."""
        self._unpark(session)
        return self.board.suspended(session) if session.services else []

    def resume(self, session: Session) -> list[Outgoing]:
        """The session has a connection again."""
        return self.board.resumed(session) if session.services else []

    def end(
        self, session: Session, why: str = "its connection broke", closed: bool = True
    ) -> list[Outgoing]:
        """The session is over: delete its keys.

        Args:
            session: may be over already; then nothing happens.
            why: what became of its client, for the services.
            closed: whether the client's side closed its last connection, for them too.
        """
        if session.ended:
            return []
        session.ended = True
        self._unpark(session)
        self.sessions.pop(session.id, None)
        self._space.drop_owner(session)
        out = self._woken([])
        return out + self.board.ended(session, why, closed) if session.services else out

    def handle(self, session: Session, request: wire.Request) -> list[Outgoing]:
        """Carry out a request; return what to send, the session's own answer first.

        Raises:
            StoreProtocolError: the client broke the protocol; its session cannot go on.
        """
        if isinstance(request, wire.Mutation):
            return self._change(session, request)
        if session.parked and request.id in session.parked:
            if isinstance(request, wire.Cancel):
                self._space.unpark(session.parked.pop(request.id))
                return [(session, wire.Failed(request.id, "cancelled", ""))]
            raise StoreProtocolError(f"request id {request.id} is already in use")
        if session.asked and request.id in session.asked:
            if isinstance(request, wire.Cancel):
                self.board.cancel(session, request.id)
                return [(session, wire.Failed(request.id, "cancelled", ""))]
            raise StoreProtocolError(f"request id {request.id} is already in use")
        try:
            if type(request) is wire.Get:
                value = self._space.value(request.key)
                if value is not None:
                    return [(session, wire.Done(request.id, value))]
                query = Query("get", (request.key,))
            elif type(request) is wire.Wait:
                query = Query("wait", tuple(request.keys))
            elif type(request) is wire.Watch:
                query = Query("watch", tuple(request.keys), request.after, request.prefix)
            elif type(request) is wire.MultiGet:
                query = Query("multi_get", tuple(request.keys))
            elif type(request) is wire.Check:
                return [(session, wire.Done(request.id, self._space.check(request.keys)))]
            elif type(request) is wire.NumKeys:
                return [(session, wire.Done(request.id, self._space.num_keys()))]
            elif type(request) is wire.Ask:
                return self.board.ask(session, request)
            elif type(request) is wire.Bye:
                done = (session, wire.Done(request.id))
                return [done, *self.end(session, "it closed its connection")]
            else:  # a Cancel that came after the answer
                return []
            return self._read(session, request.id, query)
        except StoreLimitError as error:
            return [(session, wire.Failed(request.id, "limit", str(error)))]

    # ------------------------------------------------------------------ helpers

    def _unpark(self, session: Session) -> None:
        for parked in session.parked.values():
            self._space.unpark(parked)
        session.parked.clear()

    def _change(self, session: Session, request: wire.Mutation) -> list[Outgoing]:
        answers = session.answers
        while answers and next(iter(answers)) < request.ack:
            session.kept -= _weight(answers.popitem(last=False)[1])
        if request.id <= session.last_id:
            if request.id not in answers:
                raise StoreProtocolError(
                    f"request id {request.id} was used before, and its answer was confirmed"
                )
            return [(session, answers[request.id])]
        if len(answers) >= self.limits.unconfirmed or session.kept > self.limits.outgoing_bytes:
            raise StoreProtocolError(
                f"{len(answers)} answers with {session.kept} bytes are unconfirmed "
                f"(Limits.unconfirmed, Limits.outgoing_bytes)"
            )
        answer: Struct
        try:
            answer = wire.Done(request.id, self._apply(session, request))
        except StoreLimitError as error:
            answer = wire.Failed(request.id, "limit", str(error))
        except StoreValueError as error:
            answer = wire.Failed(request.id, "value", str(error))
        session.last_id = request.id
        answers[request.id] = answer
        session.kept += _weight(answer)
        return self._woken([(session, answer)])

    def _apply(self, session: Session, request: wire.Mutation) -> bytes | int | bool | None:
        space = self._space
        if type(request) is wire.Set:
            space.set(request.key, request.value, session if request.ephemeral else None)
        elif type(request) is wire.Add:
            return space.add(request.key, request.amount)
        elif type(request) is wire.CompareSet:
            owner = session if request.ephemeral else None
            return space.compare_set(request.key, request.expected, request.desired, owner)
        elif type(request) is wire.Append:
            space.append(request.key, request.value)
        elif type(request) is wire.Delete:
            return space.delete(request.key)
        elif type(request) is wire.MultiSet:
            space.multi_set(request.keys, request.values)
        return None

    def _read(self, session: Session, id: int, query: Query) -> list[Outgoing]:
        answer = self._space.answer(query)
        if not isinstance(answer, NotReady):
            return [(session, _reply(id, answer, self.limits))]
        if len(session.parked) + len(session.asked) >= self.limits.parked:
            raise StoreLimitError(
                f"{self.limits.parked} calls of this client are blocked already (Limits.parked)"
            )
        if len(query.keys) > 1:
            waited = sum(len(parked.query.keys) for parked in session.parked.values())
            if waited + len(query.keys) > self.limits.keys_per_call + self.limits.parked:
                raise StoreLimitError(
                    f"this client waits for {waited} keys already (Limits.keys_per_call)"
                )
        session.parked[id] = self._space.park(query, (session, id))
        return []

    def _woken(self, out: list[Outgoing]) -> list[Outgoing]:
        for parked in self._space.take_woken():
            session, id = cast("tuple[Session, int]", parked.tag)
            del session.parked[id]
            out.append((session, _reply(id, cast("Answer", parked.answer), self.limits)))
        return out


def _weight(answer: Struct) -> int:
    result = answer.result if isinstance(answer, wire.Done) else None
    return len(result) if isinstance(result, bytes) else 0


def _reply(id: int, answer: Answer, limits: Limits) -> Struct:
    if isinstance(answer, Changes):
        size = sum(len(c.key) * 4 + len(c.value or b"") + 32 for c in answer.changes)
        reply: Struct = wire.Seen(id, answer.revision, list(answer.changes), answer.snapshot)
    else:
        size = sum(len(value) + 8 for value in answer) if isinstance(answer, list) else 0
        reply = wire.Done(id, answer)
    if size + 64 > limits.frame_bytes:
        return wire.Failed(
            id,
            "limit",
            f"the answer has {size} bytes, and a message holds at most {limits.frame_bytes} "
            f"(Limits.frame_bytes); ask for fewer keys at once",
        )
    return reply
