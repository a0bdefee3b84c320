"""The calls of a session that have no answer yet, and their ids."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from regrow.store.errors import StoreError, StoreLimitError, StoreValueError
from regrow.store.keyspace import Query
from regrow.store.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regrow.store.errors import Applied


class PendingCall:
    """One call without an answer."""

    __slots__ = ("changes", "data", "failure", "gate", "id", "reply", "sent")

    def __init__(self, id: int, data: bytes, changes: bool) -> None:
        self.id = id
        self.data = data
        self.changes = changes
        self.sent = False
        self.reply: wire.Reply | None = None
        self.failure: StoreError | None = None
        """The reason why the session ended before it answered."""
        self.gate = threading.Lock()
        """Released when the call has an answer, or the session has ended."""
        self.gate.acquire()

    @property
    def applied(self) -> Applied:
        """The possible effect of the call if the caller gives up now."""
        return "unknown" if self.changes and self.sent else "no"


class Calls:
    """The unanswered calls of one session; guarded by the lock of its `Session`."""

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        """The reason why no more calls are possible."""
        self.pending: dict[int, PendingCall] = {}
        """The calls that wait for an answer, by id."""
        self._next = 1

    def make(self, request: type[Any], args: tuple[Any, ...], frame_bytes: int) -> PendingCall:
        """Create a call from a message type and its arguments, with the next id."""
        if self.failure is not None:
            raise copy_of(self.failure)
        id = self._next
        changes = issubclass(request, wire.Mutation)
        if changes:
            unanswered = (call.id for call in self.pending.values() if call.changes)
            args = (next(unanswered, id) if self.pending else id, *args)
        try:
            data = wire.frame(request(id, *args))
        except (UnicodeEncodeError, OverflowError) as error:
            raise StoreValueError(f"the arguments cannot be sent: {error}") from None
        if len(data) > frame_bytes + wire.HEADER:
            raise StoreLimitError(
                f"the call has {len(data)} bytes, and the server takes at most "
                f"{frame_bytes} at once (Limits.frame_bytes)"
            )
        self._next = id + 1
        return PendingCall(id, data, changes)

    def nudge(self) -> bytes:
        """Create a small message; no caller waits for its answer."""
        self._next += 1
        return wire.frame(wire.Read(self._next - 1, Query("num_keys")))

    def answer(self, replies: Iterable[wire.Reply]) -> str | None:
        """Distribute answers; return the server's error if it ends the session."""
        for reply in replies:
            call = self.pending.get(reply.id)
            if call is not None:
                # In this order, an interrupt between two steps loses no answer.
                if call.reply is None:
                    call.reply = reply
                    call.gate.release()
                self.pending.pop(reply.id, None)
            elif isinstance(reply, wire.Failed) and reply.id == 0:
                return reply.message
        return None

    def again(self) -> bytes:
        """Return all data to send again over a new connection."""
        for call in self.pending.values():
            call.sent = True
        return b"".join(call.data for call in self.pending.values())

    def fail(self) -> None:
        """Wake the caller of every call without an answer, because the session has ended."""
        for call in self.pending.values():
            if call.reply is None and call.failure is None:
                call.failure = self.failure
                call.gate.release()
        self.pending.clear()


def copy_of(failure: StoreError, applied: Applied = "no") -> StoreError:
    """Return a new error to raise for the end of a session.

    A raised exception holds the frames that it passed, and these frames hold the session. If the
    session also held the raised exception, the client would stay alive until the garbage collector
    runs.
    """
    return type(failure)(str(failure), applied=applied)
