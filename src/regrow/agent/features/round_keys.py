"""Wait in the store of a round for a key that another process sets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from regrow.store import Store

_WAIT_S: Final = 300.0
"""Seconds of one wait."""


def can_wait_in(store: Store | None) -> bool:
    """Return whether a thread may wait in the store of a round for minutes.

    torch's stores have one connection, and a thread that waits in it blocks all others.
    """
    return store is not None and type(store).__module__.partition(".")[0] == "regrow"


def is_served(store: Store | None) -> bool:
    """Return whether an agent's server has the store of a round, so that other programs reach it.

    Its keys are below the life of the job there (`rendezvous.visiting`).
    """
    from regrow.store import PrefixStore

    return isinstance(store, PrefixStore) and isinstance(store.underlying_store, PrefixStore)


def await_key(
    store: Store,
    key: str,
    runs: Callable[[], bool],
    before: Callable[[], None] = lambda: None,
) -> bytes | None:
    """Wait until a key exists; return its value, or None if the round is over.

    Args:
        store: the store of the round.
        key: the key.
        runs: returns whether the round still runs.
        before: called before each wait: again when another server has taken over.
    """
    from regrow.store import StoreClosedError

    while runs():
        begun = monotonic()
        try:
            before()
            store.wait([key], timedelta(seconds=_WAIT_S))
            return store.get(key)
        except StoreClosedError:
            return None
        except Exception:  # noqa: BLE001 - a foreign store may raise any type
            if monotonic() - begun < 1:  # no time-out: the store is not reachable now
                Event().wait(1)
    return None
