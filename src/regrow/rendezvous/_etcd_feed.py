"""What one node sees of its job in etcd, kept up to date by one watch.

The watch covers the document of the rounds, and the beginnings and ends of nodes: each node has a
key under a lease that it renews with each beat, and which is gone when the lease is. A beat writes
nothing. That is the reason for it: every write is a version that etcd keeps until somebody compacts
its history, and etcd does not do so unless it is told to; 64 nodes that wrote a number every second
would fill its two gigabytes in a few days. What a node hears in a quiet hour is nothing, whatever
the number of nodes.

That a lease has ended is not believed at once. An etcd may revoke the leases of nodes that beat: a
leader that stood still does so when it wakes, before it learns of its successor (etcd issue 15247,
mended in part since). A node that lives finds that out with its next beat, and has another lease;
so one that has none after the time to kill its workers has ended.

A watch that breaks goes on from the last revision, on another member; if that is compacted, all is
read anew and compared. A member that is silent is noticed by the calls (`_etcd_http`), which cut
the watch as well.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from regrow.rendezvous._etcd_answers import EtcdClosed, EtcdError, EtcdUnreachable
from regrow.rendezvous._etcd_client import Compacted, Pair, Watch, get
from regrow.rendezvous._patience import Bounds

if TYPE_CHECKING:
    from regrow.rendezvous._etcd_job import EtcdJob

_PAUSE = 0.2
"""Seconds between two tries to begin the watch."""

_PROOF = Bounds().kill
"""Seconds for which a node's key has to be gone."""


class EtcdFeed:
    """A thread that follows a job; all methods are thread-safe.

    Args:
        job: which one.
    """

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._state = f"{job.root}state"
        self._nodes = f"{job.root}nodes/"
        self._news = threading.Condition()
        self._document: Pair | None = None
        self._alive: set[str] = set()
        self._gone: dict[str, float] = {}
        self._heard = False
        self._heeded = threading.local()
        self._broken: Exception | None = None
        self._interrupted = False
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._revision = 0
        self._thread: threading.Thread | None = None

    def wait(self, revision: int, timeout: float) -> None:
        """Block until the document is of another revision, a node has ended, or time is up.

        It may return for something that the caller has seen already.

        Raises:
            EtcdError: time is up, and for want of a member nothing could have been heard.
        """
        self._start()
        deadline = time.monotonic() + timeout
        with self._news:
            while not self._interrupted:
                # Each thread is woken by each end, also by one that came before this wait.
                now = time.monotonic()
                ended, again = self._ended(now)
                if getattr(self._heeded, "ended", frozenset()) != ended:
                    self._heeded.ended = ended
                    return
                if self._heard and self._token() != revision:
                    return
                if now >= deadline:
                    if self._broken is not None:
                        raise self._broken
                    return
                self._news.wait(min(deadline - now, again - now, threading.TIMEOUT_MAX))

    def lives(self, timeout: float) -> tuple[frozenset[str], frozenset[str]]:
        """Return the ids of the nodes that live, and of those that were seen to end.

        Raises:
            EtcdError: nothing has been heard yet, nor was within the timeout (s).
        """
        self._start()
        deadline = time.monotonic() + timeout
        with self._news:
            while not self._heard and not self._interrupted:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._broken or EtcdError(f"etcd has told nothing for {timeout:g} s")
                self._news.wait(min(left, threading.TIMEOUT_MAX))
            return frozenset(self._alive), self._ended(time.monotonic())[0]

    def document(self, current: bool = False) -> Pair | None:
        """Return the document as it was last heard of, which may be an older one; None: never.

        Args:
            current: only while the watch goes on, so that it is the latest that there is to hear.
        """
        with self._news:
            return None if current and self._broken is not None else self._document

    def interrupt(self) -> None:
        """Wake every `wait`, now and later."""
        with self._news:
            self._interrupted = True
            self._news.notify_all()

    def close(self) -> None:
        """End the thread, and every `wait`."""
        self.interrupt()
        with self._news:
            self._closed.set()
            watch, thread = self._watch, self._thread
        if watch is not None:
            watch.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _ended(self, now: float) -> tuple[frozenset[str], float]:
        """Return who has ended, and when the next one may have; with the lock."""
        due = {id: gone + _PROOF for id, gone in self._gone.items()}
        ended = frozenset(id for id, at in due.items() if at <= now)
        return ended, min((at for at in due.values() if at > now), default=float("inf"))

    def _token(self) -> int:
        return self._document.revision if self._document is not None else 0

    def _start(self) -> None:
        with self._news:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="regrow-etcd-watch", daemon=True
                )
                self._thread.start()

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
                self._closed.wait(random.uniform(0, _PAUSE))  # a member may lag behind for a while
            except EtcdError as error:
                self._break(error)
                if not isinstance(error, EtcdUnreachable):
                    self._revision = 0  # to read anew says what is wrong, and mends a token
                # Not all at once: the nodes of a job lose a member at the same moment.
                self._closed.wait(random.uniform(0, _PAUSE))
            except Exception as error:  # noqa: BLE001 - raised by whoever waits
                self._break(error)
                return

    def _read(self) -> None:
        """Take in all that is there, as of one revision."""
        outcome = self._job.client.txn(
            [],
            [get(self._state), get(self._nodes, prefix=True, only="keys")],
            timeout=self._job.timeout,
        )
        document, nodes = outcome.found
        alive = {pair.key.removeprefix(self._nodes) for pair in nodes}
        with self._news:
            self._document = document[0] if document else None
            for id in self._alive - alive:
                self._gone[id] = time.monotonic()
            for id in alive:
                self._gone.pop(id, None)
            self._alive = alive
            self._revision = outcome.revision
            self._heard = True
            self._news.notify_all()

    def _follow(self) -> None:
        """Take in what changes, until the watch breaks."""
        watch = self._job.client.watch(
            [(self._state, False), (self._nodes, True)],
            self._revision + 1,
            timeout=self._job.timeout,
        )
        with self._news:
            self._watch = watch
            self._broken = None
            self._news.notify_all()
            if self._closed.is_set():
                watch.close()
        try:
            watch.wait_at_most(None)
            for seen in watch:
                with self._news:
                    for pair in seen.pairs:
                        self._take(pair)
                    self._revision = seen.revision
                    self._news.notify_all()
        finally:
            watch.end()

    def _take(self, pair: Pair) -> None:
        if pair.key == self._state:
            self._document = pair if pair.value is not None else None
            return
        id = pair.key.removeprefix(self._nodes)
        if pair.value is None:
            self._alive.discard(id)
            self._gone[id] = time.monotonic()
        else:
            self._alive.add(id)
            self._gone.pop(id, None)

    def _break(self, error: Exception) -> None:
        with self._news:
            self._broken = error
            self._news.notify_all()
