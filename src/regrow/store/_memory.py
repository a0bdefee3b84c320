"""A store inside one process: for one node, and for tests.

It runs the same `KeySpace` as the store server, under one lock. A blocked call parks its
query and waits on a lock of its own; whoever changes a key hands the answers out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from regrow.store._api import (
    DEFAULT_TIMEOUT,
    Changes,
    Characteristics,
    Timeout,
    Value,
    to_bytes,
    to_seconds,
)
from regrow.store._errors import StoreClosedError, StoreTimeout
from regrow.store._keyspace import Answer, KeySpace, NotReady, Parked, Query
from regrow.store._limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class _Blocked:
    """One blocked call: its handle, and the gate that opens when it may go on."""

    __slots__ = ("gate", "handle")

    def __init__(self, handle: MemoryStore) -> None:
        self.handle = handle
        self.gate = threading.Lock()
        self.gate.acquire()


@dataclass(slots=True)
class _Shared:
    """What all handles of one store share."""

    space: KeySpace
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocked: dict[Parked, None] = field(default_factory=dict)


class MemoryStore:
    """A thread-safe store in the memory of this process; a `WatchStore`.

    Each handle is a session: `session()` gives another handle on the same keys, and
    `close()` deletes the ephemeral keys set through the handle it is called on.

    Args:
        timeout: how long a call may take by default, seconds or timedelta.
        limits: sizes and counts that the store refuses to exceed.
    """

    characteristics = Characteristics(watch=True, sessions=True, at_most_once=True, concurrent=True)

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, limits: Limits = DEFAULT_LIMITS) -> None:
        self._shared = _Shared(KeySpace(limits))
        self._timeout = timedelta(seconds=to_seconds(timeout))
        self._closed = False

    def session(self) -> MemoryStore:
        """Return another handle on the same keys, with a session of its own."""
        other = MemoryStore(self._timeout)
        other._shared = self._shared
        return other

    def close(self) -> None:
        """End this handle's session; calls blocked on it raise StoreClosedError."""
        shared = self._shared
        with shared.lock:
            self._closed = True
            mine = [p for p in shared.blocked if cast("_Blocked", p.tag).handle is self]
            for parked in mine:
                shared.space.unpark(parked)
                del shared.blocked[parked]
                cast("_Blocked", parked.tag).gate.release()
            shared.space.drop_owner(self)
            self._hand_out()

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """See `WatchStore.set`."""
        new = to_bytes(value)
        self._change(lambda space: space.set(key, new, self if ephemeral else None))

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        return cast("bytes", self._read(Query("get", (key,)), self._timeout))

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        return self._change(lambda space: space.add(key, amount))

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """See `WatchStore.compare_set`."""
        old, new = to_bytes(expected), to_bytes(desired)
        owner = self if ephemeral else None
        return self._change(lambda space: space.compare_set(key, old, new, owner))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        self._read(Query("wait", tuple(keys)), self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return self._change(lambda space: space.check(keys))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return self._change(lambda space: space.delete(key))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        more = to_bytes(value)
        self._change(lambda space: space.append(key, more))

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        query = Query("multi_get", tuple(keys))
        return cast("list[bytes]", self._read(query, self._timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """See `Store.multi_set`."""
        new = [to_bytes(value) for value in values]
        self._change(lambda space: space.multi_set(keys, new))

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return self._change(lambda space: space.num_keys())

    def set_timeout(self, timeout: Timeout, /) -> None:
        """See `Store.set_timeout`."""
        self._timeout = timedelta(seconds=to_seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long a call of this handle may take by default."""
        return self._timeout

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """See `WatchStore.watch`."""
        query = Query("watch", tuple(keys), after, prefix)
        return cast("Changes", self._read(query, self._timeout if timeout is None else timeout))

    def _change(self, call: Callable[[KeySpace], T]) -> T:
        with self._shared.lock:
            self._check_open()
            try:
                return call(self._shared.space)
            finally:
                self._hand_out()

    def _read(self, query: Query, timeout: Timeout) -> Answer:
        shared, space = self._shared, self._shared.space
        with shared.lock:
            self._check_open()
            answer = space.answer(query)
            if not isinstance(answer, NotReady):
                return answer
            blocked = _Blocked(self)
            parked = space.park(query, blocked)
            shared.blocked[parked] = None
        seconds = to_seconds(timeout)
        opened = False
        try:
            opened = blocked.gate.acquire(timeout=min(max(seconds, 0), threading.TIMEOUT_MAX))
        finally:  # also when the wait was interrupted, e.g. by Ctrl-C
            with shared.lock:
                if shared.blocked.pop(parked, parked) is None:
                    space.unpark(parked)
        if not isinstance(parked.answer, NotReady):
            return parked.answer
        if opened:
            raise StoreClosedError(_CLOSED)
        raise StoreTimeout(timeout_message(query, seconds))

    def _hand_out(self) -> None:
        for parked in self._shared.space.take_woken():
            del self._shared.blocked[parked]
            cast("_Blocked", parked.tag).gate.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(_CLOSED)


_CLOSED = "this handle of the MemoryStore was closed"


def timeout_message(query: Query, seconds: float) -> str:
    """Say what did not happen in time."""
    names = ", ".join(map(repr, query.keys[:8])) + (", ..." if len(query.keys) > 8 else "")
    if query.kind == "watch":
        what = f"nothing changed after revision {query.after} under {names}"
    else:
        what = f"not all of these keys were set: {names}"
    return f"timed out after {seconds:g} s: {what}"
