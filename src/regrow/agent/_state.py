"""What an agent remembers between two decisions; see `_decide`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from regrow.agent._words import Verdict, Waiting


class Phase(StrEnum):
    """Where the agent is; see the drawing above."""

    IDLE = "IDLE"
    FORMING = "FORMING"
    RUNNING = "RUNNING"
    JUDGING = "JUDGING"
    BACKOFF = "BACKOFF"
    BARRIER = "BARRIER"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class State:
    """What the agent must remember between two events."""

    remaining_restarts: int  # failures that may still be healed
    phase: Phase = Phase.IDLE
    started_at: float = 0.0  # monotonic seconds: when the running attempt was formed
    quick_ends: int = 0  # attempts in a row that lived less than QUICK_S
    looking: bool = False  # a Look operation runs
    look_again: bool = False  # something changed while it ran
    round: int | None = None  # the latest that was formed here
    shared: bool = False  # failures are judged by all nodes
    leads: bool = True
    over: int = 0  # the latest round that is known to be over
    why_over: str = ""
    lapsed: int = 0  # the latest round in which this node's lease was over
    why_lapsed: str = ""
    closed: bool = False  # there will be no other round
    job_failed: bool = False  # and that is because the job failed
    succeeded: bool = False  # this node's workers did, before the round ended all the same
    waiting: Waiting | None = None  # the latest of a round not known to be formed
    gathered: int = 0  # nodes that wait
    gathered_since: float = 0.0  # when the first of them came
    gather_until: float | None = None  # when they are let in
    verdict: Verdict | None = None  # in JUDGING: it is there, the group's end is not yet
    ended: bool = False  # in JUDGING: the group has ended, the verdict is not yet there
    next_reason: str = ""  # in BACKOFF: of the restart
