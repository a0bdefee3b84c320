"""The calls of a `WatchStore`, built from two operations: change a key, and answer a query.

`MemoryStore` runs these operations on a `KeySpace` in this process. `StoreClient` sends them to a
server that does the same. Arguments are checked here, so both accept the same ones. A `PrefixStore`
is a view of any store, and calls the methods of that store by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, cast

from regrow.store.api import (
    Change,
    Changes,
    Characteristics,
    Timeout,
    Value,
    characteristics_of,
    require,
    to_bytes,
    to_seconds,
)
from regrow.store.errors import StoreValueError
from regrow.store.keyspace import INT64_MAX, INT64_MIN, Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.store.api import Store


class Handle(ABC):
    """One handle on a store: a session with a default time-out; a `WatchStore` without `close`.

    Args:
        timeout: default time-out of a call, seconds or timedelta.
    """

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = to_seconds(timeout)

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """See `WatchStore.set`."""
        self._change("set", _key(key), to_bytes(value), owned=bool(ephemeral))

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        values = self._read(Query("multi_get", (_key(key),)), self._seconds)
        return cast("list[bytes]", values)[0]

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        number = index(amount)
        if not INT64_MIN <= number <= INT64_MAX:
            raise StoreValueError(f"add() takes a number of 64 bits, not {amount}")
        return cast("int", self._change("add", _key(key), number))

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """See `WatchStore.compare_set`."""
        old, new = to_bytes(expected), to_bytes(desired)
        value = self._change("compare_set", _key(key), old, new, owned=bool(ephemeral))
        return cast("bytes", value)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        self._read(Query("wait", _keys(keys)), self._within(timeout))

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return cast("bool", self._read(Query("check", _keys(keys)), self._seconds))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return cast("bool", self._change("delete", _key(key)))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        self._change("append", _key(key), to_bytes(value))

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        return cast("list[bytes]", self._read(Query("multi_get", _keys(keys)), self._seconds))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """See `Store.multi_set`."""
        self._change("multi_set", _keys(keys), [to_bytes(value) for value in values])

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return cast("int", self._read(Query("num_keys"), self._seconds))

    def set_timeout(self, timeout: Timeout, /) -> None:
        """See `Store.set_timeout`."""
        self._seconds = to_seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """The default time-out of the calls of this handle."""
        return timedelta(seconds=self._seconds)

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """See `WatchStore.watch`."""
        query = Query("watch", _keys(keys), min(max(0, index(after)), INT64_MAX), bool(prefix))
        return cast("Changes", self._read(query, self._within(timeout)))

    def _within(self, timeout: Timeout | None) -> float:
        return self._seconds if timeout is None else to_seconds(timeout)

    @abstractmethod
    def _change(self, name: str, *args: object, owned: bool | None = None) -> object:
        """Run a change.

        Args:
            name: method of `KeySpace`.
            args: arguments of the method.
            owned: for a method with an owner: whether this handle's session is the owner.
        """

    @abstractmethod
    def _read(self, query: Query, seconds: float) -> object:
        """Answer a query; wait for an answer for at most `seconds`."""


class PrefixStore:
    """A view of the keys of another store that start with `prefix/`, named without the prefix.

    Like c10d's PrefixStore, it shares everything but the names: `num_keys` counts the keys of the
    whole store, and `set_timeout` sets the time-out of the store below. The store below may be a
    c10d store; then `watch`, `ephemeral` and `close` are refused.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store below this view."""
        return self._store

    def over(self, store: Store) -> PrefixStore:
        """Return a view of the same names in another store, or through another handle."""
        return PrefixStore(self._prefix[:-1], store)

    @property
    def characteristics(self) -> Characteristics:
        """The guarantees of the store that this view wraps."""
        return characteristics_of(self._store)

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """See `WatchStore.set`."""
        if ephemeral:
            store = require(self._store, "set(..., ephemeral=True)", "sessions")
            store.set(self._name(key), value, ephemeral=True)
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
            store = require(self._store, "compare_set(..., ephemeral=True)", "sessions")
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
        """Return the number of keys in the store below, under all prefixes."""
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set the time-out of the store below."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The time-out of the store below."""
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
        store = require(self._store, "watch()", "watch")
        seen = store.watch(self._names(keys), after, prefix=prefix, timeout=timeout)
        cut = len(self._prefix)
        changes = tuple(Change(c.key[cut:], c.revision, c.value) for c in seen.changes)
        return Changes(seen.revision, changes, seen.snapshot)

    def close(self) -> None:
        """End the session of the store below."""
        require(self._store, "close()", "sessions").close()

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def names_of(keys: Sequence[str]) -> str:
    """Return the names of keys for an error text; of many keys, the first eight."""
    return ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")


def timeout_message(query: Query, seconds: float) -> str:
    """Return the error text for a query that timed out."""
    names = names_of(query.keys)
    if query.kind == "watch":
        what = f"nothing changed after revision {query.after} under {names}"
    else:
        what = f"not all of these keys were set: {names}"
    return f"timed out after {seconds:g} s: {what}"


def _key(key: str) -> str:
    if type(key) is not str:
        if isinstance(key, str):
            return str(key)
        raise StoreValueError(f"a store's key is a str, not {type(key).__name__}: {key!r:.80}")
    return key


def _keys(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise StoreValueError(f"the keys must be a list of str, not one str: write [{keys!r:.80}]")
    return tuple([_key(key) for key in keys])
