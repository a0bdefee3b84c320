"""Client of an etcd cluster: its members, their connections, and typed requests.

regrow uses etcd's documented JSON gateway (`/v3/...`, part of every etcd since 3.4) with the HTTP
client of the standard library. These client libraries were tried first:

- etcd3 is from 2020 and fails with today's protobuf.
- etcd3gw supports one member and no password.
- aetcd is for asyncio, supports one member, and logs in only once.
- etcd-sdk-python needs a protobuf that it does not declare, and logs in only once. Its watches end
  with their connection.

A job depends on what they lack: the next member, the next token, a watch that continues. regrow
would have to add these to any of them. grpcio is well maintained, but the messages and all of the
above would still be regrow's own code. Measured here against etcd 3.4, a read takes 0.46 ms by the
gateway and 0.37 ms by grpcio, with 0.14 and 0.18 ms of processor time. The gateway client needs
8 MB of memory and no thread; grpcio needs 22 MB and several threads, in an agent that may have to
fork.

A call goes first to the member that answered last. If a member does not answer an attempt in time,
the call tries the next one. A turn is one attempt at each member; the turns repeat until the time
of the call is over. The time-out of an attempt is longer at a member that usually answers slowly,
so that one lost packet does not end the attempt. This extension is limited, so that every member
gets an attempt. From the third turn on, the time-out doubles in each turn, because etcd may only be
slow. The shortest time-out of an attempt to renew a lease is half that of other calls: etcd answers
most calls as soon as it has a leader, but a renewal that waits for a leader up to a second later,
so a new attempt is faster. If another member answers, the call closes all connections to the
members that failed in it, watches included. So the heartbeats of a node detect silent members for
all its calls.

A call that timed out may still take effect. So each change can be repeated safely (`etcd_job`
describes how). A lease is the exception. Requests of a host may arrive while the answers to them
are lost. Then each attempt would renew the lease, at one member after the other, and all other
nodes would see the host as alive. So after a silence, a node renews a lease only at a member that
has just answered another request.

The terms of the requests are those of etcd's API (`KV`, `Lease`, `Watch`), in the JSON form of the
gateway. Keys and values are in base64, 64-bit numbers are text, and zero or empty fields are left
out.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from math import inf
from typing import Any, NamedTuple

from regrow.store import endpoint_of, keep_alive
from regrow.utils import Backoff, ready

Message = dict[str, Any]
"""One JSON object of a request or an answer."""

ATTEMPT = 1.0
"""Shortest time-out of an attempt, in seconds."""
_RENEWAL = 0.5
"""Shortest time-out of an attempt to renew a lease, in seconds."""
_USUAL_TIMES = 4
"""The time-out of an attempt is so many times the usual time of the member's answers. TCP repeats a
lost packet after the usual time plus 0.2 s, so its answer still arrives in time."""
_SMOOTHING = 1 / 8
"""The weight of the latest answer in the usual time (RFC 6298, 2.3)."""
_PAUSE = 0.05
"""Seconds between two turns."""
_PROBE = "kv/range", b'{"key": "AA==", "serializable": true}', ""
"""A request that a member answers or denies by itself, without the other members; it changes
nothing."""
_ABSENT = {502, 503, 504}
"""Status codes of a proxy in front of etcd while it has no member to pass requests to."""

# gRPC status codes, as the gateway returns them.
INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION = 3, 5, 7, 8, 9
UNIMPLEMENTED, UNAUTHENTICATED = 12, 16
_FINAL = {3, 5, 6, 7, 8, 9, 11, 12, 16}
"""The codes of errors that another attempt would repeat."""
TXN_OPS = 100
"""Maximum number of operations in one transaction; etcd allows 128 (--max-txn-ops)."""


class EtcdError(Exception):
    """An error that etcd has answered, or an answer that is not from etcd.

    Attributes:
        code: the gRPC status code; 0 if there was none.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    @property
    def final(self) -> bool:
        """Whether another attempt, or another member, would give the same error."""
        return self.code in _FINAL and "too many requests" not in str(self)


class EtcdUnreachable(EtcdError):
    """No member answered in time; a requested change may still take effect."""


class EtcdClosed(EtcdError):
    """This client was closed."""

    final = True


class EtcdTooLarge(EtcdError):
    """A request has more bytes than etcd accepts."""


@dataclass(frozen=True, slots=True)
class Access:
    """The addresses of the cluster, and the credentials for it."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member that may be called."""
    tls: ssl.SSLContext | None = None
    """None: without TLS."""
    user: str = ""
    """Empty: etcd requires no user."""
    password: str = field(default="", repr=False)


