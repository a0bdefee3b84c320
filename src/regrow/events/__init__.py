"""Events of a job: recording, the event log, and the story derived from it.

`Event` and `record` are torch's names. `EventLog` writes a job's events as JSON lines and
`read_events` reads them. `story` derives what failed first, and what the failure cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.events.log import (
    EVENTS_FILE,
    EventFile,
    EventLog,
    as_record,
    find_event_file,
    read_events,
)
from regrow.events.log import NO_ID as NO_ID
from regrow.events.log import QueuedEventLog as QueuedEventLog
from regrow.events.recording import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
    construct_and_record_rdzv_event,
    record,
    record_rdzv_event,
)
from regrow.utils import lazily

from .handlers import get_logging_handler, register_logging_handler

if TYPE_CHECKING:
    from regrow.events.causes import Cause, find_cause
    from regrow.events.evidence import (
        STOP_SPREAD_S,
        describe_failure,
        left_for_signal,
        short_scope,
    )
    from regrow.events.printing import print_story
    from regrow.events.runs import Run, Session, jobs_of, runs_of
    from regrow.events.story_incidents import clean, duration
    from regrow.events.story_text import after_report
    from regrow.events.story_types import (
        Expiry,
        Failure,
        InProcessRestart,
        LostNode,
        OtherFailure,
        PlannedRestart,
        Replacement,
        ServerEnd,
        StalledProgress,
        StepMark,
        Story,
        Suspension,
        story,
    )

__all__ = [
    "EVENTS_FILE",
    "Event",
    "EventFile",
    "EventLog",
    "EventMetadataValue",
    "EventSource",
    "Expiry",
    "Failure",
    "InProcessRestart",
    "LostNode",
    "NodeState",
    "OtherFailure",
    "PlannedRestart",
    "RdzvEvent",
    "StalledProgress",
    "StepMark",
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

# The story is built when a job is over. A launcher loads it lazily, so the start stays fast.
__getattr__, __dir__ = lazily(
    globals(),
    {
        "causes": "Cause find_cause",
        "evidence": "STOP_SPREAD_S describe_failure left_for_signal short_scope",
        "printing": "print_story",
        "runs": "Run Session jobs_of runs_of",
        "story_incidents": "clean duration",
        "story_text": "after_report",
        "story_types": (
            "Expiry Failure InProcessRestart LostNode OtherFailure PlannedRestart"
            " Replacement ServerEnd StalledProgress StepMark Story Suspension story"
        ),
    },
)
