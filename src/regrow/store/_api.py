"""What a store is.

`Store` holds the names and semantics of PyTorch's c10d store and nothing else, so that
a c10d store can be used wherever a `Store` is asked for. `WatchStore` adds what the
rest of regrow needs and a c10d store lacks. Code that needs more than `Store` says so
with `require`, which refuses a store that is too weak before anything depends on it.

The semantics, where c10d's own documentation is silent (read off its TCPStore):

- `get`, `multi_get` and `wait` block until every key exists, at most for the timeout.
- `add` keeps the number as decimal text: after `add("k", 5)`, `get("k")` is `b"5"`. A
  key that does not exist counts as 0. Where c10d's server drops the connection of whoever
  adds to a text or wraps around at 64 bits, these stores raise `StoreValueError`.
- `compare_set` returns the value after the call. On a key that does not exist it sets
  when `expected` is empty; otherwise it sets nothing and returns `expected`.
- `check([])` is True, `wait([])` returns at once, an empty value is a value.

`watch` is level-triggered: it compares what the caller last saw (`after`) with what is
there, so nothing is missed between two calls or over a reconnect, and a key that changed
ten times in between is reported once, as it is now. One counter, the revision, numbers
all changes of the whole store; a deleted key leaves a tombstone with its revision.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from regrow.store._errors import StoreTooWeakError, StoreValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

Value = str | bytes
Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""How long a call may take unless the store was told otherwise, as in c10d."""


class Change(NamedTuple):
    """One key as it is now."""

    key: str
    """The key's name."""
    revision: int
    """The store's revision at which the key last changed."""
    value: bytes | None
    """The value, or None when the key was deleted."""


class Changes(NamedTuple):
    """What `watch` saw."""

    revision: int
    """The store's revision; pass it as `after` to see only what follows."""
    changes: tuple[Change, ...]
    """The watched keys that changed after `after`, oldest change first."""
    snapshot: bool
    """True when `after` is older than the tombstones kept: `changes` then holds every
    watched key that exists, and a key that is not among them does not exist."""


@runtime_checkable
class Store(Protocol):
    """The c10d store's methods; any c10d store is one."""

    def set(self, key: str, value: Value, /) -> None:
        """Set the key, whether or not it exists."""

    def get(self, key: str, /) -> bytes:
        """Return the key's value; wait for the key when it does not exist."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the decimal number under the key (absent: 0) and return the sum."""
        ...

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """Set the key to `desired` if its value is `expected`; return the value after."""
        ...

    def wait(self, keys: Sequence[str], timeout: Any = ..., /) -> None:
        """Return once all keys exist."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Say whether all keys exist, without waiting."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete the key; say whether it existed."""
        ...

    def append(self, key: str, value: Value, /) -> None:
        """Append to the key's value (absent: empty)."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of all keys, as of one moment; wait until all exist."""
        ...

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """Set all keys in one step."""

    def num_keys(self) -> int:
        """Return how many keys the store holds, under all prefixes."""
        ...

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long a call of this handle may take by default."""

    @property
    def timeout(self) -> timedelta:
        """How long a call of this handle may take by default."""
        ...


@runtime_checkable
class WatchStore(Store, Protocol):
    """A store that can also be watched and ties keys to the life of a session."""

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """Set the key; an ephemeral key is deleted when this handle's session ends."""

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """As c10d's; a key set here with `ephemeral` belongs to this handle's session."""
        ...

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """Return what changed after revision `after` among the keys; wait for a change.

        Args:
            keys: the keys or, with `prefix`, what the keys start with.
            after: the revision last seen; 0 to be told of everything that is there.
            timeout: seconds or timedelta; default the handle's timeout.

        Raises:
            StoreTimeout: nothing changed in that time. What changes later is not lost:
                watch again with the same `after`.
        """
        ...

    def close(self) -> None:
        """End the session: its ephemeral keys go, calls blocked on this handle raise."""

    @property
    def characteristics(self) -> Characteristics:
        """What this store guarantees."""
        ...


@dataclass(frozen=True, slots=True)
class Characteristics:
    """What a store guarantees; a store that declares nothing guarantees nothing here."""

    shared: bool = False
    """Other processes can reach the same data."""
    watch: bool = False
    """Has `watch`, as `WatchStore` describes it."""
    sessions: bool = False
    """Has ephemeral keys, gone when the session of their owner ends."""
    at_most_once: bool = False
    """A call takes effect at most once, and an error says whether it may have."""
    concurrent: bool = False
    """A blocked call delays no other call on the same handle."""
    authenticated: bool = False
    """Both ends prove that they hold the job's token before anything is answered."""
    encrypted: bool = False
    """Nobody on the network can read or change what is said (TLS)."""
    survives_host: bool = False
    """The data outlives the loss of any one host."""


def characteristics_of(store: Store) -> Characteristics:
    """Return what a store declares; for a c10d store, that it is shared at most."""
    declared = getattr(store, "characteristics", None)
    return declared if isinstance(declared, Characteristics) else Characteristics()


def require(store: Store, purpose: str, *names: str) -> None:
    """Refuse a store too weak for a purpose.

    Args:
        store: the store to be used.
        purpose: what needs the guarantees, for the message, e.g. "the rendezvous".
        names: fields of `Characteristics` that must hold.

    Raises:
        StoreTooWeakError: names every guarantee that is missing.
    """
    known = {f.name for f in fields(Characteristics)}
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"no such characteristic: {', '.join(unknown)} (known: {sorted(known)})")
    declared = characteristics_of(store)
    missing = [n for n in names if not getattr(declared, n)]
    if missing:
        raise StoreTooWeakError(
            f"{purpose} needs a store with {', '.join(names)}, and {type(store).__name__} lacks "
            f"{', '.join(missing)}; use the regrow store server (regrow.store.start_server)"
        )


def to_bytes(value: Value) -> bytes:
    """Return a value as the bytes that are stored: text as UTF-8."""
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise StoreValueError(
        f"a store's value is str or bytes, not {type(value).__name__}: {value!r:.80}"
    )


def to_seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
