"""How long and how often a client tries to reach its server.

The first time, nobody may listen there yet, or only a proxy that hangs up: that is tried again
until the time is over, unless a refusal is to be final. What is no store of ours, or does not hold
the token, will not be one in a second either, and ends it at once.

After a loss everything is tried again, since the server was there and was ours, until the grace of
the session is over, as the client counts it: then the server has ended the session, or will. One
that greets the client as a stranger has forgotten it already.

The pauses grow from 0.01 s, so that a connection that was merely reset is back unnoticed, to 0.5 s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from regrow.store._errors import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreHungUp,
    StoreSessionLost,
    StoreTimeout,
)

if TYPE_CHECKING:
    from regrow.store._dial import Dialer, Greeted

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5


def dial_first(dialer: Dialer, grace: float, seconds: float, *, refusal_is_final: bool) -> Greeted:
    """Begin a session.

    Args:
        dialer: knows the server.
        grace: seconds the session is to outlive a lost connection.
        seconds: within which it has to be made.
        refusal_is_final: do not try again when nobody listens, or hangs up.

    Raises:
        StoreClosedError: the dialer was woken.
    """
    pause, deadline = _FIRST_PAUSE, time.monotonic() + seconds
    failure: StoreError | None = None
    while True:
        try:
            return dialer.dial(b"", grace, deadline)
        except StoreConnectionError as error:
            failure = error
            refused = isinstance(error, StoreHungUp) or isinstance(
                error.__cause__, ConnectionRefusedError
            )
            if isinstance(error, StoreClosedError) or (refused and refusal_is_final):
                raise
            dialer.sleep(min(pause, deadline - time.monotonic()))
            pause = min(pause * 2, _LONGEST_PAUSE)
        except StoreTimeout as error:
            failure = failure or error
        if time.monotonic() >= deadline:
            raise type(failure)(f"{failure} (tried for {seconds:g} s)") from failure


def dial_again(dialer: Dialer, session: bytes, grace: float, lost_at: float) -> Greeted:
    """Resume a session.

    Args:
        dialer: has reached the server before.
        session: as the server named it.
        grace: seconds it outlives a lost connection.
        lost_at: when the connection was lost, on the monotonic clock.

    Raises:
        StoreClosedError: the dialer was woken.
        StoreSessionLost: the session is over.
    """
    deadline = lost_at + grace
    pause, failure = _FIRST_PAUSE, "the connection was lost"
    while time.monotonic() < deadline:
        try:
            greeted = dialer.dial(session, grace, deadline)
        except StoreClosedError:
            raise
        except StoreError as error:
            failure = str(error)
            dialer.sleep(min(pause, deadline - time.monotonic()))
            pause = min(pause * 2, _LONGEST_PAUSE)
            continue
        if greeted.welcome.session == session:
            return greeted
        greeted.channel.close()
        failure = f"the store at {dialer.endpoint} no longer knows this session"
        break
    raise StoreSessionLost(f"the session is lost after {grace:g} s of grace: {failure}")
