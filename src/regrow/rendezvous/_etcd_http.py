"""Calls to an etcd cluster: which member is asked, and for how long.

etcd is spoken to by its documented JSON gateway (`/v3/...`, part of every etcd since 3.4) with the
HTTP client of the standard library. What was tried first: etcd3 is of 2020 and breaks with today's
protobuf; etcd3gw knows one member and no password; aetcd is for asyncio, knows one member and logs
in once; etcd-sdk-python needs a protobuf that it does not declare, logs in once, and its watches
end with their connection. What they lack is what a job's life hangs on (the next member, the next
token, the watch that goes on), so it would have had to be written around any of them. grpcio is
well kept, but messages and all of the above would still be ours. Measured here against etcd 3.4: a
read takes 0.46 ms by the gateway and 0.37 ms by grpcio, 0.14 and 0.18 ms of processor time; 8 MB
of memory and no thread, against 22 MB and some threads, in an agent that may have to fork.

A call asks the member that answered last. One that does not answer within its *patience* (twice
what answers take, the way, and a bit) is left for the next. If that one answers, all connections to
the first are cut, also those of watches: so the beats of a node find out for all its calls that a
member is silent. Nobody waits for a member: after the loss of a leader a new one is there in one to
two seconds, and each try is a new question to someone.

A call that was given up may still take effect. So whoever makes a call that changes something makes
one that may be repeated (`_etcd_job` says how). A lease is the exception: a host that is heard and
hears nothing would renew it with each try, at one member after the other, and live on for all who
listen. So after silence it is renewed only at a member that has answered something else first.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING

from regrow.rendezvous._etcd_answers import (
    DENIED,
    INVALID,
    PRECONDITION,
    UNAUTHENTICATED,
    EtcdClosed,
    EtcdError,
    EtcdRefused,
    EtcdUnreachable,
    Message,
    body_of,
    describe,
    read,
)
from regrow.rendezvous._etcd_member import Member, Stream

if TYPE_CHECKING:
    import ssl

_SHORTEST = 0.4
"""Seconds that any member is given for an answer, besides the way there and back."""
_HURRY = 0.2
"""The same, for a renewal, which had better be repeated soon."""
_ALONE = 1.0
"""The same, where there is only one member to ask."""
_LOG_IN = 2.0
"""The same, for a password, which etcd takes its time to check, and to the end, also where nobody
waits for it any more. So a try that was given up makes the next one slower: that has twice as long,
and where there is only one member to ask, the first has all the time there is.
"""
_LOG_IN_DOUBLINGS = 4
"""How often it is doubled at most."""
_PER_BYTE = 1e-6
"""Seconds more for each byte of a request."""
_UNKNOWN = 0.5
"""Seconds that an answer is taken to need before there was any."""
_SLOW = 0.2
"""Seconds that an answer is taken to need at most, because of members that gave none."""
_ONCE_MORE = 1.0
"""Seconds for a call when the last one has found nobody; whoever must go on asks again."""
_PAUSE = 0.05
"""Seconds before all members are asked once more after each has refused at once."""
_ANY = "kv/range", b'{"key": "AA==", "serializable": true}', ""
"""A question that a member answers, if only to deny it, without the others; it changes nothing."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the cluster is, and how to be let in."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member that may be asked."""
    tls: ssl.SSLContext | None = None
    """None: without TLS."""
    user: str = ""
    """Empty: etcd asks for no user."""
    password: str = field(default="", repr=False)


class EtcdHttp:
    """Connections to the members of one cluster; all methods are thread-safe."""

    def __init__(self, access: Access) -> None:
        self.access = access
        members = list(access.endpoints)
        random.shuffle(members)  # so that the nodes of a job spread over the members
        self._members = tuple(Member(host, port, access.tls) for host, port in members)
        self._lock = threading.Lock()
        self._preferred = 0
        self._latency = _UNKNOWN
        self._unreachable = False
        self._logging_in = threading.Lock()
        self._slow_logins = 0
        self._token = ""
        self._closed = False

    def call(
        self, path: str, *messages: Message, timeout: float, renews: bool = False
    ) -> list[Message]:
        """Ask the cluster, one member after the other until one answers.

        Args:
            path: what is asked, e.g. "kv/range".
            messages: the request; several where the gateway takes a stream of them.
            timeout: seconds.
            renews: it renews leases. It is asked anew sooner: most calls that wait for a leader are
                answered the moment that there is one, but a lease is renewed up to a second after
                it. And what was not answered is repeated only where something else is.

        Raises:
            EtcdUnreachable: none has answered in time; the text says what each was heard to say.
            EtcdError: etcd has answered with an error that another member would repeat.
        """
        if self._unreachable and (self._token or not self.access.user):  # a login takes its time
            timeout = min(timeout, _ONCE_MORE)
        deadline = time.monotonic() + timeout
        body = body_of(messages)
        tried: dict[str, str] = {}
        useless: set[Member] = set()
        tries = logins = 0
        silent = self._unreachable
        while True:
            member = self._member()
            patience = self._patience(tries, len(body), renews)
            began = time.monotonic()
            left = max(deadline - began, 0.01)
            try:
                token = self._authorized(member, left)
                if renews and silent:
                    member.ask(*_ANY, patience, left)
                answer = member.ask(path, body, token, patience, left)
                took = time.monotonic() - began
                found = read(answer, member)
            except EtcdUnreachable:  # the login is another call's, to whom alone the member answers
                raise
            except EtcdError as error:
                if self._outdated(error) and logins < 2:
                    logins += 1
                    self._token = ""
                elif error.final:
                    raise self._explained(error) from None
                else:
                    useless.add(member)  # it may be cut off from the others
                tried[member.name] = str(error)
            except (OSError, HTTPException) as error:
                late = isinstance(error, TimeoutError)
                if not (late and left < patience and member.name in tried):  # it tells less
                    tried[member.name] = describe(error)
                useless.add(member)
                if late:  # silent, or slow; who knows
                    silent = True
                    self._latency = max(self._latency, min(1.5 * self._latency + 0.01, _SLOW))
            else:
                for other in useless - {member}:  # which others may be waiting for
                    other.cut()
                self._latency += (took - self._latency) / 4
                self._unreachable = False
                return found
            self._check_open()
            self._leave(member)
            tries += 1
            if tries % len(self._members) == 0:
                time.sleep(min(_PAUSE, max(deadline - time.monotonic(), 0)))
            if time.monotonic() >= deadline:
                self._unreachable = True
                for other in useless:  # of these, the next call may know nothing
                    other.cut()
                heard = "; ".join(f"{name}: {why}" for name, why in tried.items())
                raise EtcdUnreachable(f"etcd did not answer within {timeout:g} s ({heard})")

    def stream(self, path: str, *messages: Message, timeout: float) -> Stream:
        """Open a stream of answers from the member that answered last.

        Raises:
            EtcdError: it cannot be had there; the next call may go to another member.
        """
        member = self._member()
        try:
            token = self._authorized(member, timeout)
            return member.listen(path, body_of(messages), token, self._patience(0), timeout)
        except (OSError, HTTPException) as error:
            self._check_open()
            self._leave(member)
            raise EtcdUnreachable(f"{member.name}: {describe(error)}") from error
        except EtcdError as error:
            if self._outdated(error):
                self._token = ""
            self._leave(member)
            raise

    def local_address(self) -> str:
        """Return this host's address on the way to etcd, from a connected socket.

        Raises:
            EtcdUnreachable: no member can be connected to.
        """
        for _ in self._members:
            member = self._member()
            try:
                return member.near()
            except OSError as error:
                why = f"{member.name}: {error}"
                self._leave(member)
        raise EtcdUnreachable(f"no member of etcd can be connected to; the last was {why}")

    def close(self) -> None:
        """Close all connections; calls and streams that are blocked raise EtcdClosed."""
        self._closed = True
        for member in self._members:
            member.close()

    def _member(self) -> Member:
        self._check_open()
        return self._members[self._preferred]

    def _leave(self, member: Member) -> None:
        """Ask the next member from now on, unless another call has moved on already."""
        with self._lock:
            if self._members[self._preferred] is not member:
                return
            count, now = len(self._members), time.monotonic()
            following = [(self._preferred + step) % count for step in range(1, count + 1)]
            usable = (n for n in following if self._members[n].avoid_until <= now)
            self._preferred = next(usable, following[0])

    def _patience(self, tries: int, size: int = 0, renews: bool = False) -> float:
        """A member's time to answer; longer after some turns, for an etcd that is merely slow."""
        count = len(self._members)
        least = _ALONE if count == 1 else _HURRY if renews else _SHORTEST
        return (least + 2 * self._latency + size * _PER_BYTE) * 1.5 ** max(tries // count - 3, 0)

    def _authorized(self, member: Member, left: float) -> str:
        """Return the token of the user, logging in first where there is none."""
        if not self.access.user:
            return ""
        began = time.monotonic()
        if not self._logging_in.acquire(timeout=left):
            raise EtcdUnreachable(
                f"etcd has not let in the user {self.access.user!r} within {left:.3g} s, for which "
                "another call has asked it"
            )
        try:
            if not self._token:
                self._token = self._log_in(member, left - (time.monotonic() - began))
            return self._token
        finally:
            self._logging_in.release()

    def _log_in(self, member: Member, left: float) -> str:
        body = body_of(({"name": self.access.user, "password": self.access.password},))
        turns, count = self._slow_logins // len(self._members), len(self._members)
        patience = left if count == 1 else _LOG_IN * 2 ** min(turns, _LOG_IN_DOUBLINGS)
        try:
            answer = member.ask("auth/authenticate", body, "", patience, max(left, 0.01))
        except TimeoutError:
            self._slow_logins += left >= patience
            raise
        self._slow_logins = 0
        try:
            return str(read(answer, member)[0].get("token", ""))
        except EtcdError as error:
            if error.code not in (INVALID, PRECONDITION):
                raise
            raise EtcdRefused(
                f"etcd does not let in the user {self.access.user!r}: {error}"
            ) from error

    def _outdated(self, error: EtcdError) -> bool:
        """Whether the token is to blame; they last for minutes, or until etcd is restarted."""
        old = error.code == UNAUTHENTICATED or "revision in header is old" in str(error)
        return old and bool(self.access.user)

    def _explained(self, error: EtcdError) -> EtcdError:
        """Say what to do, where etcd's own words do not."""
        if error.code == DENIED:
            why = f"the user {self.access.user!r} needs a role that reads and writes these keys"
        elif "user name is empty" in str(error):
            why = "it asks for a user: give it one by the keys user and password_file"
        elif "database space exceeded" in str(error):
            why = (
                "make room in it: etcdctl compact and defrag (or give it more by "
                "--quota-backend-bytes), and then etcdctl alarm disarm"
            )
        else:
            return error
        return EtcdError(f"{error}; {why}", error.code)

    def _check_open(self) -> None:
        if self._closed:
            raise EtcdClosed("this connection to etcd was closed")
