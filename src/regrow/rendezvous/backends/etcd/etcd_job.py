"""The keys of one job in etcd: their lease, the writes to them, and the watch that follows them.

    <etcd_prefix>/<run_id>/state        the document of the rounds
    <etcd_prefix>/<run_id>/nodes/<id>   exists while the node lives, under its own lease
    <etcd_prefix>/<run_id>/store/...    the keys of the rounds' stores
    <etcd_prefix>/<run_id>/writers/...  the last write of each process

All keys but those of the nodes are under one lease, the lease of the job. Its id is derived from
the names, so no node has to ask for it. Every live node renews it. So however a job ends, its keys
are gone when the lease expires. Until then, a node that comes late reads in the document that the
job is over.

A write is repeated on another member when a member does not answer. The first attempt may have
taken effect, or may do so later. So each writer numbers its writes, and sets its own key to the
number in the same transaction. The transaction is refused if the number is already there. So a
write takes effect once, and an attempt that was overtaken has no effect. Each thread is a writer:
its writes keep their order, and do not wait for other threads.

One watch keeps a copy of the state up to date. It covers all keys of the job: the document of the
rounds, the keys of the rounds' stores, and the keys of the nodes. Each node has a key under a
lease. The node renews the lease with each heartbeat, and etcd deletes the key when the lease ends.
So a heartbeat writes nothing. This matters because etcd keeps each write as a version until a
client compacts its history. By default, etcd does not compact it. 64 nodes that each write a number
every second would fill its two gigabytes in a few days. While nothing changes, a node receives
nothing, however many nodes there are.

A node does not act on the end of a lease at once. etcd may revoke the leases of live nodes: a
leader that was suspended does so when it resumes, before it detects its successor (etcd issue
15247, partly fixed since). A live node notices this at its next heartbeat and gets another lease.
So only a node that still has no lease after the time to kill its workers counts as ended.

After a watch breaks, the next one continues from the last revision, on another member. If etcd has
compacted that revision, the thread of the watch reads all keys again and compares them. The calls
detect a silent member (`etcd_client`), and then also close its watches.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from regrow.rendezvous.backends.etcd.etcd_client import (
    NOT_FOUND,
    TXN_OPS,
    Compacted,
    EtcdClient,
    EtcdClosed,
    EtcdError,
    EtcdTooLarge,
    EtcdUnreachable,
    Message,
    Outcome,
    Pair,
    below,
    delete,
    get,
    none_with,
    put,
    unchanged,
)
from regrow.rendezvous.peer.cas_store import CasStore, Entry
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.store import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    names_of,
)
from regrow.utils import start_thread

if TYPE_CHECKING:
    from regrow.store import Timeout

LIFE = 600
"""Seconds for which the document of a job remains after its last node."""
_PAUSE = 0.2
"""Seconds between two attempts to start the watch."""
PROOF = Bounds().kill
"""Seconds for which a node's key has to be missing before the node counts as ended."""


class _Writer(threading.local):
    """The state of one thread's writes.

    Args:
        root: the prefix of the job's keys.
    """

    def __init__(self, root: str) -> None:
        self.key = f"{root}writers/{secrets.token_hex(8)}"
        self.written = 0
        """The number of the last write."""
        self.ready = False
        """Whether the writer's key and the job's lease exist."""


