"""A c10d store over cells; a cell is a value with read, compare-and-set and wait operations.

etcd and a shared directory provide the cells. A call that changes a key reads its cell, and applies
the call to a `KeySpace` with this one key, so it means the same as in regrow's other stores. It
then replaces the cell if the cell has not changed since the read; otherwise it starts again. A call
that waits for keys reads all of the keys, waits for a change of a missing key, and reads all again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from regrow.store import (
    Handle,
    KeySpace,
    NotReady,
    Query,
    StoreClosedError,
    StoreTimeout,
    Timeout,
    timeout_message,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Entry(NamedTuple):
    """The content of a cell at the time of a read."""

    value: bytes | None
    """None: the key does not exist."""
    version: int
    """Identifies the content that was read; only the cells compare versions."""


class Cells(Protocol):
    """The cells of one job, one for each key. Several threads may call all methods concurrently.

    The methods raise StoreError. `read` and `wait` set its `applied` to "no". `replace` and `put`
    set it to "unknown" if the change may have happened.
    """

    @property
    def name(self) -> str:
        """The name of the store in error texts."""

    def read(self, keys: Sequence[str]) -> list[Entry]:
        """Return the cells of the keys, all as of the same moment."""

    def replace(self, key: str, seen: Entry, value: bytes | None) -> bool:
        """Replace a cell if it is unchanged since `seen`; return whether it was. None deletes."""

    def put(self, values: Mapping[str, bytes]) -> None:
        """Replace cells unconditionally."""

    def wait(self, key: str, seen: Entry, timeout: float) -> None:
        """Block until the cell may have changed, for `timeout` seconds, or until `close`."""

    def count(self) -> int:
        """Return how many keys exist."""

    def session(self) -> Self:
        """Return another handle on the same cells, with its own `close`."""

    def close(self) -> None:
        """Wake all current and later calls of `wait` on this handle."""


class CasStore(Handle):
    """A `Store` over cells. Several threads may use it; a blocked call delays no other call.

    Args:
        cells: the cells that hold the keys; `close` closes this handle on them.
        timeout: default time limit of a call that waits, in seconds or as a timedelta.
    """

    def __init__(self, cells: Cells, timeout: Timeout = 300.0) -> None:
        super().__init__(timeout)
        self._cells = cells
        self._closed = False

    def session(self) -> CasStore:
        """Return another handle on the same keys; its `close` ends only its own calls."""
        return CasStore(self._cells.session(), self._seconds)

    def close(self) -> None:
        """End this handle: its blocked calls and all later ones raise StoreClosedError."""
        self._closed = True
        self._cells.close()

    def _change(self, name: str, *args: Any) -> object:
        self._check_open()
        if name in ("set", "multi_set"):
            space = KeySpace()
            getattr(space, name)(*args)
            keys: Sequence[str] = args[0] if name == "multi_set" else args[:1]
            self._cells.put({key: _value(space, key) or b"" for key in keys})
            return None
        key, deadline = args[0], time.monotonic() + self._seconds
        while True:
            (seen,) = self._entries([key])
            space = _key_space([key], [seen])
            result: object = getattr(space, name)(*args)
            new = _value(space, key)
            if new == seen.value or self._cells.replace(key, seen, new):
                return result
            if time.monotonic() >= deadline:
                raise StoreTimeout(
                    f"timed out after {self._seconds:g} s: other processes changed {key!r} "
                    f"before each attempt to update it"
                )

    def _read(self, query: Query, seconds: float) -> object:
        if query.kind == "num_keys":
            self._check_open()
            return self._cells.count()
        deadline = time.monotonic() + seconds
        keys = list(dict.fromkeys(query.keys))
        while True:
            entries = self._entries(keys)
            answer = _key_space(keys, entries).answer(query)
            if not isinstance(answer, NotReady):
                return answer
            missing = {k: e for k, e in zip(keys, entries, strict=True) if e.value is None}
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(timeout_message(Query("wait", tuple(missing)), seconds))
            self._cells.wait(*next(iter(missing.items())), left)

    def _entries(self, keys: Sequence[str]) -> list[Entry]:
        self._check_open()
        entries = self._cells.read(keys)
        self._check_open()
        return entries

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"this handle of {self._cells.name} was closed")


def _key_space(keys: Sequence[str], entries: Sequence[Entry]) -> KeySpace:
    """Return the keys that exist, without a store around them."""
    space = KeySpace()
    for key, entry in zip(keys, entries, strict=True):
        if entry.value is not None:
            space.set(key, entry.value)
    return space


def _value(space: KeySpace, key: str) -> bytes | None:
    answer = space.answer(Query("multi_get", (key,)))
    return answer[0] if isinstance(answer, list) else None
