"""The interface of a store: `Store`.

`Store` has only the names and semantics of PyTorch's c10d store, so a c10d store works wherever a
`Store` is expected. A `MemoryStore` and a `StoreClient` also have `delete_prefix` and `close`.

c10d's own documentation leaves some semantics open. These follow its TCPStore:

- `get`, `multi_get` and `wait` block until every key exists, at most for the time-out.
- `add` keeps the number as decimal text: after `add("k", 5)`, `get("k")` is `b"5"`. A missing key
  counts as 0. If a client adds to a text, c10d's server drops its connection; at 64 bits, c10d's
  number wraps around. These stores raise `StoreValueError` in both cases.
- `compare_set` returns the value after the call. If the key does not exist, it sets the key when
  `expected` is empty; otherwise it sets nothing and returns `expected`.
- `check([])` is True, `wait([])` returns at once, an empty value is a value.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from regrow.store.errors import StoreValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

Value = str | bytes
Timeout = timedelta | float


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


def to_key(key: str) -> str:
    """Return the key as a plain str; refuse another type (StoreValueError)."""
    if type(key) is not str:
        if isinstance(key, str):
            return str(key)
        raise StoreValueError(f"a store's key is a str, not {type(key).__name__}: {key!r:.80}")
    return key


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