class EtcdJob:
    """One process's access to the keys of one job; thread-safe.

    Args:
        client: the client of the cluster.
        prefix: the common prefix of the keys of all jobs.
        run_id: the id of the job.
    """

    def __init__(self, client: EtcdClient, prefix: str, run_id: str) -> None:
        self.client = client
        self.root = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}/"
        self.lease = lease_id(self.root)
        self._writer = _Writer(self.root)
        self.state = f"{self.root}state"
        self._nodes = f"{self.root}nodes/"
        self._store = f"{self.root}store/"
        self._changed = threading.Condition()
        self._document: Pair | None = None
        self._alive: set[str] = set()
        self._gone: dict[str, float] = {}
        self._reads = 0
        self._read_at = 0
        self._set_at: dict[str, int] = {}
        self._noticed = threading.local()
        self._broken: Exception | None = None
        self._interrupted = False
        self._closed = threading.Event()
        self._revision = 0
        self._thread: threading.Thread | None = None

    def write(
        self,
        compare: Sequence[Message],
        then: Sequence[Message],
        otherwise: Sequence[Message] = (),
    ) -> Outcome:
        """Run a transaction that takes effect once, or not at all.

        Returns:
            As `EtcdClient.txn`. If the transaction succeeded and its answer was lost, `found`
            belongs to `otherwise`.

        Raises:
            EtcdUnreachable: the transaction may have taken effect, or may do so later.
            EtcdError: it had no effect.
        """
        writer = self._writer
        writer.written += 1
        number = b"%016d" % writer.written
        for again in (True, False):
            try:
                if not writer.ready:
                    self._begin(writer)
                outcome = self.client.txn(
                    [below(writer.key, number), *compare],
                    [put(writer.key, number, self.lease), *then],
                    [get(writer.key), *otherwise],
                )
            except EtcdError as error:
                if error.code != NOT_FOUND or not again:
                    raise
                writer.ready = False  # the lease has ended, and with it every key of the job
                continue
            _, *found = outcome.found
            if outcome.succeeded or outcome.found[0]:
                break
            writer.ready = False  # this writer's key is gone: the job was cleaned up
        done = outcome.succeeded or any(pair.value == number for pair in outcome.found[0])
        return Outcome(done, outcome.revision, tuple(found))

    def _begin(self, writer: _Writer) -> None:
        self.client.grant(LIFE, self.lease)
        self.client.txn(
            [unchanged(writer.key, 0)],
            # Not a lower number: an attempt of an earlier write may still arrive.
            [put(writer.key, b"%016d" % (writer.written - 1), self.lease)],
        )
        writer.ready = True

    def tidy_if_last(self) -> None:
        """Delete the keys that only live nodes need, if no node is left.

        The document remains, so that a node that comes late learns that the job is over.
        """
        no_node = none_with(f"{self.root}nodes/")
        unneeded = [delete(f"{self.root}{part}/", prefix=True) for part in ("store", "writers")]
        self.client.txn([no_node], unneeded)

    # --- the watch

    def wait(self, revision: int, timeout: float) -> None:
        """Block until the document's revision changes, a node ends, or the timeout is over.

        It may also return for a change that the caller has already seen.

        Raises:
            EtcdError: the timeout is over, and no member was connected that could report a change.
        """
        self._start()
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._interrupted:
                # Each end of a node wakes each thread once, also if it came before this wait.
                now = time.monotonic()
                ended, again = self._ended(now)
                if getattr(self._noticed, "ended", frozenset()) != ended:
                    self._noticed.ended = ended
                    return
                if self._reads and self._token() != revision:
                    return
                if now >= deadline:
                    if self._broken is not None:
                        raise self._broken
                    return
                self._changed.wait(min(deadline - now, again - now, threading.TIMEOUT_MAX))

    def lives(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the ids of the live nodes, and the ids of the nodes that have ended.

        Raises:
            EtcdError: nothing has arrived from etcd yet, nor within the client's time limit.
        """
        self._start()
        timeout = self.client.limit()
        with self._changed:
            if not self._changed.wait_for(lambda: self._reads or self._interrupted, timeout):
                raise self._broken or EtcdError(f"etcd has sent nothing for {timeout:g} s")
            return frozenset(self._alive), self._ended(time.monotonic())[0]

    def document(self, current: bool = False) -> Pair | None:
        """Return the latest received document, which may be out of date; None if there is none.

        Args:
            current: return it only while the watch is connected, so that it is the latest.
        """
        with self._changed:
            return None if current and self._broken is not None else self._document

    def wait_for_key(self, key: str, revision: int, timeout: float, ended: threading.Event) -> None:
        """Block until a key of the store is set, or until the caller has to read it again.

        Args:
            key: the full name of the key.
            revision: the etcd revision at which the caller read the key.
            timeout: seconds.
            ended: ends the call when the caller sets it and then calls `wake`.
        """
        self._start()
        deadline = time.monotonic() + timeout
        with self._changed:
            reads = self._reads
            while not (ended.is_set() or self._closed.is_set()):
                left = deadline - time.monotonic()
                if self._broken is not None:  # the caller's next read raises the error
                    self._changed.wait(min(max(left, 0.0), _PAUSE))
                    return
                missed = self._reads != reads or self._read_at > revision
                if missed or self._set_at.get(key, 0) > revision or left <= 0:
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        """Wake all blocked calls, so that they check again whether they have ended."""
        with self._changed:
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End every `wait`, now and later."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close all connections, and end the watch and every `wait`."""
        self.interrupt()
        self.client.close()
        with self._changed:
            self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _ended(self, now: float) -> tuple[frozenset[str], float]:
        """Return the ended nodes, and when the next may count as ended; requires the lock."""
        due = {id: gone + PROOF for id, gone in self._gone.items()}
        ended = frozenset(id for id, at in due.items() if at <= now)
        return ended, min((at for at in due.values() if at > now), default=float("inf"))

    def _token(self) -> int:
        return self._document.revision if self._document is not None else 0

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed.is_set():
                self._thread = start_thread(self._run, "regrow-etcd-watch")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if not self._revision:
                    self._read()
                self._follow()
            except EtcdClosed as error:
                self._break(error)
                return
            except Compacted:
                self._revision = 0
                self._closed.wait(random.uniform(0, _PAUSE))  # a member may be behind for a while
            except EtcdError as error:
                self._break(error)
                if not isinstance(error, EtcdUnreachable):
                    self._revision = 0  # a new read reports the error, and renews an expired token
                # Random pauses: all nodes of a job lose a member at the same moment.
                self._closed.wait(random.uniform(0, _PAUSE))
            except Exception as error:  # noqa: BLE001 - the waiting threads raise it
                self._break(error)
                return

    def _read(self) -> None:
        """Read all keys of the job, as of one revision."""
        reads = get(self.state), get(self._nodes, prefix=True, keys_only=True)
        outcome = self.client.txn([], reads)
        document, nodes = outcome.found
        alive = {pair.key.removeprefix(self._nodes) for pair in nodes}
        with self._changed:
            self._document = document[0] if document else None
            for id in self._alive - alive:
                self._gone[id] = time.monotonic()
            for id in alive:
                self._gone.pop(id, None)
            self._alive = alive
            self._revision = self._read_at = outcome.revision
            self._reads += 1
            self._changed.notify_all()

    def _follow(self) -> None:
        """Apply changes until the watch breaks."""
        # One watch for all keys: several watches lose the order of revisions while they catch up.
        following = self._revision + 1
        with closing(self.client.watch(self.root, following)) as watch:
            for pairs in watch:
                with self._changed:
                    self._broken = None
                    for pair in pairs:
                        self._apply(pair)
                        self._revision = pair.revision
                    self._changed.notify_all()

    def _apply(self, pair: Pair) -> None:
        if pair.key == self.state:
            self._document = pair if pair.value is not None else None
        elif pair.key.startswith(self._store):
            if pair.value is None:
                self._set_at.pop(pair.key, None)
            else:
                self._set_at[pair.key] = pair.revision
        elif pair.key.startswith(self._nodes):
            id = pair.key.removeprefix(self._nodes)
            if pair.value is None:
                self._alive.discard(id)
                self._gone[id] = time.monotonic()
            else:
                self._alive.add(id)
                self._gone.pop(id, None)

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()


def lease_id(name: str) -> int:
    """Return the id of the lease that belongs to a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1


class EtcdStore(CasStore):
    """The store of a job's rounds, in etcd.

    The watch that every node keeps (`EtcdJob`) wakes a call that waits for a key. A request that
    etcd refuses for its size raises StoreLimitError; etcd's default limit is 1.5 MB a request.
    `multi_set` of more than a hundred keys is several transactions, in order.

    Args:
        job: the keys of the job.
        timeout: default limit of a call that waits for a key, in seconds or as a timedelta.
    """

    def __init__(self, job: EtcdJob, timeout: Timeout = 300.0) -> None:
        super().__init__(_EtcdCells(job), timeout)


class _EtcdCells:
    """The cells of one job; see `Cells`.

    A session is for one round. The second session after it deletes the keys that it has written:
    all nodes have left the round by then.
    """

    name = "the EtcdStore"

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._root = f"{job.root}store/"
        self._ended = threading.Event()
        self._written: set[str] = set()
        self._sessions: list[_EtcdCells] = []

    def session(self) -> _EtcdCells:
        new = _EtcdCells(self._job)
        self._sessions.append(new)
        if len(self._sessions) > 2:
            with suppress(StoreError):  # else the keys expire with the lease of the job
                self._sessions.pop(0)._delete_written()
        return new

    def close(self) -> None:
        self._ended.set()
        self._job.wake()

    def read(self, keys: Sequence[str]) -> list[Entry]:
        entries: list[Entry] = []
        revision = 0
        with self._errors(f"to read {names_of(keys)}", applied="no"):
            for at in range(0, len(keys), TXN_OPS):
                wanted = [get(self._root + key, at=revision) for key in keys[at : at + TXN_OPS]]
                outcome = self._job.client.txn([], wanted)
                revision = revision or outcome.revision
                for pairs in outcome.found:
                    entries.append(Entry(*pairs[0][1:]) if pairs else Entry(None, revision))
        return entries

    def replace(self, key: str, seen: Entry, value: bytes | None) -> bool:
        name = self._root + key
        self._written.add(name)
        held = unchanged(name, 0 if seen.value is None else seen.version)
        then = delete(name) if value is None else put(name, value, self._job.lease)
        with self._errors(f"to change {key!r}", applied="unknown"):
            return self._job.write([held], [then]).succeeded

    def put(self, values: Mapping[str, bytes]) -> None:
        names = {self._root + key: value for key, value in values.items()}
        self._written.update(names)
        puts = [put(name, value, self._job.lease) for name, value in names.items()]
        self._write(f"to set {names_of([*values])}", puts)

    def wait(self, key: str, seen: Entry, timeout: float) -> None:
        self._job.wait_for_key(self._root + key, seen.version, timeout, self._ended)

    def count(self) -> int:
        with self._errors("to count the keys", applied="no"):
            every = get(self._root, prefix=True, keys_only=True)
            return len(self._job.client.txn([], [every]).found[0])

    def _delete_written(self) -> None:
        deletes = [delete(name) for name in self._written]
        self._write("to delete the keys of an old round", deletes)

    def _write(self, what: str, operations: Sequence[Message]) -> None:
        with self._errors(what, applied="unknown"):
            for at in range(0, len(operations), TXN_OPS):
                self._job.write([], operations[at : at + TXN_OPS])

    @contextmanager
    def _errors(self, what: str, applied: Literal["no", "unknown"]) -> Iterator[None]:
        """Convert etcd errors into store errors."""
        try:
            yield
        except EtcdClosed as error:
            raise StoreClosedError(f"{error}") from error
        except EtcdUnreachable as error:
            raise StoreConnectionError(f"failed {what}: {error}", applied=applied) from error
        except EtcdTooLarge as error:
            raise StoreLimitError(f"failed {what}: {error}") from error
        except EtcdError as error:
            raise StoreError(f"failed {what}: {error}") from error
