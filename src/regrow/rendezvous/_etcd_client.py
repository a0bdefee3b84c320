"""What regrow asks of etcd: reads and transactions, leases, watches.

The words are those of etcd's API (`KV`, `Lease`, `Watch`), in the JSON of its gateway: keys and
values in base64, 64-bit numbers as text, what is zero or empty left out.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from regrow.rendezvous._etcd_answers import NOT_FOUND, PRECONDITION, EtcdError, Message
from regrow.rendezvous._etcd_http import EtcdHttp
from regrow.rendezvous._etcd_member import Stream

TXN_OPS = 100
"""Operations in one transaction; etcd allows 128 (--max-txn-ops)."""


class Pair(NamedTuple):
    """A key as it is, or as it became."""

    key: str
    value: bytes | None
    """None: it was deleted."""
    revision: int
    """Of etcd, at which it last changed."""


class Outcome(NamedTuple):
    """What came of a transaction."""

    succeeded: bool
    """Whether its comparisons held."""
    revision: int
    """Of etcd, after it."""
    found: tuple[tuple[Pair, ...], ...]
    """For each operation, the pairs that it read; nothing for a write."""
    counts: tuple[int, ...]
    """For each operation, how many keys it found or deleted."""


class Seen(NamedTuple):
    """One message of a watch."""

    revision: int
    """Everything up to this revision of etcd has been told."""
    pairs: tuple[Pair, ...]
    """What changed, in order."""


class Compacted(Exception):
    """The history that a watch asked for is not kept any more, or is not that of this etcd."""


def get(key: str, prefix: bool = False, at: int = 0, only: str = "") -> Message:
    """The operation that reads a key, or all that begin with it.

    Args:
        at: as of this revision; 0: as of now.
        only: "keys" or "count": leave out the rest.
    """
    found: Message = _where(key, prefix)
    if at:
        found["revision"] = str(at)
    if only:
        found[f"{only}_only"] = True
    return {"request_range": found}


def put(key: str, value: bytes, lease: int) -> Message:
    """The operation that sets a key, for as long as the lease lives."""
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def delete(key: str, prefix: bool = False) -> Message:
    """The operation that deletes a key, or all that begin with it."""
    return {"request_delete_range": _where(key, prefix)}


def unchanged(key: str, revision: int) -> Message:
    """The comparison that holds while the key's revision is this one; 0: while there is no key."""
    return {"key": _b64(key), "target": "MOD", "mod_revision": str(revision)}


def below(key: str, value: bytes) -> Message:
    """The comparison that holds while there is a key, and its value sorts below this one."""
    return {"key": _b64(key), "target": "VALUE", "result": "LESS", "value": _b64(value)}


def none_with(prefix: str) -> Message:
    """The comparison that holds while no key begins so."""
    return {**_where(prefix, True), "target": "CREATE", "create_revision": "0"}


class EtcdClient:
    """Typed calls to one cluster; thread-safe."""

    def __init__(self, http: EtcdHttp) -> None:
        self.http = http

    def txn(
        self,
        compare: Sequence[Message],
        then: Sequence[Message],
        otherwise: Sequence[Message] = (),
        *,
        timeout: float,
    ) -> Outcome:
        """Run one transaction: if all comparisons hold `then`, else `otherwise`.

        It may be run twice, when the member that ran it could not say so any more.
        """
        body = {"compare": [*compare], "success": [*then], "failure": [*otherwise]}
        (answer,) = self.http.call("kv/txn", body, timeout=timeout)
        parts: list[Message] = [
            next(iter(part.values()), {}) for part in answer.get("responses", [])
        ]
        return Outcome(
            answer.get("succeeded", False),
            int(answer["header"]["revision"]),
            tuple(tuple(_pair(kv) for kv in part.get("kvs", [])) for part in parts),
            tuple(int(part.get("count") or part.get("deleted") or 0) for part in parts),
        )

    def grant(self, seconds: int, id: int, *, timeout: float) -> None:
        """Make a lease of this id, or let the one that exists begin anew."""
        wanted = {"TTL": str(seconds), "ID": str(id)}
        while True:
            try:
                self.http.call("lease/grant", wanted, timeout=timeout)
                break
            except EtcdError as error:
                if error.code != PRECONDITION:
                    raise
            if self.renew([id], timeout=timeout)[0]:
                break

    def renew(self, ids: Sequence[int], *, timeout: float) -> list[bool]:
        """Let leases begin anew; say of each whether it still existed."""
        wanted = [{"ID": str(id)} for id in ids]
        answers = self.http.call("lease/keepalive", *wanted, timeout=timeout, renews=True)
        alive = {int(answer["ID"]): int(answer.get("TTL", 0)) > 0 for answer in answers}
        return [alive.get(id, False) for id in ids]

    def revoke(self, id: int, *, timeout: float) -> None:
        """End a lease, and delete its keys; one that does not exist is fine."""
        try:
            self.http.call("lease/revoke", {"ID": str(id)}, timeout=timeout)
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    def watch(self, keys: Sequence[tuple[str, bool]], revision: int, *, timeout: float) -> Watch:
        """Watch keys from a revision on.

        Args:
            keys: each key, and whether all that begin with it are meant.
            revision: the first one of which to be told.
        """
        since = {"start_revision": str(revision)}
        wanted = [{"create_request": {**_where(key, prefix), **since}} for key, prefix in keys]
        return Watch(self.http.stream("watch", *wanted, timeout=timeout), revision)


class Watch:
    """What changes, as it changes; a `Stream`, from a revision on."""

    def __init__(self, stream: Stream, revision: int) -> None:
        self._stream = stream
        self._revision = revision
        self.wait_at_most = stream.wait_at_most
        self.close = stream.close
        self.end = stream.end

    def __iter__(self) -> Iterator[Seen]:
        """Return what changes; ends only as `wait_at_most` says.

        Raises:
            Compacted: read anew, and watch from there.
            EtcdError: the watch has ended; another may go on from the last revision.
        """
        for message in self._stream:
            if "compact_revision" in message:
                raise Compacted
            # Of a future that it need not have: its data may be lost, and it counts from 1 again.
            if message.get("created") and int(message["header"]["revision"]) < self._revision - 1:
                raise Compacted
            if message.get("canceled"):
                why = message.get("cancel_reason", "it gave no reason")
                raise EtcdError(f"etcd ended the watch: {why}")
            pairs = tuple(_changed(event) for event in message.get("events", []))
            if pairs:
                yield Seen(max(pair.revision for pair in pairs), pairs)


def _where(key: str, prefix: bool) -> Message:
    if not prefix:
        return {"key": _b64(key)}
    first = key.encode()
    return {"key": _b64(first), "range_end": _b64(first[:-1] + bytes([first[-1] + 1]))}


def _b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()


def _pair(kv: Message) -> Pair:
    return Pair(
        b64decode(kv["key"]).decode(),
        b64decode(kv.get("value", "")),
        int(kv["mod_revision"]),
    )


def _changed(event: Message) -> Pair:
    pair = _pair(event["kv"])
    return pair._replace(value=None) if event.get("type") == "DELETE" else pair
