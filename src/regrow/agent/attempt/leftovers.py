"""Deletes the keys that an agent has left in the stores of its rounds.

The store of a round keeps keys until a client deletes them, and a long job has many rounds. So each
agent deletes the keys that only this agent still needed:

- its part of the rank exchange, once it has its ranks;
- its entry in an exit barrier that broke;
- its answers to views on other hosts.

A separate thread deletes them while the workers run, because no other part waits for it. The round,
and its store, may end before that. The keys are then deleted through the store of the next round,
which is another handle on the same keys.

If a store cannot delete keys, its keys remain.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from regrow.utils import SignalInterrupt, get_logger, start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.store import Store

logger = get_logger(__name__)


class Leftovers:
    """The keys that one agent must delete; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[Store, Sequence[str]]] = []

    def add(self, store: Store, keys: Sequence[str]) -> None:
        """Add keys that the next `clear` deletes; no agent may need them by then.

        Args:
            store: the store of the round with these keys.
            keys: names of the keys; some may not exist.
        """
        with self._lock:
            self._left.append((store, keys))

    def clear(self, store: Store | None) -> None:
        """Start to delete all added keys; do not wait for the end.

        Args:
            store: the store of the agent's current round; None if a subclass of the agent formed
                the round without one.
        """
        if store is None:
            return
        with self._lock:
            left, self._left = self._left, []
        if left:
            start_thread(lambda: self._delete(left, store), "regrow-leftovers")

    def _delete(self, left: list[tuple[Store, Sequence[str]]], current: Store) -> None:
        from regrow.store import StoreConnectionError, StoreTimeout

        for old, keys in left:
            store = _open_handle(old, current)
            if store is None:
                continue
            try:
                for key in keys:
                    store.delete_key(key)
            except (StoreConnectionError, StoreTimeout):  # retry in the next round
                self.add(old, keys)
            except SignalInterrupt:
                raise
            except Exception as error:  # noqa: BLE001 - a foreign store may raise any type
                logger.debug("the keys %s stay in the store: %s", ", ".join(keys), error)


def _open_handle(store: Store, current: Store) -> Store | None:
    """Return an open handle on the keys of a round's store, which may have ended."""
    from regrow.store import PrefixStore

    if store is current:
        return store
    if isinstance(store, PrefixStore) and isinstance(current, PrefixStore):
        return store.over(current.underlying_store)
    return None
