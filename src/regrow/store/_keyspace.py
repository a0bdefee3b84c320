"""The keys themselves: the one place that says what every call to a store means.

`KeySpace` is a plain object: no lock, no thread, no socket, no clock. `MemoryStore` runs
it under a lock, the store server runs it in its event loop, so both mean the same.

Reads that may have to wait are described by a `Query`. `answer` answers it or returns
`NOT_READY`, in which case `park` keeps it; whoever changes a key collects the parked
queries that have become answerable with `take_woken`. A parked wait is registered under
*one* key that it lacks, not all: when that key appears the query is looked at again, and
either answered or moved to the next key it lacks. So a key that is set costs only those
who wait for it, and a wait for several keys ends at a moment at which all of them exist.

Entries are kept in the order of their last change. That order is the index for `watch`:
what changed after a revision is the tail of it, found without a scan of the store.
Deleted keys stay in a second such order, the tombstones, as long as there is room; when
one is forgotten, its revision becomes the floor, and a watcher that comes from below the
floor is given the whole picture (`Changes.snapshot`) instead of a list of changes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from regrow.store._api import Change, Changes
from regrow.store._errors import StoreLimitError, StoreValueError
from regrow.store._limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


class NotReady:
    """The type of `NOT_READY`: the query cannot be answered yet."""


NOT_READY: Final = NotReady()

Answer = bytes | list[bytes] | Changes | None


@dataclass(frozen=True, slots=True)
class Query:
    """A read that may have to wait."""

    kind: Literal["get", "multi_get", "wait", "watch"]
    """What is asked: a value, the values, only that all exist, or a change."""
    keys: tuple[str, ...]
    """The keys or, for a watch with `prefix`, what the keys start with."""
    after: int = 0
    """For a watch: the revision last seen."""
    prefix: bool = False
    """For a watch: `keys` are prefixes."""


class Parked:
    """A query that waits; `answer` holds the result once it was woken."""

    __slots__ = ("answer", "places", "query", "tag")

    def __init__(self, query: Query, tag: object) -> None:
        self.query = query
        self.tag = tag
        self.places: tuple[str, ...] = ()
        self.answer: Answer | NotReady = NOT_READY


class _Entry:
    __slots__ = ("owner", "revision", "value")

    def __init__(self, value: bytes, revision: int, owner: Hashable | None) -> None:
        self.value = value
        self.revision = revision
        self.owner = owner


class KeySpace:
    """Keys, their values and revisions, and the queries that wait for them."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.revision = 0
        """How many changes the store has seen."""
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
        """Set a key. With an owner, the key goes when `drop_owner` is called for it."""
        entry = self._entries.get(key)
        self._check_room(key, value, entry)
        self._write(key, value, entry, owner)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set all keys, or none of them when a limit or the arguments forbid it."""
        if len(keys) != len(values):
            raise StoreValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
        self.check_keys(keys)
        new = dict(zip(keys, values, strict=True))
        grown = added = 0
        for key, value in new.items():
            self._check_sizes(key, value)
            entry = self._entries.get(key)
            added += entry is None
            grown += len(value) + len(key) if entry is None else len(value) - len(entry.value)
        self._check_totals(added, grown)
        for key, value in new.items():
            self._write(key, value, self._entries.get(key), None, wake=False)
        for key in new:
            self._wake(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under a key and return the sum."""
        entry = self._entries.get(key)
        total = amount if entry is None else self._number(key, entry.value) + amount
        if not INT64_MIN <= total <= INT64_MAX:
            raise StoreValueError(f"add({key!r}, {amount}) would leave the range of 64 bits")
        value = b"%d" % total
        self._check_room(key, value, entry)
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
        self._check_room(key, desired, entry)
        self._write(key, desired, entry, owner)
        return desired

    def append(self, key: str, value: bytes) -> None:
        """Append to a key's value."""
        entry = self._entries.get(key)
        whole = value if entry is None else entry.value + value
        self._check_room(key, whole, entry)
        self._write(key, whole, entry, None if entry is None else entry.owner)

    def delete(self, key: str) -> bool:
        """Delete a key, leaving a tombstone; say whether it existed."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= len(key) + len(entry.value)
        self._disown(key, entry)
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

    def value(self, key: str) -> bytes | None:
        """Return a key's value, or None when it does not exist."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys exist."""
        self.check_keys(keys)
        return all(key in self._entries for key in keys)

    def num_keys(self) -> int:
        """Return how many keys exist."""
        return len(self._entries)

    def answer(self, query: Query) -> Answer | NotReady:
        """Answer a query as of now, or return NOT_READY."""
        self.check_keys(query.keys)
        if query.kind == "watch":
            return self._changes(query)
        if any(key not in self._entries for key in query.keys):
            return NOT_READY
        if query.kind == "wait":
            return None
        if query.kind == "get":
            return self._entries[query.keys[0]].value
        return [self._entries[key].value for key in query.keys]

    # ------------------------------------------------------------------ waiting

    def park(self, query: Query, tag: object) -> Parked:
        """Keep a query that is not ready; `tag` is the caller's, to know it again."""
        parked = Parked(query, tag)
        self._register(parked)
        return parked

    def unpark(self, parked: Parked) -> None:
        """Forget a parked query."""
        table = self._table(parked.query)
        for place in parked.places:
            waiting = table.get(place)
            if waiting is not None:
                waiting.pop(parked, None)
                if not waiting:
                    del table[place]
        parked.places = ()

    def take_woken(self) -> list[Parked]:
        """Return the queries answered since the last call, in the order of waking."""
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
                # A watcher of two prefixes that both match is gone after the first.
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

    def _changes(self, query: Query) -> Changes | NotReady:
        snapshot = 0 < query.after < self._floor
        after = 0 if snapshot else query.after
        found = self._tail(query, after) if query.prefix else self._exact(query.keys, after)
        if not snapshot:
            return Changes(self.revision, found, snapshot=False) if found else NOT_READY
        existing = tuple(change for change in found if change.value is not None)
        return Changes(self.revision, existing, snapshot=True)

    def _exact(self, keys: Iterable[str], after: int) -> tuple[Change, ...]:
        found = []
        for key in dict.fromkeys(keys):
            entry = self._entries.get(key)
            if entry is not None:
                if entry.revision > after:
                    found.append(Change(key, entry.revision, entry.value))
            elif self._tombstones.get(key, 0) > after:
                found.append(Change(key, self._tombstones[key], None))
        found.sort(key=lambda change: change.revision)
        return tuple(found)

    def _tail(self, query: Query, after: int) -> tuple[Change, ...]:
        found = []
        for key, entry in reversed(self._entries.items()):
            if entry.revision <= after:
                break
            if key.startswith(query.keys):
                found.append(Change(key, entry.revision, entry.value))
        for key, revision in reversed(self._tombstones.items()):
            if revision <= after:
                break
            if key.startswith(query.keys):
                found.append(Change(key, revision, None))
        found.sort(key=lambda change: change.revision)
        return tuple(found)

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
            entry = self._entries[key] = _Entry(value, self.revision, None)
            self._bytes += len(key) + len(value)
        else:
            self._bytes += len(value) - len(entry.value)
            entry.value = value
            entry.revision = self.revision
            self._entries.move_to_end(key)
        if entry.owner is not owner:
            self._disown(key, entry)
            if owner is not None:
                entry.owner = owner
                self._owned.setdefault(owner, {})[key] = None
        if wake and (self._by_prefix or key in self._by_key):
            self._wake(key)

    def _disown(self, key: str, entry: _Entry) -> None:
        if entry.owner is None:
            return
        owned = self._owned[entry.owner]
        del owned[key]
        if not owned:
            del self._owned[entry.owner]
        entry.owner = None

    @staticmethod
    def _number(key: str, value: bytes) -> int:
        try:
            return int(value)
        except ValueError:
            raise StoreValueError(
                f"add() needs a decimal number, and key {key!r} holds {value[:80]!r}"
            ) from None

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise StoreLimitError when a call names too many keys."""
        if len(keys) > self._limits.keys_per_call:
            raise StoreLimitError(
                f"a call names at most {self._limits.keys_per_call} keys, this one {len(keys)}"
            )

    def _check_room(self, key: str, value: bytes, entry: _Entry | None) -> None:
        self._check_sizes(key, value)
        if entry is None:
            self._check_totals(1, len(key) + len(value))
        else:
            self._check_totals(0, len(value) - len(entry.value))

    def _check_sizes(self, key: str, value: bytes) -> None:
        limits = self._limits
        if len(value) > limits.value_bytes:
            raise StoreLimitError(
                f"the value of key {key[:80]!r} has {len(value)} bytes, and the store takes at "
                f"most {limits.value_bytes} (Limits.value_bytes)"
            )
        # A character takes at most four bytes: only a long key is worth encoding.
        if len(key) * 4 > limits.key_bytes and len(key.encode()) > limits.key_bytes:
            raise StoreLimitError(
                f"key {key[:80]!r}... has {len(key.encode())} bytes, and the store takes at most "
                f"{limits.key_bytes} (Limits.key_bytes)"
            )

    def _check_totals(self, added: int, grown: int) -> None:
        limits = self._limits
        if added and len(self._entries) + added > limits.keys:
            raise StoreLimitError(f"the store is full: it holds {limits.keys} keys (Limits.keys)")
        if grown > 0 and self._bytes + grown > limits.total_bytes:
            raise StoreLimitError(
                f"the store is full: {grown} more bytes would exceed {limits.total_bytes} "
                f"(Limits.total_bytes)"
            )
