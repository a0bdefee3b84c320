"""The keys and values of a store; this module defines the meaning of every store call.

`KeySpace` is a plain object: no lock, no thread, no socket, no clock. `MemoryStore` runs it under a
lock, and the store server runs it in its event loop, so calls mean the same in both.

A `Query` describes a read that may have to wait. `answer` answers the query or returns `NOT_READY`,
and then `park` keeps it. A caller that changes a key then calls `take_woken`, which returns the
parked queries that have an answer now. A parked query is registered under only *one* missing key.
When that key appears, the key space checks the query again. It either answers the query or
registers it under the next missing key. So a key that is set costs work only for queries that wait
for it. A wait for several keys ends at a moment at which all keys exist. A deletion wakes no query,
because no query waits for a key that exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from regrow.store.errors import StoreLimitError, StoreValueError
from regrow.store.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


class NotReady:
    """The type of `NOT_READY`: the query has no answer yet."""


NOT_READY: Final = NotReady()

Answer = list[bytes] | bool | int | None
Kind = Literal["multi_get", "check", "num_keys", "wait"]


class Query(NamedTuple):
    """A read; one of values, or of the existence of all keys, may have to wait."""

    kind: Kind
    """The call of the store that it answers."""
    keys: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class ParkedQuery:
    """A waiting query; `answer` holds the result after it is woken."""

    query: Query
    tag: object
    at: int = 0
    """Which of its keys is missing; the key space finds the query under this key."""
    answer: Answer | NotReady = NOT_READY


class KeySpace:
    """Keys, their values, and the queries that wait for them."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[str, dict[ParkedQuery, None]] = {}
        """The parked queries, by the missing key that each waits for."""
        self._woken: list[ParkedQuery] = []

    # ------------------------------------------------------------------ changes

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._make_room(key, value, self._values.get(key))
        self._write(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set all keys, or none if a limit or the arguments forbid it."""
        if len(keys) != len(values):
            raise StoreValueError(
                f"multi_set got {len(keys)} keys and {len(values)} values: give each key one value"
            )
        self._check_count(keys)
        new = dict(zip(keys, values, strict=True))
        grown = added = 0
        for key, value in new.items():
            self._check_sizes(key, value)
            old = self._values.get(key)
            added += old is None
            grown += len(value) + len(key) if old is None else len(value) - len(old)
        self._reserve(added, grown)
        self._values |= new
        for key in new:
            self._wake(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under a key and return the sum."""
        old = self._values.get(key)
        total = amount if old is None else _number(key, old) + amount
        if not INT64_MIN <= total <= INT64_MAX:
            raise StoreValueError(f"add({key!r}, {amount}) would leave the range of 64 bits")
        value = b"%d" % total
        self._make_room(key, value, old)
        self._write(key, value)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it has the expected value; return its value afterwards."""
        old = self._values.get(key)
        if old is None and expected:
            self._check_sizes(key, b"")
            return expected
        if old is not None and old != expected:
            return old
        self._make_room(key, desired, old)
        self._write(key, desired)
        return desired

    def append(self, key: str, value: bytes) -> None:
        """Append to a key's value."""
        old = self._values.get(key)
        whole = value if old is None else old + value
        self._make_room(key, whole, old)
        self._write(key, whole)

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        return True

    def delete_prefix(self, prefix: str) -> int:
        """Delete the keys that start with a prefix; return how many there were.

        This takes a time in proportion to the number of keys in the store. An empty prefix is
        refused: several programs share a store, and each has keys that the others do not know.
        """
        if not prefix:
            raise StoreValueError(
                "delete_prefix('') would delete every key of the store, also those of other "
                "programs: give the prefix of your own keys"
            )
        keys = [key for key in self._values if key.startswith(prefix)]
        for key in keys:
            self.delete(key)
        return len(keys)

    # -------------------------------------------------------------------- reads

    def answer(self, query: Query) -> Answer | NotReady:
        """Answer a query with the current state, or return NOT_READY."""
        self._check_count(query.keys)
        if query.kind == "num_keys":
            return len(self._values)
        values = []
        for key in query.keys:
            value = self._values.get(key)
            if value is None:
                return False if query.kind == "check" else NOT_READY
            values.append(value)
        if query.kind == "multi_get":
            return values
        return True if query.kind == "check" else None

    # ------------------------------------------------------------------ waiting

    def park(self, query: Query, tag: object = None) -> ParkedQuery:
        """Keep a query that is not ready; the caller may identify it by `tag`."""
        parked = ParkedQuery(query, tag)
        self._register(parked)
        return parked

    def unpark(self, parked: ParkedQuery) -> None:
        """Remove a parked query."""
        key = parked.query.keys[parked.at]
        waiting = self._waiting.get(key, {})
        waiting.pop(parked, None)
        if not waiting:
            self._waiting.pop(key, None)

    def take_woken(self) -> list[ParkedQuery]:
        """Return the queries answered since the last call, in the order of their answers."""
        woken = self._woken
        if woken:
            self._woken = []
        return woken

    def _register(self, parked: ParkedQuery) -> bool:
        """Register a query under a missing key; return False if none is missing.

        The search goes on behind the key that was missing before. Thousands of ranks may each wait
        for the keys of all, and a search from the first key would cost the square of their number.
        """
        keys = parked.query.keys
        for start in (parked.at, 0):  # a key that existed may have been deleted
            for at in range(start, len(keys)):
                if keys[at] not in self._values:
                    parked.at = at
                    self._waiting.setdefault(keys[at], {})[parked] = None
                    return True
        return False

    def _wake(self, key: str) -> None:
        """Answer the queries that wait for a key, or register them under another missing key."""
        for parked in self._waiting.pop(key, ()):
            if not self._register(parked):
                parked.answer = self.answer(parked.query)
                self._woken.append(parked)

    # ------------------------------------------------------------------ helpers

    def _write(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if key in self._waiting:
            self._wake(key)

    def _check_count(self, keys: Sequence[str]) -> None:
        if len(keys) > self._limits.keys_per_call:
            raise StoreLimitError(
                f"the call names {len(keys)} keys, and the store takes at most "
                f"{self._limits.keys_per_call} (Limits.keys_per_call)"
            )

    def _make_room(self, key: str, value: bytes, old: bytes | None) -> None:
        self._check_sizes(key, value)
        self._reserve(old is None, len(value) - (-len(key) if old is None else len(old)))

    def _check_sizes(self, key: str, value: bytes) -> None:
        limits = self._limits
        if len(value) > limits.value_bytes:
            raise StoreLimitError(
                f"the value of key {key[:80]!r} has {len(value)} bytes, and the store takes at "
                f"most {limits.value_bytes} (Limits.value_bytes)"
            )
        # A character takes at most four bytes, so only a long key is encoded for the check.
        if len(key) * 4 > limits.key_bytes and len(key.encode()) > limits.key_bytes:
            raise StoreLimitError(
                f"key {key[:80]!r}... has {len(key.encode())} bytes, and the store takes at most "
                f"{limits.key_bytes} (Limits.key_bytes)"
            )

    def _reserve(self, added: int, grown: int) -> None:
        """Count the bytes of a change that follows at once, unless the store is full."""
        limits = self._limits
        if added and len(self._values) + added > limits.keys:
            raise StoreLimitError(f"the store is full: it holds {limits.keys} keys (Limits.keys)")
        if grown > 0 and self._bytes + grown > limits.total_bytes:
            raise StoreLimitError(
                f"the store is full: {grown} more bytes would exceed {limits.total_bytes} "
                f"(Limits.total_bytes)"
            )
        self._bytes += grown


def _number(key: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise StoreValueError(
            f"add() needs an integer, but key {key!r} holds {value[:80]!r}"
        ) from None
