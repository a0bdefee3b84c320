"""What a link over a c10d store needs of it: small calls, and waits that can be interrupted.

A thread that waits in a c10d store waits in C++: it hears no signal, and keeps every other call on
the same handle waiting. So each wait is made by a thread of its own with a handle of its own, taken
from those that are idle, and whoever wants to know waits for that thread, in Python. What has to be
done as a whole is done there too: an exception that a signal's handler raises ends the waiting, and
leaves nothing half done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from regrow.inprocess._link import LinkError, LinkLostError
from regrow.store import StoreError

if TYPE_CHECKING:
    from regrow.store import Store

T = TypeVar("T")

LONGEST = 3600.0
"""Seconds after which a waiting thread looks whether anybody still wants to know."""


class Keys:
    """The keys of one group in a c10d store.

    Args:
        connect: returns a new handle on the store.
        prefix: in front of every key.

    Raises:
        LinkLostError: the store cannot be reached; so do all calls.
    """

    def __init__(self, connect: Callable[[], Store], prefix: str) -> None:
        self._connect = connect
        self._prefix = prefix
        self._wanted: SimpleQueue[_Wanted | None] = SimpleQueue()
        self._under_way = 0
        self._threads = 0
        self._lock = threading.Lock()
        self.closed = False
        self._store = self._new()

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a number, at first 0, and return the sum."""
        return self._call(lambda store: int(store.add(self._prefix + key, amount)))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda store: store.set(self._prefix + key, value))

    def set_first(self, key: str, value: str) -> str:
        """Set a key unless it is there, and return what it holds."""
        held = self._call(lambda store: store.compare_set(self._prefix + key, "", value))
        return bytes(held).decode()

    def append(self, key: str, line: str) -> None:
        """Append a line to a key."""
        text = f"{line}\n"

        def append(store: Store) -> None:
            try:
                store.append(self._prefix + key, text)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, ConnectionError):
                    raise
                self._append_by_turns(store, self._prefix + key, text)

        self._call(append)

    def lines(self, key: str) -> list[str]:
        """Return the lines of a key; none if it is not there."""

        def read(store: Store) -> list[str]:
            name = self._prefix + key
            return bytes(store.get(name)).decode().splitlines() if store.check([name]) else []

        return self._call(read)

    def there(self, key: str) -> bool:
        """Say whether a key is there."""
        return self._call(lambda store: bool(store.check([self._prefix + key])))

    def numbers(self, keys: Sequence[str]) -> list[int]:
        """Return the numbers that were added up under these keys."""
        return [self.add(key, 0) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there of these keys."""
        for key in keys:
            self._call(lambda store, key=key: store.delete_key(self._prefix + key))  # type: ignore[misc]

    def wait(
        self, key: str, seconds: float, first: Callable[[], object] | None = None
    ) -> str | None:
        """Return the value of a key once it is there, or None if it is not within that time.

        Args:
            key: which.
            seconds: how long to wait.
            first: what is done before, as a whole.
        """
        return self._hand_over(_Wanted(first, self._prefix + key, time.monotonic() + seconds))

    def whole(self, action: Callable[[], object]) -> None:
        """Do something as a whole."""
        self._hand_over(_Wanted(action, "", 0.0))

    def _hand_over(self, wanted: _Wanted) -> str | None:
        with self._lock:
            self._under_way += 1
            short = self._under_way > self._threads
        if short:
            threading.Thread(target=self._serve, name="regrow-c10d-wait", daemon=True).start()
        self._wanted.put(wanted)
        try:
            wanted.over.wait()
        finally:
            wanted.given_up = True
        if isinstance(wanted.error, LinkError):
            raise wanted.error
        if wanted.error is not None:
            raise LinkLostError(f"the store is gone: {wanted.error}") from wanted.error
        return wanted.value

    def close(self) -> None:
        """Have all waiting threads end, those in the store when they next look."""
        self.closed = True
        self._wanted.put(None)

    def _serve(self) -> None:
        """Do what is wanted, one after the other, with a handle of this thread's own."""
        with self._lock:
            self._threads += 1
        store: Store | None = None
        while (wanted := self._wanted.get()) is not None:
            try:
                if wanted.first is not None:
                    wanted.first()
                if wanted.key:
                    store = store or self._new()
                    wanted.value = self._wait(store, wanted)
            except (LinkError, StoreError, OSError, RuntimeError) as error:
                wanted.error = error
            with self._lock:
                self._under_way -= 1
            wanted.over.set()
        self._wanted.put(None)  # for the next thread
        with suppress(AttributeError, StoreError):  # torch's stores have no end of their own
            store.close()  # type: ignore[union-attr]

    def _wait(self, store: Store, wanted: _Wanted) -> str | None:
        while True:
            left = min(max(wanted.deadline - time.monotonic(), 0.001), LONGEST)
            begun = time.monotonic()
            try:
                store.wait([wanted.key], timedelta(seconds=left))
            except (StoreError, RuntimeError):
                if time.monotonic() - begun < left * 0.9:  # it was not the time that was over
                    raise
            else:
                return bytes(store.get(wanted.key)).decode()
            if wanted.given_up or self.closed or time.monotonic() >= wanted.deadline:
                return None

    def _new(self) -> Store:
        try:
            return self._connect()
        except (StoreError, OSError, RuntimeError) as error:
            raise LinkLostError(f"the store cannot be reached: {error}") from error

    def _call(self, call: Callable[[Store], T]) -> T:
        try:
            return call(self._store)
        except (StoreError, OSError, RuntimeError) as error:
            raise LinkLostError(f"the store is gone: {error}") from error

    @staticmethod
    def _append_by_turns(store: Store, key: str, text: str) -> None:
        """Append where the store itself cannot (a FileStore): one after the other."""
        seen = b""
        while True:
            longer = seen + text.encode()
            now = bytes(store.compare_set(key, seen.decode(), longer.decode()))
            if now == longer:
                return
            seen = now


class _Wanted:
    """Something to do, and then a key to wait for, if any."""

    __slots__ = ("deadline", "error", "first", "given_up", "key", "over", "value")

    def __init__(self, first: Callable[[], object] | None, key: str, deadline: float) -> None:
        self.first = first
        self.key = key
        self.deadline = deadline
        self.over = threading.Event()
        self.given_up = False
        self.value: str | None = None
        self.error: Exception | None = None