class Pair(NamedTuple):
    """A key and its value, as read or as changed."""

    key: str
    value: bytes | None
    """None: the key was deleted."""
    revision: int
    """The etcd revision at which the key last changed."""


class Outcome(NamedTuple):
    """The result of a transaction."""

    succeeded: bool
    """Whether all comparisons held."""
    revision: int
    """The etcd revision after the transaction."""
    found: tuple[tuple[Pair, ...], ...]
    """For each operation, the pairs that it read; empty for a write."""


class Compacted(Exception):
    """etcd no longer keeps the history that a watch needs, or has lost its data."""


def get(key: str, prefix: bool = False, at: int = 0, keys_only: bool = False) -> Message:
    """Build the operation that reads one key, or all keys with this prefix.

    Args:
        key: the key, or the prefix.
        prefix: whether `key` is a prefix.
        at: the revision to read; 0 reads the latest.
        keys_only: whether to leave out the values.
    """
    found: Message = _where(key, prefix)
    if at:
        found["revision"] = str(at)
    if keys_only:
        found["keys_only"] = True
    return {"request_range": found}


def put(key: str, value: bytes, lease: int) -> Message:
    """Build the operation that sets a key, which is deleted when the lease ends."""
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def delete(key: str, prefix: bool = False) -> Message:
    """Build the operation that deletes one key, or all keys with this prefix."""
    return {"request_delete_range": _where(key, prefix)}


def unchanged(key: str, revision: int) -> Message:
    """Build the comparison that holds if the key has this revision; 0: if there is no key."""
    return {"key": _b64(key), "target": "MOD", "mod_revision": str(revision)}


def below(key: str, value: bytes) -> Message:
    """Build the comparison that holds if the key exists and its value sorts below this one."""
    return {"key": _b64(key), "target": "VALUE", "result": "LESS", "value": _b64(value)}


def none_with(prefix: str) -> Message:
    """Build the comparison that holds if no key has this prefix."""
    return {**_where(prefix, True), "target": "CREATE", "create_revision": "0"}


