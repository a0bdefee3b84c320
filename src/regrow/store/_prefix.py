"""A view of a store in which every key starts with a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from regrow.store._api import Change, Changes, Characteristics, characteristics_of, require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from regrow.store._api import Store, Timeout, Value, WatchStore


class PrefixStore:
    """The keys of another store that start with `prefix/`, named without it.

    Like c10d's PrefixStore it shares everything but the names: `num_keys` counts the
    keys of the whole store, `set_timeout` sets the timeout of the store below. The store
    below may be a c10d store; then `watch`, `ephemeral` and `close` are refused.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store this is a view of."""
        return self._store

    def over(self, store: Store) -> PrefixStore:
        """Return a view of the same names in another store, or through another handle on it."""
        return PrefixStore(self._prefix[:-1], store)

    @property
    def characteristics(self) -> Characteristics:
        """What the store below declares."""
        return characteristics_of(self._store)

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """See `WatchStore.set`."""
        if ephemeral:
            self._sessions("set(..., ephemeral=True)").set(self._name(key), value, ephemeral=True)
        else:
            self._store.set(self._name(key), value)

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._name(key))

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        return self._store.add(self._name(key), amount)

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """See `WatchStore.compare_set`."""
        name = self._name(key)
        if ephemeral:
            store = self._sessions("compare_set(..., ephemeral=True)")
            return store.compare_set(name, expected, desired, ephemeral=True)
        return self._store.compare_set(name, expected, desired)

    def wait(self, keys: Sequence[str], timeout: Any = None, /) -> None:
        """See `Store.wait`."""
        if timeout is None:
            self._store.wait(self._names(keys))
        else:
            self._store.wait(self._names(keys), timeout)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return self._store.check(self._names(keys))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return self._store.delete_key(self._name(key))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        self._store.append(self._name(key), value)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        return self._store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """See `Store.multi_set`."""
        self._store.multi_set(self._names(keys), values)

    def num_keys(self) -> int:
        """Return how many keys the store below holds, under all prefixes."""
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set the timeout of the store below."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the store below."""
        return self._store.timeout

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """See `WatchStore.watch`; revisions are those of the whole store."""
        require(self._store, "watch()", "watch")
        store = cast("WatchStore", self._store)
        seen = store.watch(self._names(keys), after, prefix=prefix, timeout=timeout)
        cut = len(self._prefix)
        changes = tuple(Change(c.key[cut:], c.revision, c.value) for c in seen.changes)
        return Changes(seen.revision, changes, seen.snapshot)

    def close(self) -> None:
        """End the session of the store below."""
        self._sessions("close()").close()

    def _sessions(self, purpose: str) -> WatchStore:
        require(self._store, purpose, "sessions")
        return cast("WatchStore", self._store)

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]
