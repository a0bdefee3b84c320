"""What a store server can do besides keeping keys: services, and how they are reached.

Some protocols are run best by the one process that everybody is connected to anyway. A `Service`
is such a protocol: a client asks it with bytes, and it answers with bytes, at once or when it has
something to say. The store does not look into them, and knows nothing of what services are for.

A service is as deterministic as the `Machine` beside which it runs. It is told what happens, and
what time it is, and returns the answers that are due; it owns no socket, no timer and no thread.
Its time comes from a monotonic clock and is never later than what it was told before: when it is
called because its deadline has passed, everything that had arrived by then has been taken in.

Questions are like the store's reads. One without an answer is parked: it costs its client nothing
but a place among those that `Limits.parked` counts. When the connection breaks, the service
forgets what was parked, since the client asks again under the same id when it is back. So a
question may come twice, although it was carried out the first time: asking twice must do no more
than asking once.

A session is named by an object that is good for nothing but to be compared and to be a key. It
appears with its first question. `suspended` says that its connection broke and `resumed` that it
is back; `ended` is final and comes once, without a `suspended` before it if the client said
goodbye. It says whether the client's side closed the connection, as the kernel does for a process
that ends; on this host a reset is a close, too. One that was reset from elsewhere, timed out or was
cut off here proves nothing of the client. Sessions that never asked this service are none of its
business.

A service that raises has a mistake in it. It harms whoever asked, who is told; the server, its
other sessions and later questions go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from regrow.store import _wire as wire
from regrow.store._errors import StoreLimitError, StoreServiceError

if TYPE_CHECKING:
    from msgspec import Struct

    from regrow.store._limits import Limits
    from regrow.store._machine import Session


_REST = 1.0  # seconds


class Answer(NamedTuple):
    """The answer to one question; dropped if nobody waits for it any more."""

    session: Hashable
    """Who asked."""
    id: int
    """Which question of that session."""
    body: bytes


class Service(Protocol):
    """A protocol that the server runs. Times are seconds of the server's monotonic clock."""

    @property
    def deadline(self) -> float | None:
        """When `due` is to be called at the latest; None while nothing waits for a time."""
        ...

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> Iterable[Answer]:
        """Take in a question and return what can be answered now, to anybody.

        Raises:
            StoreServiceError: this question is refused; the text is for who asked.
        """
        ...

    def cancelled(self, session: Hashable, id: int) -> None:
        """A parked question is not waited for any more."""

    def suspended(self, session: Hashable, now: float) -> Iterable[Answer]:
        """The session's connection broke: forget its parked questions."""
        ...

    def resumed(self, session: Hashable, now: float) -> Iterable[Answer]:
        """The session has a connection again."""
        ...

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> Iterable[Answer]:
        """The session is over, and its parked questions with it.

        Args:
            session: which.
            why: what became of it, in words.
            closed: whether the client's side closed its last connection.
            now: the time.
        """
        ...

    def due(self, now: float) -> Iterable[Answer]:
        """The deadline has passed."""
        ...


def within(body: bytes, most: int) -> bytes:
    """Return the body of a question, unless it has more bytes than its service takes.

    Raises:
        ValueError: it has.
    """
    if len(body) > most:
        raise ValueError(f"the question has {len(body)} bytes, and {most} are allowed")
    return body


def load(where: str) -> Service:
    """Return the service that a function makes.

    Args:
        where: "module:function"; the function takes no arguments.

    Raises:
        ValueError: there is no such function.
    """
    from importlib import import_module

    module, colon, function = where.partition(":")
    try:
        create = getattr(import_module(module), function) if colon else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the service {where!r} cannot be loaded: {error}") from error
    if not callable(create):
        raise ValueError(f'the service {where!r} is not named "module:function"')
    return cast("Service", create())


