"""What can go wrong with a store, as one tree.

    StoreError
     ├─ StoreTimeout            also a TimeoutError: the deadline of the call passed
     ├─ StoreConnectionError    also a ConnectionError: the store could not be reached
     │   ├─ StoreSessionLost    the session is over; its keys are gone or soon will be
     │   └─ StoreClosedError    this handle was closed, or inherited through a fork
     ├─ StoreAuthError          the token (or the certificate) was refused, by either side
     ├─ StoreProtocolError      the other end is not a regrow store, or not of our version
     │   └─ StoreHungUp         it hung up at the first message; also a StoreConnectionError
     ├─ StoreLimitError         a key, value, message or count is over a limit
     ├─ StoreValueError         also a ValueError: the stored value does not fit the call
     ├─ StoreServiceError       a service of the server refused the question, or failed at it
     └─ StoreTooWeakError       the store lacks a guarantee that the caller needs

Every one of them says in `applied` what became of the call: "no" means that it had
no effect and never will; "unknown" means that it took effect once or not at all.
"""

from __future__ import annotations

from typing import Literal

Applied = Literal["no", "unknown"]


class StoreError(Exception):
    """A call to a store failed.

    Attributes:
        applied: "no" when the call had and will have no effect, "unknown" when it
            may have taken effect (once).
    """

    def __init__(self, message: str, *, applied: Applied = "no") -> None:
        super().__init__(message)
        self.applied: Applied = applied


class StoreTimeout(StoreError, TimeoutError):
    """The deadline passed before the store answered, or before a key appeared."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store could not be reached."""


class StoreSessionLost(StoreConnectionError):
    """The session is over: its keys are gone or soon will be. Connect anew."""


class StoreClosedError(StoreConnectionError):
    """This handle was closed, or belongs to the parent of a forked process."""


class StoreAuthError(StoreError):
    """One side could not prove that it holds the token."""


class StoreProtocolError(StoreError):
    """The other end does not speak this protocol, or broke it."""


class StoreHungUp(StoreProtocolError, StoreConnectionError):
    """What listens there hung up at the first message.

    A stranger does that, and so does what passes connections on to a server that is not there yet.
    """


class StoreLimitError(StoreError):
    """A key, a value, a message or a count is over the store's limit."""


class StoreValueError(StoreError, ValueError):
    """What is stored, or what was passed, does not fit the call."""


class StoreServiceError(StoreError):
    """A service of the server refused a question, failed at it, or is not there."""


class StoreTooWeakError(StoreError):
    """The store does not give a guarantee that the caller needs."""
