"""The calls of a session that have no answer yet, and what may be believed about the session.

At most once. Every request has an id, ascending within the session. After a reconnect
everything unanswered is sent again, in order, and the server knows by the id what it has
done already. A request that changes something also says which change is the oldest without
an answer, so the server knows what it may forget. A call that is given up (deadline, close)
is not sent again; its exception says "no" if it was never sent or changes nothing, "unknown"
otherwise.

An interrupt (Ctrl-C) may end any of this half-way. The steps are in such an order that no
answer is lost, though one may come twice.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Any

from regrow.store import _wire as wire
from regrow.store._errors import StoreLimitError, StoreValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import msgspec

    from regrow.store._errors import Applied, StoreError


class ConnectionState(Enum):
    """What a client may believe about its session."""

    CONNECTED = "connected"
    """The server answers. The session's ephemeral keys exist unless somebody deleted them."""
    SUSPENDED = "suspended"
    """The connection is gone and is being made again. Calls wait for it. The session may
    have ended already by the server's clock: believe nothing that rests on its keys."""
    LOST = "lost"
    """The session is over and does not come back: its keys are gone, or will be when its
    grace ends. Calls that were under way may have taken effect, if their error says so."""
    CLOSED = "closed"
    """The client was closed, or was inherited through a fork. It can do nothing more."""


class Call:
    """One call under way."""

    __slots__ = ("changes", "data", "error", "gate", "id", "reply", "sent")

    def __init__(self, id: int, data: bytes, changes: bool) -> None:
        self.id = id
        self.data = data
        self.changes = changes
        self.sent = False
        self.reply: wire.Reply | None = None
        self.error: StoreError | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def over(self) -> bool:
        """Whether it is known how it ended."""
        return self.reply is not None or self.error is not None

    @property
    def applied(self) -> Applied:
        """What may be said of the call if it is given up now."""
        return "unknown" if self.changes and self.sent else "no"


class Calls:
    """The unanswered calls of one session; guarded by the lock of its `Carrier`."""

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        """Why no call can be made any more."""
        self._pending: dict[int, Call] = {}
        self._next = 1

    @property
    def waiting(self) -> bool:
        """Whether any call has no answer yet."""
        return bool(self._pending)

    def make(
        self,
        request: Callable[..., msgspec.Struct],
        args: tuple[Any, ...],
        *,
        changes: bool,
        at_once: bool,
        frame_bytes: int,
    ) -> Call:
        """Make a call of a message and its arguments, with the id that is next."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))
        id = self._next
        try:
            if changes:
                data = wire.frame(request(id, self._oldest_change(id), *args))
            else:
                data = wire.frame(request(id, *args))
        except (UnicodeEncodeError, OverflowError) as error:
            raise StoreValueError(f"the arguments cannot be sent: {error}") from None
        if len(data) > frame_bytes + wire.HEADER:
            raise StoreLimitError(
                f"the call has {len(data)} bytes, and the server takes at most "
                f"{frame_bytes} at once (Limits.frame_bytes)"
            )
        if at_once:
            data += wire.frame(wire.Cancel(id))
        self._next = id + 1
        return Call(id, data, changes)

    def nudge(self) -> bytes:
        """Make a small message whose answer nobody waits for."""
        self._next += 1
        return wire.frame(wire.NumKeys(self._next - 1))

    def enter(self, call: Call) -> None:
        """From now on the call has an answer to come."""
        self._pending[call.id] = call

    def remove(self, call: Call) -> bool:
        """Expect no answer any more; return False if none was expected."""
        return self._pending.pop(call.id, None) is not None

    def answer(self, replies: Iterable[wire.Reply]) -> str | None:
        """Hand out answers; return what the server has against the session, if it says so."""
        for reply in replies:
            call = self._pending.get(reply.id)
            if call is not None:
                # In this order, an interrupt between two steps loses no answer.
                if call.reply is None:
                    call.reply = reply
                    call.gate.release()
                self.remove(call)
            elif isinstance(reply, wire.Failed) and reply.id == 0:
                return reply.message
        return None

    def again(self) -> bytes:
        """Return everything that is to be sent over a new connection."""
        for call in self._pending.values():
            call.sent = True
        return b"".join(call.data for call in self._pending.values())

    def fail(self) -> None:
        """Fail every call, since the session is over."""
        assert self.failure is not None
        for call in self._pending.values():
            if call.error is None:
                call.error = type(self.failure)(str(self.failure), applied=call.applied)
                call.gate.release()
        self._pending.clear()

    def _oldest_change(self, id: int) -> int:
        return next((call.id for call in self._pending.values() if call.changes), id)
