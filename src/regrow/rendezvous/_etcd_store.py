"""A store over etcd: what the nodes of a round tell each other.

It has the names and semantics of the c10d store (`regrow.store`). A call that changes something
takes effect at most once (`_etcd_job`); one that reads and changes (`add`, `append`, `compare_set`,
`delete_key`) is a transaction on the revision that was read, and is done again when another was
faster. A call that waits reads, and watches from the revision of what it read; when the member that
it watches is lost, it goes on with another.

What etcd refuses for its size (1.5 MB a request unless it was told otherwise) is a StoreLimitError.
`multi_set` of more than a hundred keys is several transactions, in order.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal, TypeVar

from regrow.rendezvous._etcd_answers import (
    EXHAUSTED,
    INVALID,
    EtcdClosed,
    EtcdError,
    EtcdUnreachable,
    Message,
)
from regrow.rendezvous._etcd_client import (
    TXN_OPS,
    Compacted,
    Outcome,
    Watch,
    delete,
    get,
    put,
    unchanged,
)
from regrow.store import (
    Characteristics,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreTimeout,
    StoreValueError,
)
from regrow.store._api import Timeout, Value, to_bytes, to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from regrow.rendezvous._etcd_job import EtcdJob

T = TypeVar("T")
Applied = Literal["no", "unknown"]
_PAUSE = 0.2
"""Seconds before a wait that has lost its member goes on with another."""
_LONGEST_WAIT = 86400.0
"""Seconds for which one watch is read; the kernel takes no more than some weeks."""
_INT64 = 1 << 63


class EtcdStore:
    """The keys of one job in etcd; thread-safe, a blocked call delays no other.

    Args:
        job: where the keys are.
        timeout: how long a call that waits for a key may wait by default, seconds or timedelta.
        rubbish: what may be deleted along with the next write; shared by the sessions of a store.
    """

    def __init__(
        self, job: EtcdJob, timeout: Timeout = 300.0, rubbish: _Rubbish | None = None
    ) -> None:
        self._job = job
        self._root = f"{job.root}store/"
        self._timeout = timedelta(seconds=to_seconds(timeout))
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._closed = threading.Event()
        self._written: set[str] = set()
        self._sessions: list[EtcdStore] = []
        self._rubbish = rubbish or _Rubbish()
        self.characteristics = Characteristics(
            shared=True,
            at_most_once=True,
            concurrent=True,
            encrypted=job.client.http.access.tls is not None,
            survives_host=True,
        )

    def session(self) -> EtcdStore:
        """Return another handle on the same keys; `close` ends the calls of its own handle.

        A session is for one round. What is written in it is deleted again by the one after the
        next: by then, everyone has left the round.
        """
        with self._lock:
            new = EtcdStore(self._job, self._timeout, self._rubbish)
            self._sessions.append(new)
            if len(self._sessions) > 2:
                self._rubbish.add(self._sessions.pop(0)._written)
            return new

    def close(self) -> None:
        """End this handle: calls blocked on it raise StoreClosedError. The keys stay."""
        with self._lock:
            self._closed.set()
            for watch in self._watches:
                watch.close()

    def set(self, key: str, value: Value, /) -> None:
        """See `Store.set`."""
        self.multi_set([key], [value])

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        return self._await([key], self._timeout)[0]

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""

        def added(old: bytes | None) -> tuple[bytes, int]:
            try:
                total = int(old or b"0") + amount
            except ValueError as error:
                raise StoreValueError(
                    f"cannot add to {key!r}: its value {old!r:.80} is no number"
                ) from error
            if not -_INT64 <= total < _INT64:
                raise StoreValueError(f"{key!r} would become {total}, which is beyond 64 bits")
            return b"%d" % total, total

        return self._update(key, added)

    def compare_set(self, key: str, expected: Value, desired: Value, /) -> bytes:
        """See `Store.compare_set`."""
        want, new = to_bytes(expected), to_bytes(desired)

        def swapped(old: bytes | None) -> tuple[bytes | None, bytes]:
            if old is None:
                return (new, new) if not want else (None, want)
            return (new, new) if old == want else (old, old)

        return self._update(key, swapped)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        self._await(keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        with self._errors(f"to look for {_names(keys)}"):
            found, _ = self._read(keys, only="count")
            return len(found) == len(set(keys))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return self._update(key, lambda old: (None, old is not None))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        more = to_bytes(value)
        self._update(key, lambda old: ((old or b"") + more, None))

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        return self._await(keys, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """See `Store.multi_set`; more than a hundred keys are not set in one step."""
        if len(keys) != len(values):
            raise StoreValueError(f"multi_set was given {len(keys)} keys and {len(values)} values")
        last = {self._root + key: to_bytes(value) for key, value in zip(keys, values, strict=True)}
        puts = [(name, put(name, value, self._job.lease)) for name, value in last.items()]
        for at in range(0, len(puts), TXN_OPS):
            with self._errors(f"to set {_names(keys)}", applied="unknown"):
                self._write([], dict(puts[at : at + TXN_OPS]))

    def num_keys(self) -> int:
        """See `Store.num_keys`; of this job."""
        with self._errors("to count the keys"):
            outcome = self._txn([], [get(self._root, prefix=True, only="count")])
            return outcome.counts[0]

    def set_timeout(self, timeout: Timeout, /) -> None:
        """See `Store.set_timeout`."""
        self._timeout = timedelta(seconds=to_seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long a call that waits for a key may wait by default."""
        return self._timeout

    def _update(self, key: str, change: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Replace a value by what becomes of it (None: nothing), and return what that gives."""
        name = self._root + key
        deadline = time.monotonic() + to_seconds(self._timeout)
        with self._errors(f"to change {key!r}", applied="unknown"):
            pairs = self._txn([], [get(name)]).found[0]
            while True:
                old = pairs[0].value if pairs else None
                new, result = change(old)
                if new == old:
                    return result
                then = delete(name) if new is None else put(name, new, self._job.lease)
                revision = pairs[0].revision if pairs else 0
                outcome = self._write([unchanged(name, revision)], {name: then}, [get(name)])
                if outcome.succeeded:
                    return result
                if time.monotonic() >= deadline:
                    raise StoreTimeout(f"{key!r} was changed by others all the time")
                pairs = outcome.found[0]

    def _await(self, keys: Sequence[str], timeout: Timeout) -> list[bytes]:
        """Return the values of all keys as of one moment, once all exist."""
        seconds = to_seconds(timeout)
        deadline = time.monotonic() + seconds
        names = [self._root + key for key in keys]
        while True:
            with self._errors(f"to read {_names(keys)}"):
                values, revision = self._read(keys)
                if len(values) < len(set(keys)):
                    self._follow(values, frozenset(names), revision, deadline)
            if len(values) == len(set(keys)):
                return [values[name] for name in names]
            if time.monotonic() >= deadline:
                missing = [key for key in keys if self._root + key not in values]
                raise StoreTimeout(
                    f"timed out after {seconds:g} s: not all of these keys were set: "
                    f"{_names(missing)}"
                )

    def _follow(
        self, values: dict[str, bytes], names: frozenset[str], revision: int, deadline: float
    ) -> None:
        """Keep values up to date until there is one for each name, or the watch has ended."""
        common = commonprefix([*names])  # noqa: RUF071 - of texts, not of paths
        left = _left(deadline)
        try:
            watch = self._job.client.watch([(common, True)], revision + 1, timeout=left)
        except EtcdError:
            self._closed.wait(min(_PAUSE, left))
            return  # and read anew, which says what is wrong
        with self._lock:
            self._watches.add(watch)
            if self._closed.is_set():
                watch.close()
        try:
            watch.wait_at_most(left)
            for seen in watch:
                for pair in seen.pairs:
                    if pair.key not in names:
                        continue
                    if pair.value is None:
                        values.pop(pair.key, None)
                    else:
                        values[pair.key] = pair.value
                if len(values) == len(names):
                    return
                left = _left(deadline)
                watch.wait_at_most(left)
        except (Compacted, EtcdError):
            self._closed.wait(min(_PAUSE, left))
        finally:
            with self._lock:
                self._watches.discard(watch)
            watch.end()

    def _read(self, keys: Sequence[str], only: str = "") -> tuple[dict[str, bytes], int]:
        """Return the values that there are, by the names in etcd, and the revision they are of."""
        found: dict[str, bytes] = {}
        revision = 0
        names = [*dict.fromkeys(self._root + key for key in keys)]
        for at in range(0, len(names), TXN_OPS):
            part = names[at : at + TXN_OPS]
            outcome = self._txn([], [get(name, only=only, at=revision) for name in part])
            revision = revision or outcome.revision
            for name, pairs, count in zip(part, outcome.found, outcome.counts, strict=True):
                if count:
                    found[name] = (pairs[0].value or b"") if pairs else b""
        return found, revision

    def _write(
        self,
        compare: Sequence[Message],
        then: dict[str, Message],
        otherwise: Sequence[Message] = (),
    ) -> Outcome:
        """Run a transaction on keys by their names, and take some rubbish along."""
        self._written.update(then)
        old = self._rubbish.some(TXN_OPS - len(then), but=then)
        outcome = self._job.write(compare, [*then.values(), *map(delete, old)], otherwise)
        if outcome.succeeded:
            self._rubbish.remove(old)
        return outcome

    def _txn(self, compare: Sequence[Message], then: Sequence[Message]) -> Outcome:
        return self._job.client.txn(compare, then, timeout=self._job.timeout)

    @contextmanager
    def _errors(self, what: str, applied: Applied = "no") -> Iterator[None]:
        """Turn what etcd says into what a store raises."""
        if self._closed.is_set():
            raise StoreClosedError("this handle of the EtcdStore was closed")
        try:
            yield
        except EtcdClosed as error:
            raise StoreClosedError(f"{error}") from error
        except EtcdUnreachable as error:
            raise StoreConnectionError(f"failed {what}: {error}", applied=applied) from error
        except EtcdError as error:
            if error.code in (EXHAUSTED, INVALID) and "large" in str(error):
                raise StoreLimitError(
                    f"failed {what}: {error}; etcd takes 1.5 MB a request unless it is started "
                    "with another --max-request-bytes"
                ) from error
            raise StoreError(f"failed {what}: {error}") from error
        if self._closed.is_set():
            raise StoreClosedError("this handle of the EtcdStore was closed")


class _Rubbish:
    """Names that nobody needs any more; shared by the handles of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        with self._lock:
            self._names.update(names)

    def some(self, count: int, but: Iterable[str]) -> list[str]:
        """Return so many at most; some that are written again are needed again."""
        with self._lock:
            self._names.difference_update(but)
            return [*islice(self._names, count)]

    def remove(self, names: Iterable[str]) -> None:
        with self._lock:
            self._names.difference_update(names)


def _left(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.001), _LONGEST_WAIT)


def _names(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
