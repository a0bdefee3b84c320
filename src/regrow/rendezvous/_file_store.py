"""A key-value store in a shared directory: what the agents of a job tell one another.

Every key is a value replaced by compare-and-set (`_file_cell`) in a directory of its own, so keys
do not get in one another's way, and whoever waits for one is woken by that one alone. It is for a
few small keys a round. Calls for several keys take them one after the other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import quote

from regrow.rendezvous._file_cell import Cell, GarbledError
from regrow.rendezvous._file_watch import Watch
from regrow.store import (
    Characteristics,
    StoreClosedError,
    StoreConnectionError,
    StoreProtocolError,
    StoreTimeout,
    StoreValueError,
)
from regrow.store._api import Timeout, Value, to_bytes, to_seconds

_THERE = b"+"
_DELETED = b"-"
_LONGEST_NAME = 200  # bytes; file systems take 255


class DirectoryStore:
    """A `Store` in a directory; all methods may be called by several threads at once.

    Args:
        keys: an existing directory for the keys.
        drafts: one on the same file system for what is being written.
        shared: whether other hosts may change things, too.
        timeout: how long a call may take by default, seconds or timedelta.
    """

    characteristics = Characteristics(shared=True, at_most_once=True, concurrent=True)

    def __init__(
        self, keys: str, drafts: str, *, shared: bool, timeout: Timeout = timedelta(seconds=300)
    ) -> None:
        self._keys = keys
        self._drafts = drafts
        self._watch = Watch(shared=shared)
        self._timeout = timedelta(seconds=to_seconds(timeout))

    def session(self) -> DirectoryStore:
        """Return another handle on the same keys, which can be closed by itself."""
        return DirectoryStore(
            self._keys, self._drafts, shared=self._watch.shared, timeout=self._timeout
        )

    def set(self, key: str, value: Value, /) -> None:
        """See `Store.set`."""
        new = to_bytes(value)
        self._change(key, lambda _: new)

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""

        def plus(old: bytes | None) -> bytes:
            number = old or b"0"
            fits = number.removeprefix(b"-").isdigit()
            if not fits or not -(2**63) <= int(number) + amount < 2**63:
                raise StoreValueError(
                    f"cannot add {amount} to the value of {key!r}: {number!r:.80} is not a number, "
                    f"or the sum is none of 64 bits"
                )
            return b"%d" % (int(number) + amount)

        return int(self._change(key, plus) or b"0")

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """See `Store.compare_set`."""
        old, new = to_bytes(expected), to_bytes(desired)

        def swap(now: bytes | None) -> bytes | None:
            return new if (now if now is not None else b"") == old else now

        after = self._change(key, swap)
        return old if after is None else after

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        limit = self._timeout.total_seconds() if timeout is None else to_seconds(timeout)
        deadline = time.monotonic() + limit
        with self._reached("no"):
            while missing := [key for key in keys if self._value(key) is None]:
                directory = self._directory(missing[0])
                _make(directory)
                there = partial(_is_there, self._cell(missing[0]))
                if self._watch.wait(directory, there, max(deadline - time.monotonic(), 0.0)):
                    continue
                if self._watch.interrupted:
                    raise StoreClosedError(f"the store in {self._keys} was closed")
                names = ", ".join(map(repr, missing[:8])) + (", ..." if missing[8:] else "")
                raise StoreTimeout(f"timed out after {limit:g} s: not set: {names}")

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        with self._reached("no"):
            return all(self._value(key) is not None for key in keys)

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        existed = False

        def delete(old: bytes | None) -> None:
            nonlocal existed
            existed = old is not None

        self._change(key, delete)
        return existed

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        more = to_bytes(value)
        self._change(key, lambda old: (old or b"") + more)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of all keys; wait until all exist."""
        while True:
            self.wait(keys)
            with self._reached("no"):
                values = [self._value(key) for key in keys]
            found = [value for value in values if value is not None]
            if len(found) == len(keys):  # else one was deleted meanwhile
                return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """Set all keys, one after the other."""
        new = [to_bytes(value) for value in values]
        if len(new) != len(keys):
            raise StoreValueError(f"multi_set got {len(keys)} keys and {len(new)} values")
        for key, value in zip(keys, new, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        with self._reached("no"):
            names = os.listdir(self._keys)
            cells = [Cell(os.path.join(self._keys, name), self._drafts) for name in names]
            return sum(map(_is_there, cells))

    def set_timeout(self, timeout: Timeout, /) -> None:
        """See `Store.set_timeout`."""
        self._timeout = timedelta(seconds=to_seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long a call of this handle may take by default."""
        return self._timeout

    def close(self) -> None:
        """End the calls that are blocked, and all later ones, with StoreClosedError."""
        self._watch.close()

    def _change(self, key: str, new: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace a key's value by what `new` makes of it; None stands for no key."""
        self._check_open()
        with self._reached("unknown"):
            _make(self._directory(key))
            cell = self._cell(key)
            while True:
                version, content = cell.read()
                old = _value_in(content)
                value = new(old)
                if value == old:
                    return value
                content = _DELETED if value is None else _THERE + value
                if cell.replace(version, content):
                    return value

    def _value(self, key: str) -> bytes | None:
        self._check_open()
        try:
            return _value_in(self._cell(key).read()[1])
        except FileNotFoundError:
            Path(self._keys).stat()
            return None

    def _cell(self, key: str) -> Cell:
        return Cell(self._directory(key), self._drafts)

    def _directory(self, key: str) -> str:
        return os.path.join(self._keys, file_name(key))

    def _check_open(self) -> None:
        if self._watch.interrupted:
            raise StoreClosedError(f"the store in {self._keys} was closed")

    @contextlib.contextmanager
    def _reached(self, applied: str) -> Iterator[None]:
        try:
            yield
        except GarbledError as error:
            raise StoreProtocolError(str(error)) from error
        except (StoreTimeout, StoreConnectionError):  # which are OSErrors as well
            raise
        except OSError as error:
            raise StoreConnectionError(
                f"the store in {self._keys} cannot be reached: {error.strerror or error}: "
                f"{error.filename or self._keys}",
                applied="no" if applied == "no" else "unknown",
            ) from error


def file_name(text: str) -> str:
    """Return a name for a file that stands for any text, one that people can read if it is short.

    No two texts have the same name, and none is the name of a directory's own or hidden.
    """
    name = "=" + quote(text, safe="+,@^", errors="surrogatepass")
    if len(name) <= _LONGEST_NAME:
        return name
    from hashlib import sha256

    return f"{name[:100]}#{sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _is_there(cell: Cell) -> bool:
    return _value_in(cell.read()[1]) is not None


def _value_in(content: bytes) -> bytes | None:
    return content[1:] if content[:1] == _THERE else None


def _make(directory: str) -> None:
    with contextlib.suppress(FileExistsError):
        Path(directory).mkdir(0o700)
