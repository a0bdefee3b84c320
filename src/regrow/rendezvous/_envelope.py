"""What the nodes write to a backend: the document of the round, and what goes with it.

A backend holds one piece of bytes. Its first line says what it is, of which job's life, and holds
the beats of the nodes where the backend has no other place for them; the second is the document of
the round (`_document`), which stays byte for byte the same while nodes do nothing but beat.

A job's life is named at random by the node that writes first. If somebody empties the backend
while nodes still run, the next to write begins another life, in which rounds are counted from the
start; a node that has seen the old one notices, since tokens of the one mean nothing in the other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.rendezvous._document import decode, encode
from regrow.rendezvous._errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.rendezvous._state import Round

FORMAT = "regrow.rendezvous"
VERSION = 1


class Envelope(NamedTuple):
    """What a backend holds."""

    life: str
    """Names the job's life, from the first write to the backend on."""
    state: Round
    """The round."""
    beats: Mapping[str, int]
    """The latest beat of each node; empty where the backend keeps them elsewhere."""


def seal(envelope: Envelope) -> bytes:
    """Return an envelope as bytes."""
    head = {
        "format": FORMAT,
        "format_version": VERSION,
        "life": envelope.life,
        "beats": dict(envelope.beats),
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + encode(envelope.state)


def unseal(data: bytes) -> Envelope:
    """Return the envelope that some bytes hold.

    Raises:
        RendezvousStateError: they hold none, or one of another version.
    """
    first, separator, rest = bytes(data).partition(b"\n")
    try:
        head: Any = json.loads(first)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"it is not written by regrow ({error})", data) from error
    if not separator or not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _unusable(f"it is not of the format {FORMAT!r}", data)
    if head.get("format_version") != VERSION:
        raise _unusable(
            f"it has format version {head.get('format_version')!r}, and this node knows "
            f"{VERSION}: run the same release of regrow on all nodes",
            data,
        )
    life, beats = head.get("life"), head.get("beats")
    if not isinstance(life, str) or not isinstance(beats, dict) or len(head) != 4:
        raise _unusable("its first line is not as it must be", data)
    if not all(type(count) is int and count >= 0 for count in beats.values()):
        raise _unusable(f"its beats are not numbers: {beats!r:.200}", data)
    return Envelope(life, decode(rest), beats)


def _unusable(why: str, data: bytes) -> RendezvousStateError:
    return RendezvousStateError(
        f"the state of the rendezvous cannot be used: {why}. It begins with {bytes(data[:100])!r}. "
        f"If it is left over from another program, use another run id"
    )