class EtcdClient:
    """Typed calls to one etcd cluster; all methods are thread-safe.

    Args:
        access: the members and the credentials.
        timeout: longest time of a call, in seconds; it may be set later.
    """

    def __init__(self, access: Access, timeout: float) -> None:
        self.access = access
        self.timeout = timeout
        self._until = threading.local()
        members = list(access.endpoints)
        random.shuffle(members)  # spreads the nodes of a job over the members
        self._members = tuple(EtcdMember(host, port, access.tls) for host, port in members)
        self._lock = threading.Lock()
        self._preferred = 0
        self.unreachable = False
        """Whether the last finished call got no answer from any member."""
        self._logging_in = threading.Lock()
        self._token = ""
        self._closed = False

    @property
    def local_addr(self) -> str:
        """This host's address on the route to the member that answered last; empty before that."""
        return self._members[self._preferred].local_addr

    def limit(self) -> float:
        """Return the longest time that a call of this thread may take now, in seconds."""
        until: float = getattr(self._until, "time", inf)
        return max(min(self.timeout, until - time.monotonic()), 0.01)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the time of all calls that this thread makes in the block, in seconds."""
        before = getattr(self._until, "time", inf)
        self._until.time = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._until.time = before

    def call(self, path: str, *messages: Message, renews: bool = False) -> list[Message]:
        """Call the cluster: try one member after the other until one answers.

        Args:
            path: the path of the request, e.g. "kv/range".
            messages: the request; several where the gateway accepts a stream of messages.
            renews: whether the call renews leases.

        Raises:
            EtcdUnreachable: no member answered within `limit`; the text has an error of each.
            EtcdError: etcd answered with an error that another member would repeat.
        """
        timeout = self.limit()
        deadline = time.monotonic() + timeout
        body = encode(messages)
        tried: dict[str, str] = {}
        useless: set[EtcdMember] = set()
        silence, logins, count = self.unreachable, 0, len(self._members)
        for tries in itertools.count():
            member = self._member()
            left = max(deadline - time.monotonic(), 0.01)
            usual = min(_USUAL_TIMES * member.usual_s, timeout / (count + 1))
            attempts = Backoff(max(_RENEWAL if renews else ATTEMPT, usual), left)
            attempt = attempts.pause(max(tries // count, 1))
            try:
                token = self._log_in(member, left, left / (count - tries % count))
                if renews and silence:
                    member.ask(*_PROBE, attempt)
                sent = time.monotonic()
                found = decode(member.ask(path, body, token, attempt), member.name)
                member.answered_in(time.monotonic() - sent)
            except EtcdUnreachable:  # another call is logging in, and this one waited for it
                raise
            except EtcdError as error:
                if self._is_outdated(error) and logins < 2:
                    logins += 1
                    self._token = ""
                elif error.final:
                    raise self._explained(error) from None
                else:
                    useless.add(member)  # the member may be cut off from the others
                tried[member.name] = str(error)
            except (OSError, HTTPException) as error:
                if isinstance(error, TimeoutError):
                    silence = True
                    tried.setdefault(member.name, "no answer in time")  # keeps a more exact error
                else:
                    tried[member.name] = self._describe(error)
                useless.add(member)
            else:
                for other in useless - {member}:  # other calls may wait for these members
                    other.cut()
                self.unreachable = False
                return found
            self._check_open()
            self._leave(member)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if tries % count == count - 1:
                time.sleep(min(_PAUSE, left))
        self.unreachable = True
        for other in useless:  # the next call may not know that these are silent
            other.cut()
        errors = "; ".join(f"{name}: {error}" for name, error in tried.items())
        raise EtcdUnreachable(f"etcd did not answer within {timeout:g} s ({errors})")

    def stream(self, path: str, *messages: Message) -> Generator[Message, None, None]:
        """Yield a stream of answers from the member that answered last.

        Raises:
            EtcdError: the member cannot open the stream, or the stream broke; the next stream may
                come from another member.
        """
        timeout = self.limit()
        member = self._member()
        try:
            token = self._log_in(member, timeout, timeout)
            yield from member.listen(path, encode(messages), token, min(ATTEMPT, timeout))
        except (OSError, HTTPException, ValueError) as error:
            self._check_open()
            self._leave(member)
            raise EtcdUnreachable(
                f"the stream from etcd member {member.name} broke: {self._describe(error)}"
            ) from error
        except EtcdError as error:
            if self._is_outdated(error):
                self._token = ""
            self._leave(member)
            raise

    def txn(
        self,
        compare: Sequence[Message],
        then: Sequence[Message],
        otherwise: Sequence[Message] = (),
    ) -> Outcome:
        """Run one transaction: `then` if all comparisons hold, else `otherwise`.

        The transaction may run twice, if the member that ran it failed before it answered.
        """
        body = {"compare": [*compare], "success": [*then], "failure": [*otherwise]}
        answers = self.call("kv/txn", body)
        with _parsing(answers):
            (answer,) = answers
            parts: list[Message] = [
                next(iter(part.values()), {}) for part in answer.get("responses", [])
            ]
            return Outcome(
                answer.get("succeeded", False),
                int(answer["header"]["revision"]),
                tuple(tuple(_pair(kv) for kv in part.get("kvs", [])) for part in parts),
            )

    def grant(self, seconds: int, id: int) -> None:
        """Create a lease with this id, or renew it if it exists."""
        while True:
            try:
                self.call("lease/grant", {"TTL": str(seconds), "ID": str(id)})
                break
            except EtcdError as error:
                if error.code != PRECONDITION:
                    raise
            if self.renew([id])[0]:
                break

    def renew(self, ids: Sequence[int]) -> list[bool]:
        """Renew leases, and return for each whether it still existed."""
        answers = self.call("lease/keepalive", *({"ID": str(id)} for id in ids), renews=True)
        with _parsing(answers):
            alive = {int(answer["ID"]): int(answer.get("TTL", 0)) > 0 for answer in answers}
        return [alive.get(id, False) for id in ids]

    def revoke(self, id: int) -> None:
        """End a lease and delete its keys; a missing lease is no error."""
        try:
            self.call("lease/revoke", {"ID": str(id)})
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    def watch(self, prefix: str, revision: int) -> Generator[tuple[Pair, ...], None, None]:
        """Yield the changes of all keys with a prefix, from a revision on, in order.

        The first item is empty and shows that the watch has begun. Each other item holds whole
        revisions.

        Raises:
            Compacted: the history is gone; the caller reads all keys again and watches from there.
            EtcdError: the watch has ended; another one may continue from the last revision.
        """
        wanted = {**_where(prefix, True), "start_revision": str(revision)}
        with closing(self.stream("watch", {"create_request": wanted})) as messages:
            for message in messages:
                with _parsing([message]):
                    changes = tuple(map(_changed, message.get("events", [])))
                    # A first answer from before `revision`: etcd has lost its data, and counts
                    # from 1 again.
                    behind = message.get("created") and (
                        int(message["header"]["revision"]) < revision - 1
                    )
                if behind or "compact_revision" in message:
                    raise Compacted
                if message.get("canceled"):
                    reason = message.get("cancel_reason", "it gave no reason")
                    raise EtcdError(f"etcd ended the watch: {reason}")
                yield changes

    def close(self) -> None:
        """Close all connections; blocked calls and streams raise EtcdClosed."""
        self._closed = True
        for member in self._members:
            member.close()

    def _member(self) -> EtcdMember:
        self._check_open()
        return self._members[self._preferred]

    def _leave(self, member: EtcdMember) -> None:
        """Prefer the next member from now on, unless another call has already moved on."""
        with self._lock:
            if self._members[self._preferred] is member:
                self._preferred = (self._preferred + 1) % len(self._members)

    def _log_in(self, member: EtcdMember, left: float, timeout: float) -> str:
        """Return the user's token; log in first if there is none, one call at a time.

        A password check in etcd is slow, and runs to its end also when no client waits any more. So
        a login may take longer than other attempts: as long as the call allows.
        """
        if not self.access.user:
            return ""
        if not self._logging_in.acquire(timeout=left):
            raise EtcdUnreachable(
                f"another call waits for the login of the user {self.access.user!r}, which etcd "
                f"has not answered within {round(left, 2):g} s"
            )
        try:
            if not self._token:
                body = encode([{"name": self.access.user, "password": self.access.password}])
                answer = member.ask("auth/authenticate", body, "", timeout)
                self._token = str(decode(answer, member.name)[0].get("token", ""))
            return self._token
        except EtcdError as error:
            if error.code not in (INVALID, PRECONDITION):
                raise
            text = f"etcd refuses the user {self.access.user!r}: {error}"
            raise EtcdError(text, error.code) from error
        finally:
            self._logging_in.release()

    def _is_outdated(self, error: EtcdError) -> bool:
        """Whether an outdated token is the cause; tokens last minutes, or until etcd restarts."""
        old = error.code == UNAUTHENTICATED or "revision in header is old" in str(error)
        return old and bool(self.access.user)

    def _explained(self, error: EtcdError) -> EtcdError:
        """Add advice to an etcd error that has none in its own text."""
        if error.code == DENIED:
            advice = f"the user {self.access.user!r} needs a role that reads and writes these keys"
        elif "user name is empty" in str(error):
            advice = "etcd requires a user: set the keys user and password_file"
        elif "database space exceeded" in str(error):
            advice = (
                "make room in etcd: etcdctl compact and defrag (or give it more by "
                "--quota-backend-bytes), and then etcdctl alarm disarm"
            )
        elif error.code in (INVALID, EXHAUSTED) and "large" in str(error):
            return EtcdTooLarge(
                f"{error}; etcd takes 1.5 MB a request unless it is started with another "
                "--max-request-bytes",
                error.code,
            )
        else:
            return error
        return EtcdError(f"{error}; {advice}", error.code)

    def _describe(self, error: Exception) -> str:
        """Describe a failure of a connection."""
        text = str(error) or type(error).__name__
        if self.access.tls and isinstance(error, ssl.SSLEOFError | ConnectionError):
            text += (
                "; if etcd requires a client certificate, set the keys ssl_cert and ssl_cert_key"
            )
        return text

    def _check_open(self) -> None:
        if self._closed:
            raise EtcdClosed("this connection to etcd was closed")


class EtcdMember:
    """One member of the cluster, and the connections to it.

    A connection serves one call at a time, and the next call uses it again. A call that times out
    closes its connection. `cut` ends all calls and streams when the member turns out to be silent.

    Attributes:
        name: host and port of the member.
        local_addr: this host's address on the latest connection; empty before the first.
        usual_s: seconds that its answers usually take, as a moving average; 0 before the first.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self.name = endpoint_of(host, port)
        self.local_addr = ""
        self.usual_s = 0.0
        self._host, self._port, self._tls = host, port, tls
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        # The socket, because the connection may have none: an answer that is the last one on its
        # connection takes over the socket.
        self._busy: dict[HTTPConnection, socket.socket] = {}
        self._closed = False

    def ask(self, path: str, body: bytes, token: str, timeout: float) -> tuple[int, bytes]:
        """Return status and content of the answer, if it arrives within `timeout` seconds."""
        connection = self._take(timeout)
        try:
            answer = _send(connection, path, body, token, timeout)
            if answer.version == 11 and answer.length is None and not answer.chunked:
                # The HTTP client does not detect headers that end early.
                raise ConnectionError("its answer was cut short")
            found = answer.status, answer.read()
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            if self._busy.pop(connection, None) and connection.sock:
                self._idle.append(connection)
                return found
        connection.close()
        return found

    def answered_in(self, seconds: float) -> None:
        """Take the time of an answer into the average."""
        self.usual_s += (seconds - self.usual_s) * (_SMOOTHING if self.usual_s else 1.0)

    def listen(
        self, path: str, body: bytes, token: str, timeout: float
    ) -> Generator[Message, None, None]:
        """Yield the answers to a request; the first has to arrive within `timeout` seconds."""
        connection = self._connect(timeout)
        sock = connection.sock
        try:
            with _send(connection, path, body, token, timeout) as answer:
                if answer.status != 200:
                    decode((answer.status, answer.read()), self.name)
                while line := answer.readline():
                    sock.settimeout(None)
                    yield from messages_in(line, self.name)
        finally:
            self._drop(connection)
        raise ConnectionError("the member has ended the stream")

    def cut(self) -> None:
        """Close all connections to a silent or lost member; the calls that use them fail."""
        with self._lock:
            for sock in self._busy.values():
                with suppress(OSError):  # the other end closed it first
                    # Not SSLSocket.shutdown: it would remove TLS while another thread reads.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self._busy.clear()
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def close(self) -> None:
        """Close all connections, and refuse new ones."""
        with self._lock:
            self._closed = True
        self.cut()

    def _drop(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._busy.pop(connection, None)
        connection.close()

    def _take(self, timeout: float) -> HTTPConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not ready([connection.sock.fileno()], 0):
                    self._busy[connection] = connection.sock
                    return connection
                connection.close()  # the member closed it while no call used it
        return self._connect(timeout)

    def _connect(self, timeout: float) -> HTTPConnection:
        connection = (
            HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
            if self._tls
            else HTTPConnection(self._host, self._port, timeout=timeout)
        )
        try:
            connection.connect()
            keep_alive(connection.sock)  # a watch may receive nothing for days
            self.local_addr = connection.sock.getsockname()[0]
            with self._lock:
                if self._closed:
                    raise EtcdClosed("this connection to etcd was closed")
                self._busy[connection] = connection.sock
        except BaseException:
            connection.close()
            raise
        return connection


def _send(
    connection: HTTPConnection, path: str, body: bytes, token: str, timeout: float
) -> HTTPResponse:
    connection.sock.settimeout(timeout)
    headers: Mapping[str, str] = {"Authorization": token} if token else {}
    connection.request("POST", f"/v3/{path}", body, headers)
    return connection.getresponse()


def encode(messages: Sequence[Message]) -> bytes:
    """Encode messages as the content of a request."""
    return b"".join(json.dumps(message, separators=(",", ":")).encode() for message in messages)


def decode(answer: tuple[int, bytes], name: str) -> list[Message]:
    """Return the messages in the answer of the member with this name.

    Raises:
        EtcdError: the answer is an error, or is not from an etcd.
    """
    status, content = answer
    try:
        found = messages_in(content, name)
    except ValueError:
        found = []
    if status == 200 and found:
        return found
    answered = f"{name} answered with status {status} and {content[:80]!r}"
    if status in _ABSENT:
        raise EtcdError(answered)
    raise _no_etcd(answered)


def _no_etcd(answered: str) -> EtcdError:
    return EtcdError(
        f"{answered}: it is no etcd with the v3 API; regrow needs etcd 3.4 or newer, with its "
        "JSON gateway (--enable-grpc-gateway, the default)",
        UNIMPLEMENTED,
    )


@contextmanager
def _parsing(answers: Sequence[Message]) -> Iterator[None]:
    """Raise EtcdError if the answers lack a field of etcd's: another service may send JSON too."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise EtcdError(f"etcd has a key that is no UTF-8: {error.object!r}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_etcd(f"the endpoint answered with {str(answers)[:80]}") from error


def messages_in(content: bytes, name: str) -> list[Message]:
    """Decode the body of a response: one JSON message per line."""
    found = []
    for line in content.splitlines():
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{name} sent {line[:80]!r}, which is no JSON object")
        error = message.get("error")
        if error is not None:
            detail = error if isinstance(error, dict) else message
            code = detail.get("code", detail.get("grpc_code", 0))
            text = detail.get("message") or str(error)
            raise EtcdError(f"{name}: {text}", code if isinstance(code, int) else 0)
        result = message.get("result", message)
        if not isinstance(result, dict):
            raise ValueError(f"{name} sent {line[:80]!r}, whose result is no JSON object")
        found.append(result)
    return found


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