class Switchboard:
    """The services of a server, and who waits for them.

    Args:
        services: by the name under which clients ask.
        limits: of which those of values and blocked calls hold for questions.
        clock: seconds, monotonic.
        log: takes what a service that raised leaves behind.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        limits: Limits,
        clock: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._services = dict(services)
        self._limits = limits
        self._clock = clock
        self._log = log
        self._resting: dict[str, float] = {}
        """Services that raised when they were due, and until when they are left alone."""

    @property
    def deadline(self) -> float | None:
        """When `due` is to be called at the latest, if at all."""
        return min(
            (at for name in self._services if (at := self._when(name)) is not None), default=None
        )

    def _when(self, name: str) -> float | None:
        at = self._services[name].deadline
        return at if at is None else max(at, self._resting.get(name, at))

    def ask(self, session: Session, request: wire.Ask) -> list[tuple[Session, Struct]]:
        """Put a question to its service.

        Raises:
            StoreLimitError: it is too long, or too many of the session's calls are blocked.
        """
        if len(request.body) > self._limits.value_bytes:
            raise StoreLimitError(
                f"the question has {len(request.body)} bytes, and {self._limits.value_bytes} are "
                f"allowed (Limits.value_bytes)"
            )
        if len(session.parked) + len(session.asked) >= self._limits.parked:
            raise StoreLimitError(
                f"{self._limits.parked} calls of this client are blocked already (Limits.parked)"
            )
        service = self._services.get(request.service)
        if service is None:
            known = ", ".join(sorted(self._services)) or "none"
            text = f"this store has no service {request.service!r:.80}; it has: {known}"
            return [(session, wire.Failed(request.id, "service", text))]
        session.asked[request.id] = request.service
        session.services.add(request.service)
        try:
            answers = service.asked(session, request.id, request.body, self._clock())
            return self._outgoing(answers)
        except StoreServiceError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001 - see _mistake
            text = self._mistake(request.service, error)
        session.asked.pop(request.id, None)
        return [(session, wire.Failed(request.id, "service", text))]

    def cancel(self, session: Session, id: int) -> None:
        """Forget a parked question."""
        name = session.asked.pop(id)
        try:
            self._services[name].cancelled(session, id)
        except Exception as error:  # noqa: BLE001 - see _mistake
            self._mistake(name, error)

    def suspended(self, session: Session) -> list[tuple[Session, Struct]]:
        """The session's connection broke."""
        session.asked.clear()
        now = self._clock()
        return self._tell_all(session, lambda service: service.suspended(session, now))

    def resumed(self, session: Session) -> list[tuple[Session, Struct]]:
        """The session has a connection again."""
        now = self._clock()
        return self._tell_all(session, lambda service: service.resumed(session, now))

    def ended(self, session: Session, why: str, closed: bool) -> list[tuple[Session, Struct]]:
        """The session is over."""
        session.asked.clear()
        now = self._clock()
        out = self._tell_all(session, lambda service: service.ended(session, why, closed, now))
        session.services.clear()
        return out

    def due(self, now: float) -> list[tuple[Session, Struct]]:
        """Call the services whose deadlines have passed at `now`."""
        out: list[tuple[Session, Struct]] = []
        for name in self._services:
            at = self._when(name)
            if at is None or at > now:
                continue
            try:
                out += self._outgoing(self._services[name].due(now))
            except Exception as error:  # noqa: BLE001 - see _mistake
                self._mistake(name, error)
                self._resting[name] = now + _REST
        return out

    def _tell_all(
        self, session: Session, call: Callable[[Service], Iterable[Answer]]
    ) -> list[tuple[Session, Struct]]:
        return [sent for name in sorted(session.services) for sent in self._tell(name, call)]

    def _tell(
        self, name: str, call: Callable[[Service], Iterable[Answer]]
    ) -> list[tuple[Session, Struct]]:
        try:
            return self._outgoing(call(self._services[name]))
        except Exception as error:  # noqa: BLE001 - see _mistake
            self._mistake(name, error)
            return []

    def _outgoing(self, answers: Iterable[Answer]) -> list[tuple[Session, Struct]]:
        out: list[tuple[Session, Struct]] = []
        for who, id, body in answers:
            session = cast("Session", who)
            name = session.asked.pop(id, None)
            if name is None:
                continue
            reply: Struct = wire.Done(id, body)
            if len(body) + 64 > self._limits.frame_bytes:
                reply = wire.Failed(
                    id,
                    "limit",
                    f"the answer of the service {name!r} has {len(body)} bytes, and a message "
                    f"holds at most {self._limits.frame_bytes} (Limits.frame_bytes)",
                )
            out.append((session, reply))
        return out

    def _mistake(self, name: str, error: Exception) -> str:
        """A service raised what it should not: log where, for its author, and go on."""
        text = f"the service {name!r} failed: {type(error).__name__}: {error}"
        self._log(f"{text}\n{''.join(traceback.format_exception(error))}")
        return text[:1000]
