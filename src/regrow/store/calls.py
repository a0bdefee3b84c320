"""The calls of a `Store`, built from two operations: change a key, and answer a query.

`MemoryStore` runs these operations on a `KeySpace` in this process. `StoreClient` sends them to a
server that does the same. Arguments are checked here, so both accept the same ones. A `PrefixStore`
is a view of any store, and calls the methods of that store by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, cast

from regrow.store.api import Timeout, Value, to_bytes, to_key, to_seconds
from regrow.store.errors import StoreValueError
from regrow.store.keyspace import INT64_MAX, INT64_MIN, Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.store.api import Store


class Handle(ABC):
    """One handle on a store: a session with a default time-out.

    Args:
        timeout: default time-out of a call, seconds or timedelta.
    """

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = to_seconds(timeout)

    def set(self, key: str, value: Value, /) -> None:
        """See `Store.set`."""
        self._change("set", to_key(key), to_bytes(value))

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        values = self._read(Query("multi_get", (to_key(key),)), self._seconds)
        return cast("list[bytes]", values)[0]

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        number = index(amount)
        if not INT64_MIN <= number <= INT64_MAX:
            raise StoreValueError(f"add() takes a number of 64 bits, not {amount}")
        return cast("int", self._change("add", to_key(key), number))

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """See `Store.compare_set`."""
        old, new = to_bytes(expected), to_bytes(desired)
        return cast("bytes", self._change("compare_set", to_key(key), old, new))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        seconds = self._seconds if timeout is None else to_seconds(timeout)
        self._read(Query("wait", _keys(keys)), seconds)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return cast("bool", self._read(Query("check", _keys(keys)), self._seconds))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return cast("bool", self._change("delete", to_key(key)))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        self._change("append", to_key(key), to_bytes(value))

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

    @abstractmethod
    def _change(self, name: str, *args: object) -> object:
        """Run a change.

        Args:
            name: method of `KeySpace`.
            args: arguments of the method.
        """

    @abstractmethod
    def _read(self, query: Query, seconds: float) -> object:
        """Answer a query; wait for an answer for at most `seconds`."""


class PrefixStore:
    """A view of the keys of another store that start with `prefix/`, named without the prefix.

    Like c10d's PrefixStore, it shares everything but the names: `num_keys` counts the keys of the
    whole store, and `set_timeout` sets the time-out of the store below. `delete_prefix` and `close`
    raise AttributeError if the store below has no such method; no c10d store has either.
    The stores of the rendezvous backends `etcd` and `file` have only `close`.
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

    def set(self, key: str, value: Value, /) -> None:
        """See `Store.set`."""
        self._store.set(self._name(key), value)

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._name(key))

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        return self._store.add(self._name(key), amount)

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """See `Store.compare_set`."""
        return self._store.compare_set(self._name(key), expected, desired)

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

    def delete_prefix(self, prefix: str, /) -> int:
        """Delete the keys of this view that start with a prefix; return how many there were.

        An empty prefix deletes all keys of this view, and no other key of the store below.
        """
        below: Any = self._store
        return cast("int", below.delete_prefix(self._name(prefix)))

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

    def close(self) -> None:
        """End the session of the store below."""
        below: Any = self._store
        below.close()

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
    return f"timed out after {seconds:g} s: not all of these keys were set: {names}"


def _keys(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise StoreValueError(f"the keys must be a list of str, not one str: write [{keys!r:.80}]")
    return tuple([to_key(key) for key in keys])
