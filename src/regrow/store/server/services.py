"""Services of a store server besides keys, and the table that calls them.

Some protocols run best in the one process to which all others are connected anyway. A `Service` is
such a protocol. A client sends it bytes, and it answers with bytes, at once or later. The store
does not read these bytes, and does not depend on the purpose of a service.

A service is deterministic, like the `Machine` beside it. It receives events with their time, and
returns the answers that are due. It owns no socket, no timer and no thread. Its time comes from a
monotonic clock and never goes back. When its deadline has passed, the service first receives
everything that had arrived by then.

Questions work like the store's reads. A question that has no answer yet is *parked*, and counts
towards `Limits.parked`. When the connection breaks, the service drops the parked questions, because
the client repeats them under the same ids after a reconnect. So a question may arrive twice, even
if the service has already handled it. The second one must have no further effect.

A session is an opaque object that can only be compared and used as a key. A service first sees it
with its first question. `suspended` reports that the session's connection broke, and `resumed` that
it is back. `ended` is final and comes once, without an earlier `suspended` if the client closed its
session. It reports whether the client's side closed the connection, as the kernel does for a
process that ends. On this host, a reset also counts as a close. A connection that timed out, or was
reset elsewhere or closed here, proves nothing about the client. A service receives no events of
sessions that never asked it.

A service that raises an unexpected error has a bug. The client with the question gets an error. The
server, its other sessions and later questions continue.

A service can be registered *on demand*: the server loads it at its first question. So a server does
not pay for services that few jobs use. If a service is not installed or is broken, only clients
that ask it get no answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from regrow.store.errors import StoreLimitError, StoreServiceError
from regrow.store.limits import SERVICE_REST_S
from regrow.store.protocol import wire

if TYPE_CHECKING:
    from msgspec import Struct

    from regrow.store.limits import Limits
    from regrow.store.server.machine import Outgoing, ServerSession


class Answer(NamedTuple):
    """The answer to one question; dropped if no client waits for it any more."""

    session: Hashable
    """The session of the question."""
    id: int
    """The id of the question in that session."""
    body: bytes


class Service(Protocol):
    """A protocol that the server runs. Times are seconds of the server's monotonic clock.

    A service may continue where a killed server stopped. Such a service also has a method
    `remember`. The server calls it once, before all other methods, with a `Journal`, the time, and
    a function that takes log lines.

    A service may also have a property `needed`: whether the server outlives its starter for the
    sake of this service, if it lingers. Without it, the server does.
    """

    @property
    def deadline(self) -> float | None:
        """Latest time for the next call of `due`; None: the service waits for no time."""

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> Iterable[Answer]:
        """Handle a question; return the answers that are due now, to any clients.

        Raises:
            StoreServiceError: the question is refused; the client gets the text.
        """

    def cancelled(self, session: Hashable, id: int) -> None:
        """Drop a parked question, because its client no longer waits for the answer."""

    def suspended(self, session: Hashable, now: float) -> Iterable[Answer]:
        """Handle a broken connection of a session: drop its parked questions."""

    def resumed(self, session: Hashable, now: float) -> Iterable[Answer]:
        """Handle the new connection of a session."""

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> Iterable[Answer]:
        """Handle the end of a session and its parked questions.

        Args:
            session: the session.
            why: what happened to it, as text.
            closed: whether the client's side closed its last connection.
            now: the time.
        """

    def due(self, now: float) -> Iterable[Answer]:
        """Handle a passed deadline; return the answers that are due."""


def within(body: bytes, most: int) -> bytes:
    """Return the body of a question, unless it is longer than its service allows.

    Raises:
        ValueError: the body is longer than `most` bytes.
    """
    if len(body) > most:
        raise ValueError(f"the question has {len(body)} bytes; the limit is {most}")
    return body


def load(where: str) -> Service:
    """Return the service that a function creates.

    Args:
        where: "module:function"; the function takes no arguments.

    Raises:
        ValueError: the function does not exist, or it raises.
    """
    from importlib import import_module

    module, _, function = where.partition(":")
    try:
        if not function:
            raise ValueError('it is not named "module:function"')
        return cast("Service", getattr(import_module(module), function)())
    except Exception as error:  # an import may raise any exception
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"the service {where!r} cannot be loaded: {why}") from error


class Switchboard:
    """The services of a server, and the questions that are parked in them.

    Args:
        services: the services, by the name that clients use.
        on_demand: more services, as "module:function" for `load`.
        limits: limits of the store; those of values and messages also apply to questions.
        clock: monotonic clock in seconds.
        log: receives the traceback of a service that raised.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        limits: Limits,
        clock: Callable[[], float],
        log: Callable[[str], None],
        on_demand: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.services = dict(services)
        """The services that are loaded."""
        self._on_demand = dict(on_demand)
        self._broken: dict[str, str] = {}
        """The reason why a service on demand could not be loaded, by name."""
        self._limits = limits
        self._clock = clock
        self._log = log
        self._resting: dict[str, float] = {}
        """Services that raised at their deadline, and the time until which they are not called."""

    @property
    def deadline(self) -> float | None:
        """Latest time for the next call of `due`; None: no service has a deadline."""
        return min(
            (at for name in self.services if (at := self._when(name)) is not None), default=None
        )

    def _when(self, name: str) -> float | None:
        at = self.services[name].deadline
        return at if at is None else max(at, self._resting.get(name, at))

    def ask(self, session: ServerSession, request: wire.Ask) -> list[Outgoing]:
        """Pass a question to its service.

        Raises:
            StoreLimitError: the question is too long.
        """
        if len(request.body) > self._limits.value_bytes:
            raise StoreLimitError(
                f"the question has {len(request.body)} bytes, and {self._limits.value_bytes} are "
                f"allowed (Limits.value_bytes)"
            )
        name = request.service
        try:
            self._load(name)
        except StoreServiceError as error:
            return [(session, wire.Failed(request.id, "service", str(error)))]
        now = self._clock()
        session.asked[request.id] = name
        session.services.add(name)
        out, failure = self._call(
            name, lambda service: service.asked(session, request.id, request.body, now)
        )
        if failure is not None:
            session.asked.pop(request.id, None)
            return [(session, wire.Failed(request.id, "service", failure))]
        return out

    def _load(self, name: str) -> None:
        """Load a service, if it is not loaded yet.

        Raises:
            StoreServiceError: the service does not exist, or cannot be loaded.
        """
        if name in self._on_demand:
            try:
                self.services[name] = load(self._on_demand.pop(name))
            except ValueError as error:
                # The error is kept: a slow failing import must not delay the server again and
                # again.
                self._broken[name] = str(error)
        if name in self._broken:
            raise StoreServiceError(self._broken[name])
        if name not in self.services:
            known = ", ".join(sorted(self.services | self._on_demand | self._broken)) or "none"
            raise StoreServiceError(f"this store has no service {name!r:.80}; it has: {known}")

    def cancel(self, session: ServerSession, id: int) -> None:
        """Drop a parked question."""
        self._call(session.asked.pop(id), lambda service: service.cancelled(session, id))

    def report(
        self, session: ServerSession, event: Literal["suspended", "resumed", "ended"], *args: object
    ) -> list[Outgoing]:
        """Report an event of a session to its services.

        Args:
            session: the session.
            event: the method of `Service`.
            args: the arguments of this method between the session and the time.
        """
        now = self._clock()
        out: list[Outgoing] = []
        for name in sorted(session.services):
            out += self._call(name, lambda service: getattr(service, event)(session, *args, now))[0]
        return out

    def due(self, now: float) -> list[Outgoing]:
        """Call the services with a deadline that has passed at `now`."""
        out: list[Outgoing] = []
        for name in self.services:
            at = self._when(name)
            if at is not None and at <= now:
                answers, failure = self._call(name, lambda service: service.due(now))
                out += answers
                if failure is not None:
                    self._resting[name] = now + SERVICE_REST_S
        return out

    def _call(
        self, name: str, call: Callable[[Service], Iterable[Answer] | None]
    ) -> tuple[list[Outgoing], str | None]:
        """Call a service.

        Returns:
            The messages to send, and the error text of a service that refused or raised. The log
            gets the traceback of an unexpected error; the server continues.
        """
        try:
            return self._outgoing(call(self.services[name]) or ()), None
        except StoreServiceError as error:
            return [], str(error)
        except Exception as error:  # noqa: BLE001 - a service may have any bug
            text = f"the service {name!r} failed: {type(error).__name__}: {error}"
            self._log(f"{text}\n{''.join(traceback.format_exception(error))}")
            return [], text[:1000]

    def _outgoing(self, answers: Iterable[Answer]) -> list[Outgoing]:
        out: list[Outgoing] = []
        for asker, id, body in answers:
            session = cast("ServerSession", asker)
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
