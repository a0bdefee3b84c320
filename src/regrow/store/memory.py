"""A store inside one process: for one node, and for tests.

It runs the same `KeySpace` as the store server, under one lock. A blocked call parks its query and
waits on a lock of its own. The thread that changes a key also distributes the answers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from regrow.store.api import Timeout, to_key
from regrow.store.calls import Handle, timeout_message
from regrow.store.errors import StoreClosedError, StoreTimeout
from regrow.store.keyspace import Answer, KeySpace, NotReady, ParkedQuery, Query
from regrow.store.limits import DEFAULT_LIMITS, DEFAULT_TIMEOUT, Limits

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class _Shared:
    """The state that all handles of one store share."""

    space: KeySpace
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocked: dict[ParkedQuery, tuple[MemoryStore, threading.Lock]] = field(default_factory=dict)
    """The handle of each blocked call, and the lock that is released when the call may continue."""


class MemoryStore(Handle):
    """A thread-safe store in the memory of this process.

    Each handle is a session. `session()` returns another handle on the same keys.

    Args:
        timeout: default time-out of a call, seconds or timedelta.
        limits: sizes and counts that the store refuses to exceed.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(timeout)
        self._shared = _Shared(KeySpace(limits))
        self._closed = False

    def session(self) -> MemoryStore:
        """Return another handle on the same keys, with a session of its own."""
        other = MemoryStore(self._seconds)
        other._shared = self._shared
        return other

    def delete_prefix(self, prefix: str, /) -> int:
        """See `StoreClient.delete_prefix`."""
        return cast("int", self._change("delete_prefix", to_key(prefix)))

    def close(self) -> None:
        """End this handle's session; calls blocked on it raise StoreClosedError."""
        shared = self._shared
        with shared.lock:
            self._closed = True
            for parked, (handle, _) in list(shared.blocked.items()):
                if handle is self:
                    shared.space.unpark(parked)
                    self._unblock(parked)

    def _change(self, name: str, *args: object) -> object:
        with self._shared.lock:
            self._check_open()
            try:
                call: Callable[..., object] = getattr(self._shared.space, name)
                return call(*args)
            finally:
                self._distribute()

    def _read(self, query: Query, seconds: float) -> Answer:
        shared, gate = self._shared, threading.Lock()
        gate.acquire()
        with shared.lock:
            self._check_open()
            answer = shared.space.answer(query)
            if not isinstance(answer, NotReady):
                return answer
            parked = shared.space.park(query)
            shared.blocked[parked] = self, gate
        opened = False
        try:
            opened = gate.acquire(timeout=min(max(seconds, 0), threading.TIMEOUT_MAX))
        finally:  # also after an interrupted wait, e.g. by Ctrl-C
            with shared.lock:
                if shared.blocked.pop(parked, None) is not None:
                    shared.space.unpark(parked)
        if not isinstance(parked.answer, NotReady):
            return parked.answer
        if opened:
            raise StoreClosedError(_CLOSED)
        raise StoreTimeout(timeout_message(query, seconds))

    def _distribute(self) -> None:
        """Unblock the calls that have an answer now."""
        for parked in self._shared.space.take_woken():
            self._unblock(parked)

    def _unblock(self, parked: ParkedQuery) -> None:
        _, gate = self._shared.blocked.pop(parked)
        gate.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(_CLOSED)


_CLOSED = "this handle of the MemoryStore was closed"
