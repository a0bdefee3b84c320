"""Messages between a worker and the service "heartbeat" of the store's server.

The bodies of questions and answers are msgpack: an array whose first element is the number of the
message type. `merge` defines the types 2 and 3 of the answers, `WorkersLeft` and `Broken`. Both
sides check the type of every field while they decode. A question is as long as one worker's report.
The length of the answer to a beat does not depend on the number of workers.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import (
    Agreed,
    Beat,
    Broken,
    Incarnation,
    Rank,
    WorkerProgress,
    WorkersLeft,
)

NAME: Final = "heartbeat"
"""The name of the service."""
BODY_BYTES: Final = 1 << 20
"""Maximum length of a question in bytes."""

Name = Annotated[str, Meta(max_length=1000)]
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class BeatQuestion(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A beat of one worker.

    The server answers it when all workers have arrived, when a worker cannot arrive any more, or
    when the wait ends.
    """

    group: Name
    size: Size
    beat: Beat
    seen: Number
    """The number of the last full set with an answer that this worker received."""
    wait: Seconds
    """Seconds for which the worker waits for the others."""


class FollowGroup(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A question for the end of the group; the server answers it when the group ends."""

    group: Name
    rank: Rank
    incarnation: Incarnation


class GetProgress(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A question for the progress of all workers; the server answers it at once."""

    group: Name


Question = BeatQuestion | FollowGroup | GetProgress


class InStep(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """All workers are present and in step."""

    number: int
    """The number of the full set."""
    agreed: Agreed


class Missing(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """Not all workers arrived in time."""

    ranks: Ranks


class Table(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The progress of each worker that has sent a beat."""

    rows: list[WorkerProgress]


class UnknownGroup(Struct, array_like=True, tag=6, frozen=True, gc=False):
    """Answers `FollowGroup` of a worker that has sent no beat to this server."""


Answer = InStep | WorkersLeft | Broken | Missing | Table | UnknownGroup

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
