"""What a member of an etcd cluster is sent, and what its answers mean; errors among them."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.rendezvous._etcd_member import Member

Message = dict[str, Any]
"""One JSON object of a request or an answer."""

_ABSENT = {502, 503, 504}
"""What a proxy before etcd answers as long as no member is behind it."""

# gRPC's status codes, as the gateway passes them on: those that another try would not change.
INVALID, NOT_FOUND, EXISTS, DENIED, EXHAUSTED = 3, 5, 6, 7, 8
PRECONDITION, RANGE, UNIMPLEMENTED, UNAUTHENTICATED = 9, 11, 12, 16
_FINAL = {INVALID, NOT_FOUND, EXISTS, DENIED, EXHAUSTED}
_FINAL |= {PRECONDITION, RANGE, UNIMPLEMENTED, UNAUTHENTICATED}


class EtcdError(Exception):
    """etcd has answered with an error, or what answered is no etcd.

    Attributes:
        code: gRPC's status code; 0 when there was none.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    @property
    def final(self) -> bool:
        """Whether asking again, or another member, would not help."""
        return self.code in _FINAL and "too many requests" not in str(self)


class EtcdUnreachable(EtcdError):
    """No member has answered in time; a change that was asked for may still happen."""


class EtcdClosed(EtcdError):
    """This client was closed."""

    final = True


class EtcdRefused(EtcdError):
    """What answers is no etcd that can be used, or does not let this client in."""

    final = True


def body_of(messages: Sequence[Message]) -> bytes:
    """Return messages as the content of a request."""
    return b"".join(json.dumps(message, separators=(",", ":")).encode() for message in messages)


def read(answer: tuple[int, bytes], member: Member) -> list[Message]:
    """Return what a member has answered.

    Raises:
        EtcdError: it is an error.
        EtcdRefused: it is nothing that an etcd would answer.
    """
    status, content = answer
    try:
        found = results(content, member.name)
    except ValueError:
        found = []
    if status == 200 and found:
        return found
    if status in _ABSENT:
        raise EtcdError(f"{member.name} answered with status {status} and {content[:80]!r}")
    raise EtcdRefused(f"{member.name} is no etcd with the v3 API: {_who_is_it(member, answer)}")


def results(content: bytes, name: str) -> list[Message]:
    """Return the messages of a content, one a line."""
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
        found.append(message.get("result", message))
    return found


def _who_is_it(member: Member, answer: tuple[int, bytes]) -> str:
    status, content = answer
    said = f"it answered with status {status} and {content[:80]!r}"
    try:
        version = json.loads(member.get("/version"))["etcdserver"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return said
    return (
        f"it is etcd {version}, and {said}; etcd 3.4 or newer is needed, with its gateway "
        "(--enable-grpc-gateway, the default)"
    )


def describe(error: Exception) -> str:
    """Say why there was no answer."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLEOFError):
        return (
            f"{error}; so ends who is to show a certificate (ssl_cert, ssl_cert_key) and has none"
        )
    return str(error) or type(error).__name__
