"""The keys and values of a store; this module defines the meaning of every store call.

`KeySpace` is a plain object: no lock, no thread, no socket, no clock. `MemoryStore` runs it under a
lock, and the store server runs it in its event loop, so calls mean the same in both.

A `Query` describes a read that may have to wait. `answer` answers the query or returns `NOT_READY`,
and then `park` keeps it. A caller that changes a key then calls `take_woken`, which returns the
parked queries that have an answer now. A parked wait is registered under only *one* missing key.
When that key appears, the key space checks the query again. It either answers the query or
registers it under the next missing key. So a key that is set costs work only for queries that wait
for it. A wait for several keys ends at a moment at which all keys exist.

Entries are kept in the order of their last change. That order is the index for `watch`: the changes
after a revision are at its end, and need no scan of the store. Deleted keys stay in a second such
order, the tombstones, up to a limit. When the store drops a tombstone, its revision becomes the
floor. A watcher with a revision below the floor gets all keys (`Changes.snapshot`) instead of a
list of changes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from regrow.store.api import Change, Changes
from regrow.store.errors import StoreLimitError, StoreValueError
from regrow.store.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


class NotReady:
    """The type of `NOT_READY`: the query has no answer yet."""


NOT_READY: Final = NotReady()

Answer = list[bytes] | Changes | bool | int | None
Kind = Literal["multi_get", "check", "num_keys", "wait", "watch"]


class Query(NamedTuple):
    """A read; one of values, of the existence of all keys, or of a change may have to wait."""

    kind: Kind
    """The call of the store that it answers."""
    keys: tuple[str, ...] = ()
    """The keys or, for a watch with `prefix`, the prefixes of the keys."""
    after: int = 0
    """For a watch: the revision last seen."""
    prefix: bool = False
    """For a watch: `keys` are prefixes."""


@dataclass(slots=True, eq=False)
class Parked:
    """A waiting query; `answer` holds the result after it is woken."""

    query: Query
    tag: object
    places: tuple[str, ...] = ()
    """The keys or prefixes under which the key space finds the query."""
    answer: Answer | NotReady = NOT_READY


@dataclass(slots=True, eq=False)
class _Entry:
    value: bytes
    revision: int
    owner: Hashable | None = None


class KeySpace:
    """Keys, their values and revisions, and the queries that wait for them."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.revision = 0
        """The number of changes of the store so far."""
        self._limits = limits
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        self._floor = 0
        self._bytes = 0
        self._owned: dict[Hashable, dict[str, None]] = {}
        self._by_key: dict[str, dict[Parked, None]] = {}
        self._by_prefix: dict[str, dict[Parked, None]] = {}
        self._woken: list[Parked] = []

    # ------------------------------------------------------------------ changes

    def set(self, key: str, value: bytes, owner: Hashable | None = None) -> None:
        """Set a key. With an owner, `drop_owner` for this owner deletes the key."""
        entry = self._entries.get(key)
        self._make_room(key, value, entry)
        self._write(key, value, entry, owner)

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
            entry = self._entries.get(key)
            added += entry is None
            grown += len(value) + len(key) if entry is None else len(value) - len(entry.value)
        self._reserve(added, grown)
        for key, value in new.items():
            self._write(key, value, self._entries.get(key), None, wake=False)
        for key in new:
            self._wake(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under a key and return the sum."""
        entry = self._entries.get(key)
        total = amount if entry is None else _number(key, entry.value) + amount
        if not INT64_MIN <= total <= INT64_MAX:
            raise StoreValueError(f"add({key!r}, {amount}) would leave the range of 64 bits")
        value = b"%d" % total
        self._make_room(key, value, entry)
        self._write(key, value, entry, None if entry is None else entry.owner)
        return total

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, owner: Hashable | None = None
    ) -> bytes:
        """Set a key if it has the expected value; return its value afterwards."""
        entry = self._entries.get(key)
        if entry is None and expected:
            self._check_sizes(key, b"")
            return expected
        if entry is not None and entry.value != expected:
            return entry.value
        self._make_room(key, desired, entry)
        self._write(key, desired, entry, owner)
        return desired

    def append(self, key: str, value: bytes) -> None:
        """Append to a key's value."""
        entry = self._entries.get(key)
        whole = value if entry is None else entry.value + value
        self._make_room(key, whole, entry)
        self._write(key, whole, entry, None if entry is None else entry.owner)

    def delete(self, key: str) -> bool:
        """Delete a key, leaving a tombstone; return whether the key existed."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= len(key) + len(entry.value)
        self._release(key, entry)
        self.revision += 1
        self._tombstones[key] = self.revision
        if len(self._tombstones) > self._limits.tombstones:
            _, self._floor = self._tombstones.popitem(last=False)
        self._wake(key)
        return True

    def drop_owner(self, owner: Hashable) -> None:
        """Delete every key that belongs to an owner."""
        for key in list(self._owned.get(owner, ())):
            self.delete(key)

    # -------------------------------------------------------------------- reads

    def answer(self, query: Query) -> Answer | NotReady:
        """Answer a query with the current state, or return NOT_READY."""
        self._check_count(query.keys)
        if query.kind == "watch":
            return self._changes(query)
        if query.kind == "num_keys":
            return len(self._entries)
        values = []
        for key in query.keys:
            entry = self._entries.get(key)
            if entry is None:
                return False if query.kind == "check" else NOT_READY
            values.append(entry.value)
        if query.kind == "multi_get":
            return values
        return True if query.kind == "check" else None

    def _changes(self, query: Query) -> Changes | NotReady:
        snapshot = 0 < query.after < self._floor
        found = sorted(
            self._changed(query, 0 if snapshot else query.after),
            key=lambda change: change.revision,
        )
        if snapshot:
            found = [change for change in found if change.value is not None]
        elif not found:
            return NOT_READY
        return Changes(self.revision, tuple(found), snapshot)

    def _changed(self, query: Query, after: int) -> Iterator[Change]:
        """Yield the watched keys that changed after a revision, deleted ones included."""
        if not query.prefix:
            for key in dict.fromkeys(query.keys):
                entry = self._entries.get(key)
                revision = self._tombstones.get(key, 0) if entry is None else entry.revision
                if revision > after:
                    yield Change(key, revision, None if entry is None else entry.value)
            return
        for key, entry in reversed(self._entries.items()):
            if entry.revision <= after:
                break
            if key.startswith(query.keys):
                yield Change(key, entry.revision, entry.value)
        for key, revision in reversed(self._tombstones.items()):
            if revision <= after:
                break
            if key.startswith(query.keys):
                yield Change(key, revision, None)

    # ------------------------------------------------------------------ waiting

    def park(self, query: Query, tag: object = None) -> Parked:
        """Keep a query that is not ready; the caller may identify it by `tag`."""
        parked = Parked(query, tag)
        self._register(parked)
        return parked

    def unpark(self, parked: Parked) -> None:
        """Remove a parked query."""
        table = self._table(parked.query)
        for place in parked.places:
            waiting = table.get(place)
            if waiting is not None:
                waiting.pop(parked, None)
                if not waiting:
                    del table[place]
        parked.places = ()

    def take_woken(self) -> list[Parked]:
        """Return the queries answered since the last call, in the order of their answers."""
        woken = self._woken
        if woken:
            self._woken = []
        return woken

    def _register(self, parked: Parked) -> None:
        query = parked.query
        if query.kind == "watch":
            parked.places = tuple(dict.fromkeys(query.keys))
        else:
            parked.places = (next(key for key in query.keys if key not in self._entries),)
        table = self._table(query)
        for place in parked.places:
            table.setdefault(place, {})[parked] = None

    def _table(self, query: Query) -> dict[str, dict[Parked, None]]:
        return self._by_prefix if query.prefix else self._by_key

    def _wake(self, key: str) -> None:
        if key in self._by_key:
            self._wake_all(self._by_key[key])
        if self._by_prefix:
            for prefix in [p for p in self._by_prefix if key.startswith(p)]:
                # A watcher of two matching prefixes is removed after the first match.
                self._wake_all(self._by_prefix.get(prefix, {}))

    def _wake_all(self, waiting: dict[Parked, None]) -> None:
        for parked in list(waiting):
            answer = self.answer(parked.query)
            if answer is not NOT_READY:
                self.unpark(parked)
                parked.answer = answer
                self._woken.append(parked)
            elif parked.query.kind != "watch":
                self.unpark(parked)
                self._register(parked)

    # ------------------------------------------------------------------ helpers

    def _write(
        self,
        key: str,
        value: bytes,
        entry: _Entry | None,
        owner: Hashable | None,
        *,
        wake: bool = True,
    ) -> None:
        self.revision += 1
        if entry is None:
            self._tombstones.pop(key, None)
            entry = self._entries[key] = _Entry(value, self.revision)
        else:
            entry.value = value
            entry.revision = self.revision
            self._entries.move_to_end(key)
        if entry.owner is not owner:
            self._release(key, entry)
            if owner is not None:
                entry.owner = owner
                self._owned.setdefault(owner, {})[key] = None
        if wake and (self._by_prefix or key in self._by_key):
            self._wake(key)

    def _release(self, key: str, entry: _Entry) -> None:
        """Make the key outlive its owner."""
        if entry.owner is None:
            return
        owned = self._owned[entry.owner]
        del owned[key]
        if not owned:
            del self._owned[entry.owner]
        entry.owner = None

    def _check_count(self, keys: Sequence[str]) -> None:
        if len(keys) > self._limits.keys_per_call:
            raise StoreLimitError(
                f"the call names {len(keys)} keys, and the store takes at most "
                f"{self._limits.keys_per_call} (Limits.keys_per_call)"
            )

    def _make_room(self, key: str, value: bytes, entry: _Entry | None) -> None:
        self._check_sizes(key, value)
        old = -len(key) if entry is None else len(entry.value)
        self._reserve(entry is None, len(value) - old)

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
        if added and len(self._entries) + added > limits.keys:
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
