"""The rendezvous over a store of torch's, or any other with the methods of one.

The document is one key, `torch.rendezvous.<run id>`, replaced by the store's compare-and-set: its
value is the document in base64, then a point and the number of the version with the name of its
writer. So every value ever written is another one, and the value itself is the fencing token.

A c10d store has no way to be watched that this could use. A blocked `wait` cannot be ended by
another thread, and one that times out writes two lines to the console. So a waiter asks, soon and
then ever more rarely, for the number of the version, which is a key of its own beside the document
and a few bytes long. Who writes a document sets it afterwards; should the writer be killed before,
the document itself is looked at once a second. A store of regrow's is watched instead.

Why the connection is cloned: all threads that share a TCPStore wait for each other, and a program
may be blocked in the very store that it has given here. No call that is made here blocks.
"""

from __future__ import annotations

import binascii
import os
import random
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from regrow.rendezvous._backend import LivenessRendezvousBackend, Token
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousStateError,
)
from regrow.store import StoreError, StoreTimeout, characteristics_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store import Store, WatchStore

T = TypeVar("T")

_NOTHING = b"cmVncm93IGhhcyBub3RoaW5nIGhlcmU="
"""Stands for no document: where a key is missing, `compare_set` cannot be told to say so."""
_FIRST_PAUSE = 0.005  # seconds between two questions for the version
_LONGEST_PAUSE = 0.25
_GROWTH = 1.5
_DOCUMENT_PAUSE = 1.0  # between two looks at the document itself
_WATCH = 0.5  # seconds for which a watch lasts before an interrupt is looked at


class C10dRendezvousBackend(LivenessRendezvousBackend):
    """The document and the beats of one job in a c10d store.

    Args:
        store: a c10d store, or a regrow store.
        run_id: the id of the job.

    Raises:
        RendezvousConnectionError: the store cannot be reached.
        ValueError: the run id is empty.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._key = f"torch.rendezvous.{run_id}"
        self._version = f"{self._key}/version"
        self._me = os.urandom(6).hex()
        self._interrupted = threading.Event()
        self._given = store
        self._watches = characteristics_of(store).watch
        self._store = self._call(lambda: _own_connection(store))
        self._value()

    @property
    def name(self) -> str:
        """See base class."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        return self._decode(self._value())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        if token is not None and not isinstance(token, bytes):
            now = self.get_state()
            return None if now is None else (*now, False)
        old = token or _NOTHING
        count = _count(old) + 1
        mine = b64encode(state) + b".%d-%s" % (count, self._me.encode())
        value = self._call(lambda: self._store.compare_set(self._key, old, mine))
        if value == mine:
            self._call(lambda: self._store.set(self._version, str(count)))
        now = self._decode(value)
        return None if now is None else (*now, value == mine)

    def wait_state(self, token: Token, timeout: float) -> None:
        """See base class."""
        deadline = time.monotonic() + timeout
        old = token or _NOTHING
        if self._watches:
            self._watch(old, deadline)
        else:
            self._ask(old, deadline)

    def _watch(self, old: bytes, deadline: float) -> None:
        store = cast("WatchStore", self._store)
        after = 0
        while not self._interrupted.is_set():
            left = deadline - time.monotonic()
            try:
                seen = self._call(
                    lambda: store.watch([self._key], after, timeout=max(min(left, _WATCH), 0.0))  # noqa: B023
                )
            except RendezvousConnectionError as error:
                if not isinstance(error.__cause__, StoreTimeout):
                    raise
                if left <= 0:
                    return
            else:
                if any(change.value != old for change in seen.changes):
                    return
                after = seen.revision

    def _ask(self, old: bytes, deadline: float) -> None:
        count, pause, looked = _count(old), _FIRST_PAUSE, time.monotonic()
        while not self._interrupted.is_set():
            if self._call(lambda: self._store.add(self._version, 0)) > count:
                return
            now = time.monotonic()
            if now - looked >= _DOCUMENT_PAUSE:
                looked = now
                if self._value() != old:
                    return
            left = deadline - now
            if left <= 0:
                return
            self._interrupted.wait(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        self._call(lambda: self._store.set(self._beat_of(id), str(count)))

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class."""
        # To add nothing is the one way to read a key that may be missing without being blocked.
        counts = {id: self._call(lambda: self._store.add(self._beat_of(id), 0)) for id in ids}  # noqa: B023
        return {id: count for id, count in counts.items() if count}

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return nothing: the store does not tell whose connection is closed."""
        return {}

    def forget(self, id: str) -> None:
        """See base class."""
        self._call(lambda: self._store.delete_key(self._beat_of(id)))

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted.set()

    def close(self) -> None:
        """See base class; the store that was given stays open."""
        self._interrupted.set()

    def _beat_of(self, id: str) -> str:
        return f"{self._key}/beat/{id}"

    def _value(self) -> bytes:
        # `get` would block on a store that was emptied.
        return self._call(lambda: self._store.compare_set(self._key, "", _NOTHING))

    def _decode(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == _NOTHING:
            return None
        try:
            return b64decode(value.partition(b".")[0], validate=True), value
        except binascii.Error as error:
            raise RendezvousStateError(
                f"the state of the rendezvous is corrupt: the key {self._key!r} of "
                f"{type(self._given).__name__} is not in base64 ({error}); it begins with "
                f"{value[:60]!r}"
            ) from error

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (OSError, RuntimeError, StoreError, ValueError) as error:
            raise RendezvousConnectionError(
                f"the connection to the C10d store of the rendezvous ({type(self._given).__name__},"
                f" key {self._key!r}) has failed: {error}"
            ) from error


def _count(value: bytes) -> int:
    number = value.rpartition(b".")[2].partition(b"-")[0]
    return int(number) if b"." in value and number.isdigit() else 0


def _own_connection(store: Store) -> Store:
    """Return a handle on the store whose calls do not wait for those of other handles."""
    clone = getattr(store, "clone", None)
    if clone is None or characteristics_of(store).concurrent:
        return store
    try:
        own: Store = clone()
    except RuntimeError as error:
        if "pure virtual" not in str(error):  # else it is a store written in Python without one
            raise
        return store
    return own
