"""The keys that an agent has left in the stores of its rounds, and how it gets rid of them.

A store keeps what nobody deletes, and a long job has many rounds. So every agent deletes what only
itself still had a use for: its part of the exchange of ranks, once it has its own, and its place in
an exit barrier that broke. That happens while the workers run, on a thread of its own, since nobody
waits for it. A round may be over before that, and its store with it; then its keys are deleted
through the store of the next round, which is another handle on the same keys.

Where a store cannot delete, its keys stay.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from regrow.store import PrefixStore, StoreConnectionError, StoreTimeout
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.store import Store

logger = get_logger(__name__)


class _Left(NamedTuple):
    """What was left in one round."""

    store: Store
    """The round's, which may be over."""
    keys: Sequence[str]
    """Their names in it."""


class Leftovers:
    """The keys that one agent has to delete; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[_Left] = []

    def add(self, store: Store, keys: Sequence[str]) -> None:
        """Note keys that nobody will need when `clear` is called next.

        Args:
            store: the round's in which they are.
            keys: their names; some may not exist.
        """
        with self._lock:
            self._left.append(_Left(store, keys))

    def clear(self, store: Store) -> None:
        """Begin to delete all that was noted, and do not wait for it.

        Args:
            store: that of the round that this agent is in.
        """
        with self._lock:
            left, self._left = self._left, []
        if left:
            threading.Thread(
                target=self._delete, args=(left, store), name="regrow-leftovers", daemon=True
            ).start()

    def _delete(self, left: list[_Left], current: Store) -> None:
        for each in left:
            store = _reach(each.store, current)
            if store is None:
                continue
            try:
                for key in each.keys:
                    store.delete_key(key)
            except (StoreConnectionError, StoreTimeout):  # in the next round, then
                self.add(each.store, each.keys)
            except Exception as error:  # noqa: BLE001 - a foreign store's, of any type
                logger.debug("the keys %s stay in the store: %s", ", ".join(each.keys), error)


def _reach(store: Store, current: Store) -> Store | None:
    """A handle on the keys of a round's store that is open; None if there is no way to them."""
    if store is current:
        return store
    if isinstance(store, PrefixStore) and isinstance(current, PrefixStore):
        return store.over(current.underlying_store)
    return None
