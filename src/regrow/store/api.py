"""The interface of a store: `Store`, `WatchStore`, and the guarantees that a store declares.

`Store` has only the names and semantics of PyTorch's c10d store, so a c10d store works wherever a
`Store` is expected. `WatchStore` adds methods that regrow needs and a c10d store lacks. Code that
needs more than `Store` calls `require`. It refuses a store that is too weak before any code depends
on it.

c10d's own documentation leaves some semantics open. These follow its TCPStore:

- `get`, `multi_get` and `wait` block until every key exists, at most for the time-out.
- `add` keeps the number as decimal text: after `add("k", 5)`, `get("k")` is `b"5"`. A missing key
  counts as 0. If a client adds to a text, c10d's server drops its connection; at 64 bits, c10d's
  number wraps around. These stores raise `StoreValueError` in both cases.
- `compare_set` returns the value after the call. If the key does not exist, it sets the key when
  `expected` is empty; otherwise it sets nothing and returns `expected`.
- `check([])` is True, `wait([])` returns at once, an empty value is a value.

`watch` is level-triggered: it compares the last revision of the caller (`after`) with the current
state. So the caller misses nothing between two calls or over a reconnect. A key that changed ten
times in between is reported once, with its current value. One counter, the revision, numbers all
changes of the whole store. A deleted key leaves a tombstone with its revision.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

from regrow.store.errors import StoreTooWeakError, StoreValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

Value = str | bytes
Timeout = timedelta | float


class Change(NamedTuple):
    """The current state of one key."""

    key: str
    """The name of the key."""
    revision: int
    """The store's revision at which the key last changed."""
    value: bytes | None
    """The value; None: the key was deleted."""


class Changes(NamedTuple):
    """The result of a `watch`."""

    revision: int
    """The store's revision; pass it as `after` to get only later changes."""
    changes: tuple[Change, ...]
    """The watched keys that changed after `after`, oldest change first."""
    snapshot: bool
    """True if `after` is older than the oldest tombstone.

    `changes` then holds every watched key that exists, and all other watched keys do not exist.
    """


@runtime_checkable
class Store(Protocol):
    """The c10d store's methods; any c10d store implements this protocol."""

    def set(self, key: str, value: Value, /) -> None:
        """Set the key, whether or not it exists."""

    def get(self, key: str, /) -> bytes:
        """Return the key's value; wait for the key if it does not exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the decimal number under the key (missing: 0) and return the sum."""

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """Set the key to `desired` if its value is `expected`; return the value after the call."""

    def wait(self, keys: Sequence[str], timeout: Any = ..., /) -> None:
        """Block until all keys exist."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys exist, without waiting."""

    def delete_key(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""

    def append(self, key: str, value: Value, /) -> None:
        """Append to the key's value (missing: empty)."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of all keys at one moment; wait until all keys exist."""

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """Set all keys in one step."""

    def num_keys(self) -> int:
        """Return the number of keys in the store, under all prefixes."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set the default time-out of the calls of this handle."""

    @property
    def timeout(self) -> timedelta:
        """The default time-out of the calls of this handle."""


@runtime_checkable
class WatchStore(Store, Protocol):
    """A store with `watch` and with keys that live as long as a session."""

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """Set the key; an ephemeral key is deleted when this handle's session ends."""

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """Same as in c10d; a key set here with `ephemeral` belongs to this handle's session."""

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """Return the changes of the keys after revision `after`; wait for a change.

        Args:
            keys: the keys or, with `prefix`, the prefixes of the keys.
            after: the last revision that the caller has seen; 0: return all existing keys.
            prefix: whether `keys` are prefixes.
            timeout: seconds or timedelta; default: the handle's time-out.

        Raises:
            StoreTimeout: nothing changed in that time. Later changes are not lost: watch again with
                the same `after`.
        """

    def close(self) -> None:
        """End the session: its ephemeral keys are deleted, and its blocked calls raise."""

    @property
    def characteristics(self) -> Characteristics:
        """The guarantees of this store."""


class Characteristics(NamedTuple):
    """The guarantees of a store; a store that declares none counts as giving none."""

    shared: bool = False
    """Other processes can access the same data."""
    watch: bool = False
    """The store has `watch`, as `WatchStore` describes it."""
    sessions: bool = False
    """The store has ephemeral keys, which are deleted when their owner's session ends."""
    at_most_once: bool = False
    """A call takes effect at most once, and an error reports whether it may have."""
    concurrent: bool = False
    """A blocked call delays no other call on the same handle."""
    authenticated: bool = False
    """Both ends prove that they hold the job's token before the first answer."""
    encrypted: bool = False
    """No third party on the network can read or change the traffic (TLS)."""
    survives_host: bool = False
    """The data outlives the loss of any one host."""


def characteristics_of(store: Store) -> Characteristics:
    """Return the guarantees that a store declares; a c10d store is shared at most."""
    declared = getattr(store, "characteristics", None)
    return declared if isinstance(declared, Characteristics) else Characteristics()


def require(store: Store, purpose: str, *names: str) -> WatchStore:
    """Return the store, or refuse a store that is too weak for a purpose.

    Args:
        store: the store to check.
        purpose: the part that needs the guarantees, for the message, e.g. "the rendezvous".
        names: fields of `Characteristics` that must be true.

    Raises:
        StoreTooWeakError: at least one guarantee is missing; the text names all missing ones.
    """
    declared = characteristics_of(store)
    missing = [n for n in names if not getattr(declared, n)]
    if missing:
        raise StoreTooWeakError(
            f"{purpose} needs a store with {', '.join(names)}, and {type(store).__name__} lacks "
            f"{', '.join(missing)}; use the regrow store server (regrow.store.start_server)"
        )
    return cast("WatchStore", store)


def to_bytes(value: Value) -> bytes:
    """Convert a value to the stored bytes: text as UTF-8."""
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
    """Convert a time-out to seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
