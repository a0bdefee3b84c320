"""What a node and the store server say to each other about the rounds.

These are the bodies of the questions to the service "rendezvous" and of its answers, as msgpack:
an array whose first element is the number of the message type below. Every field's type is checked
while it is decoded, on both sides. Events and news travel as the fields of their types in `_news`,
after the name of the type.

A question says for which job it is, and how that job is set up, so that whoever comes first makes
it. An answer says which life of the job it is about: a server that was started again, or a job
that was forgotten because nobody was left in it, is not the one that a node was in before.

A node that follows does not send the view that it has seen, only a mark of it, so that to wait
costs the same whatever there is to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta, Raw, Struct

from regrow.rendezvous._driver import View
from regrow.rendezvous._news import (
    Close,
    Event,
    Failed,
    Heard,
    Join,
    Judged,
    Leave,
    Leaving,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)

NAME: Final = "rendezvous"
"""Of the service."""
BODY_BYTES: Final = 1 << 20
"""The longest question."""

Name = Annotated[str, Meta(max_length=1000)]
Nodes = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=1e10)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class Settings(Struct, array_like=True, frozen=True, gc=False):
    """How a job is set up; that of the node which comes first holds for all."""

    min_nodes: Nodes
    max_nodes: Nodes
    keep_alive: Seconds
    misses: Annotated[int, Meta(ge=1, le=1_000_000)]
    last_call: Seconds
    grace: Annotated[float, Meta(ge=0, le=1e10)] = 0.0
    fixed: bool = False


class Submit(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """Something happened to a node; answered with its view after that."""

    job: Name
    settings: Settings
    kind: Annotated[str, Meta(max_length=32)]
    event: Raw


class Follow(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """Answered with the view of a node once it is another one than that of the mark."""

    job: Name
    settings: Settings
    id: Name
    seen: Annotated[bytes, Meta(max_length=16)]
    """`mark` of the view that the node has; empty for none."""


class Beat(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A node is alive; answered with whether it holds its seat."""

    job: Name
    id: Name
    token: Number
    answered: Number
    """How many of its beats were answered so far. That it grows is the sign of life: a node that
    is heard and hears nothing cannot renew its lease, and has to be given up like a silent one."""


class Explain(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """A node has waited in vain; answered with who was missing."""

    job: Name
    id: Name
    waited: Seconds


Question = Submit | Follow | Beat | Explain


class Told(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """A view."""

    life: str
    version: int
    kind: str
    news: Raw
    waiting: int
    judged: Judged | None
    closed: bool


class Beaten(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A beat was heard."""

    life: str
    """Empty if the server does not know the job."""
    holds: bool


class Explained(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Why a wait was in vain, for people."""

    text: str


class Problem(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """The question was refused, and changed nothing."""

    text: str


Answer = Told | Beaten | Explained | Problem

_encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def _decoders(*types: Any) -> Mapping[str, msgspec.msgpack.Decoder[Any]]:
    return {type.__name__: msgspec.msgpack.Decoder(type) for type in types}


# What a node may say of itself; the rest is the server's judgement.
_EVENTS: Final = _decoders(Join, Failed, Heard, Leaving, Leave, Close)
_NEWS: Final = _decoders(Seated, Placed, RoundEnded, RoundClosed, Refused, type(None))


def submit(job: str, settings: Settings, event: Event) -> bytes:
    """Return the question that submits an event."""
    return _encode(Submit(job, settings, type(event).__name__, Raw(_encode(event))))


def encode(message: Question | Answer) -> bytes:
    """Return a message as it travels."""
    return _encode(message)


def read_event(question: Submit) -> Event:
    """Return the event that a question submits.

    Raises:
        ValueError: it is none that a node may submit, or makes no sense.
    """
    decoder = _EVENTS.get(question.kind)
    if decoder is None:
        raise ValueError(f"{question.kind!r} is nothing that a node may say")
    event = cast("Event", decoder.decode(question.event))
    node = event.node if isinstance(event, Join) else None
    id = node.id if node else getattr(event, "id")  # noqa: B009 - all others have one
    wrong = [
        what
        for what, holds in (
            ("its id is empty or too long", 1 <= len(id) <= 1000),
            ("its token is no number of a round", 0 <= getattr(event, "token", 0) <= 2**53),
            ("its reason is too long", len(getattr(event, "why", "")) <= 10_000),
            ("its address is empty or too long", node is None or 1 <= len(node.addr) <= 1000),
            ("its port is none", node is None or 0 <= node.port < 65536),
            ("its rank is none", node is None or 0 <= (node.wanted or 0) <= 2**53),
        )
        if not holds
    ]
    if wrong:
        raise ValueError(f"a node cannot say {str(event)!r:.300}: {', '.join(wrong)}")
    return event


def told(life: str, view: View) -> bytes:
    """Return the answer that tells a view."""
    news = view.news
    kind, body = type(news).__name__, Raw(_encode(news))
    return _encode(Told(life, view.version, kind, body, view.waiting, view.judged, view.closed))


def read_view(answer: Told) -> View:
    """Return the view that an answer tells.

    Raises:
        ValueError: its news are none that this release knows.
    """
    decoder = _NEWS.get(answer.kind)
    if decoder is None:
        raise ValueError(f"{answer.kind!r} is no news that this release of regrow knows")
    news = decoder.decode(answer.news)
    return View(answer.version, news, answer.waiting, answer.judged, answer.closed)


def mark(view: View | None) -> bytes:
    """Return what stands for all of a view but its version; empty for none."""
    if view is None:
        return b""
    return blake2b(_encode((type(view.news).__name__, *view[1:])), digest_size=8).digest()
