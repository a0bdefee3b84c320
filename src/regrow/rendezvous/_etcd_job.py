"""The place of one job in etcd: its keys, the lease under which they stand, and how it is written.

    <etcd_prefix>/<run_id>/state        the document of the rounds
    <etcd_prefix>/<run_id>/nodes/<id>   there while the node lives, by a lease of its own
    <etcd_prefix>/<run_id>/store/...    the keys of the rounds' stores
    <etcd_prefix>/<run_id>/writers/...  the last write of each process

All but the nodes stand under one lease, the job's. Its id follows from the names, so nobody has to
be asked for it, and every node that lives renews it. So a job that is gone, however it went, leaves
nothing behind for longer than the lease lasts. For so long, the document says to whoever comes late
that the job is over.

A write is tried again, on another member, when a member did not answer; and the first try may have
been done, or may yet be. So each writer numbers its writes and sets its own key to the number in
the same transaction, which is refused when the number is there already: a write takes effect once,
and a try that was overtaken never does.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from hashlib import blake2b
from urllib.parse import quote

from regrow.rendezvous._etcd_answers import NOT_FOUND, EtcdError, Message
from regrow.rendezvous._etcd_client import (
    EtcdClient,
    Outcome,
    below,
    delete,
    get,
    none_with,
    put,
    unchanged,
)

LIFE = 600
"""Seconds for which the document of a job outlives its last node."""


class EtcdJob:
    """One process's hold on the keys of one job; thread-safe.

    Args:
        client: of the cluster.
        prefix: what all keys of all jobs begin with.
        run_id: the job.
        timeout: seconds that any call may take.
    """

    def __init__(self, client: EtcdClient, prefix: str, run_id: str, timeout: float) -> None:
        self.client = client
        self.root = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}/"
        self.timeout = timeout
        self.lease = lease_id(self.root)
        self._writer = f"{self.root}writers/{secrets.token_hex(8)}"
        self._written = 0
        self._ready = False
        self._lock = threading.Lock()

    def write(
        self,
        compare: Sequence[Message],
        then: Sequence[Message],
        otherwise: Sequence[Message] = (),
    ) -> Outcome:
        """Run a transaction that takes effect once, or not at all.

        Returns:
            As `EtcdClient.txn`; where a transaction has succeeded and its answer was lost, `found`
            and `counts` are of `otherwise`.

        Raises:
            EtcdUnreachable: it may have taken effect, or may yet.
            EtcdError: it had no effect.
        """
        with self._lock:
            self._written += 1
            number = b"%016d" % self._written
            for again in (True, False):
                try:
                    if not self._ready:
                        self._begin()
                    outcome = self.client.txn(
                        [below(self._writer, number), *compare],
                        [put(self._writer, number, self.lease), *then],
                        [get(self._writer), *otherwise],
                        timeout=self.timeout,
                    )
                except EtcdError as error:
                    if error.code != NOT_FOUND or not again:
                        raise
                    self._ready = False  # the lease is gone, and every key of the job with it
                    continue
                _, *found = outcome.found
                _, *counts = outcome.counts
                if outcome.succeeded or outcome.found[0]:
                    break
                self._ready = False  # this writer's key is gone: the job was cleaned up
        done = outcome.succeeded or any(pair.value == number for pair in outcome.found[0])
        return Outcome(done, outcome.revision, tuple(found), tuple(counts))

    def _begin(self) -> None:
        self.client.grant(LIFE, self.lease, timeout=self.timeout)
        self.client.txn(
            [unchanged(self._writer, 0)],
            # Not less: a try of an earlier write may still come.
            [put(self._writer, b"%016d" % (self._written - 1), self.lease)],
            timeout=self.timeout,
        )
        self._ready = True

    def tidy_if_last(self, timeout: float) -> None:
        """Delete what only the nodes of a job need, if none is left; the document tells the rest.

        Who comes later is to learn from it that the job is over.
        """
        nobody = none_with(f"{self.root}nodes/")
        needless = [delete(f"{self.root}{part}/", prefix=True) for part in ("store", "writers")]
        self.client.txn([nobody], needless, timeout=timeout)


def lease_id(name: str) -> int:
    """Return the id of the lease that belongs to a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1
