"""Records of the jobs of a server: what it writes down before it answers, and how it is read again.

The journal of a server (`round_service.py`) and the copies of the voters (`copies.py`) consist of
these records. They are msgpack. `recover` is a pure function of the records: it repeats the events,
so it needs no other knowledge than the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from regrow.rendezvous.protocol.messages import Event, LastCallOver, NodeLost
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import Succession
from regrow.rendezvous.server import server_messages as messages

_EVENTS: Final = {**messages.EVENTS, **messages.decoders(NodeLost, LastCallOver)}


class JobRecord(Struct, array_like=True, tag=1, frozen=True):
    """The whole state of one job."""

    job: str
    life: str
    settings: messages.JobSettings
    state: Round
    succession: Succession = Succession()
    seq: int = 0
    """The number of changes so far, for the voters."""


class EventRecord(Struct, array_like=True, tag=2, frozen=True):
    """An event that changed the state of a job."""

    job: str
    kind: str
    event: Raw


class ForgottenRecord(Struct, array_like=True, tag=3, frozen=True):
    """A job that has no nodes left and is deleted."""

    job: str


class SuccessionRecord(Struct, array_like=True, tag=4, frozen=True):
    """A change of the voters."""

    job: str
    succession: Succession


Record = JobRecord | EventRecord | ForgottenRecord | SuccessionRecord
_decode = msgspec.msgpack.Decoder(Record).decode


def event_record(job: str, event: Event) -> EventRecord:
    """Return the record of an event."""
    return EventRecord(job, type(event).__name__, Raw(messages.encode(event)))


def recover(records: Iterable[bytes]) -> dict[str, JobRecord]:
    """Return the jobs in the records, by their ids, in their state after the last record.

    Raises:
        ValueError: the records are not those of an earlier server.
    """
    jobs: dict[str, JobRecord] = {}
    try:
        for record in map(_decode, records):
            match record:
                case JobRecord():
                    jobs[record.job] = record
                case EventRecord(job, kind, event):
                    state, _ = step(jobs[job].state, _EVENTS[kind].decode(event))
                    jobs[job] = replace(jobs[job], state=state, seq=jobs[job].seq + 1)
                case SuccessionRecord(job, succession):
                    jobs[job] = replace(jobs[job], succession=succession, seq=jobs[job].seq + 1)
                case ForgottenRecord(job):
                    del jobs[job]
    except (KeyError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"a record of a job is damaged, or of another release ({type(error).__name__}: {error})"
        ) from error
    return jobs
