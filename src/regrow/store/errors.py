"""The errors of a store, as one tree.

    StoreError
     ├─ StoreTimeout            also a TimeoutError: the deadline of the call passed
     ├─ StoreConnectionError    also a ConnectionError: the store is not reachable
     │   ├─ StoreSessionLost    the session has ended
     │   └─ StoreClosedError    this handle was closed, or inherited through a fork
     ├─ StoreAuthError          one side refused the token (or the certificate)
     ├─ StoreProtocolError      the other end is not a regrow store, or has another version
     │   └─ StoreHungUp         it hung up at the first message; also a StoreConnectionError
     ├─ StoreLimitError         a key, value, message or count is over a limit
     ├─ StoreValueError         also a ValueError: the stored value does not fit the call
     └─ StoreServiceError       a service of the server refused the question, or failed

Every error has `applied`, the effect of the call: "no" means that it had no effect and never will;
"unknown" means that it took effect once or not at all.
"""

from __future__ import annotations

from typing import Literal

Applied = Literal["no", "unknown"]


class StoreError(Exception):
    """A call to a store failed.

    Attributes:
        applied: "no" if the call has no effect, now and later; "unknown" if it may have taken
            effect (once).
    """

    def __init__(self, message: str, *, applied: Applied = "no") -> None:
        super().__init__(message)
        self.applied: Applied = applied


class StoreTimeout(StoreError, TimeoutError):
    """The deadline passed before the store answered, or before a key appeared."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store is not reachable."""


class StoreSessionLost(StoreConnectionError):
    """The session has ended. Connect again."""


class StoreClosedError(StoreConnectionError):
    """This handle was closed, or belongs to the parent of a forked process."""


class StoreAuthError(StoreError):
    """One side did not prove that it holds the token."""


class StoreProtocolError(StoreError):
    """The other end does not use this protocol, or violated it."""


class StoreHungUp(StoreProtocolError, StoreConnectionError):
    """The program on that port hung up at the first message.

    A program of another protocol does this. A proxy also does it while its server does not run yet.
    """


class StoreLimitError(StoreError):
    """A key, a value, a message or a count is over the store's limit."""


class StoreValueError(StoreError, ValueError):
    """The stored value, or an argument, does not fit the call."""


class StoreServiceError(StoreError):
    """A service of the server refused a question, failed at it, or does not exist."""
