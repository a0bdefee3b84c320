"""The store of one round: a wait in it ends when the round does.

A node may be blocked in `get` for the key of a node that is gone. So whoever learns that the round
is over must be able to wake it, whatever the store below is.

A regrow store gives out sessions: the round has one of its own, and closing it wakes who waits. A
c10d store has no such thing, and worse, a blocked call holds its connection, with everything
behind it that other threads have to say: that is how torch's agents take each other for dead. So
nobody ever blocks in a c10d store here; whether a key exists is asked again and again, with a
growing pause that the end of the round cuts short.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from regrow.store import StoreClosedError, StoreTimeout, WatchStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from regrow.store import Store

_FIRST_PAUSE = 0.001  # seconds between two questions
_LONGEST_PAUSE = 0.05


def scoped(store: Store) -> RoundStore | WatchStore:
    """Return a handle on a store that can be closed without closing the store."""
    session = getattr(store, "session", None)
    if session is not None:
        handle: WatchStore = session()
        return handle
    return RoundStore(store)


class RoundStore:
    """A handle on a c10d store that is never blocked in it, and that can be closed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = threading.Event()

    def close(self) -> None:
        """End all calls, those that wait and later ones, with StoreClosedError."""
        self._closed.set()

    def set(self, key: str, value: str | bytes, /) -> None:
        """See `Store.set`."""
        self._open().set(key, value)

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        self.wait([key])
        return self._open().get(key)

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        return self._open().add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, /) -> bytes:
        """See `Store.compare_set`."""
        return self._open().compare_set(key, expected, desired)

    def wait(self, keys: Sequence[str], timeout: Any = None, /) -> None:
        """See `Store.wait`."""
        limit = self.timeout if timeout is None else timeout
        seconds = limit if isinstance(limit, int | float) else limit.total_seconds()
        deadline = time.monotonic() + seconds
        names, pause = list(keys), _FIRST_PAUSE
        while not self._open().check(names):
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(
                    f"timed out after {seconds:g} s: not all of these keys were set: "
                    f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}"
                )
            self._closed.wait(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return self._open().check(list(keys))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return self._open().delete_key(key)

    def append(self, key: str, value: str | bytes, /) -> None:
        """See `Store.append`."""
        self._open().append(key, value)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        self.wait(keys)
        return self._open().multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes], /) -> None:
        """See `Store.multi_set`."""
        self._open().multi_set(list(keys), list(values))

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return self._open().num_keys()

    def set_timeout(self, timeout: timedelta, /) -> None:
        """See `Store.set_timeout`."""
        self._open().set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """See `Store.timeout`."""
        return self._store.timeout

    def _open(self) -> Store:
        if self._closed.is_set():
            raise StoreClosedError("the round is over, and its store with it")
        return self._store
