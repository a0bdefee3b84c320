"""What happened in a job.

`Event` and `record` are torch's; `EventLog` keeps a job's events as JSON lines,
`read_events` gives them back, and `story` tells them: what failed first, and
what it cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow._lazy import lazily

from ._log import (
    EVENTS_FILE,
    EventFile,
    EventLog,
    as_record,
    find_event_file,
    read_events,
)
from ._record import construct_and_record_rdzv_event, record, record_rdzv_event
from ._types import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent
from .handlers import get_logging_handler, register_logging_handler

if TYPE_CHECKING:
    from ._story import (
        Expiry,
        Failure,
        InPlace,
        Move,
        OtherFailure,
        Stall,
        Step,
        Story,
        Suspension,
        story,
    )
    from ._tell import print_story

__all__ = [
    "EVENTS_FILE",
    "Event",
    "EventFile",
    "EventLog",
    "EventMetadataValue",
    "EventSource",
    "Expiry",
    "Failure",
    "InPlace",
    "Move",
    "NodeState",
    "OtherFailure",
    "RdzvEvent",
    "Stall",
    "Step",
    "Story",
    "Suspension",
    "as_record",
    "construct_and_record_rdzv_event",
    "find_event_file",
    "get_logging_handler",
    "print_story",
    "read_events",
    "record",
    "record_rdzv_event",
    "register_logging_handler",
    "story",
]

# The story is told when a job is over; a launcher that starts one does not wait for it.
__getattr__ = lazily(
    globals(),
    {
        "Expiry": "_story",
        "Failure": "_story",
        "Move": "_story",
        "OtherFailure": "_story",
        "InPlace": "_story",
        "Stall": "_story",
        "Step": "_story",
        "Story": "_story",
        "Suspension": "_story",
        "print_story": "_tell",
        "story": "_story",
    },
)
