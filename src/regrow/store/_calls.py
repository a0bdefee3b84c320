"""What a client keeps of a call under way, and what it may believe about its session."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regrow.store._errors import Applied, StoreError
    from regrow.store._wire import Reply


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
        self.reply: Reply | None = None
        self.error: StoreError | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def applied(self) -> Applied:
        """What may be said of the call if it is given up now."""
        return "unknown" if self.changes and self.sent else "no"
