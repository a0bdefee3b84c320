"""State of a group of ranks on the store server, and the replies to ranks.

The functions in `group_rules` change the state.

A set of ranks is an integer with one bit per rank: a set of a thousand ranks costs as much as a
string of 128 bytes.

**Replies** to ranks are a pure function of the group's state. A question waits until it has an
answer. So a repeated question gets the same answer, in whatever order the events arrive. The group
remembers the previous iteration for ranks that lost an answer. No living rank can be further
behind, because the group continues only when all living ranks are ready.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Fault, Faults, GroupRefusal, Met, Timeouts


class GroupPhase(Enum):
    """Phases of a group; the value names the action that the living ranks still have to do."""

    JOINING = "joined"
    ENTERING = "entered"
    RUNNING = "done"
    CONFIRMING = "confirmed"
    LAST_CALL = "answered"
    ENDING = "ready"
    OVER = "over"


class GroupPlace(NamedTuple):
    """The place that one rank entered with."""

    rank: int
    """The initial rank."""
    place: int
    """Its rank in the world of the iteration."""
    world_size: int
    """The size of that world, as this rank computed it."""
    active: bool = True
    """False: the rank is in reserve."""


class End(NamedTuple):
    """How a rank ended."""

    fault: Fault
    own: bool
    """True if the rank reported its exit itself; False if it was evicted."""


class Group(NamedTuple):
    """State of a group; sets of initial ranks are integers with one bit per rank."""

    size: int
    """Number of ranks that have to join."""
    timeouts: Timeouts
    phase: GroupPhase = GroupPhase.JOINING
    iteration: int = 0
    living: int = 0
    """Ranks that have joined and not ended."""
    here: int = 0
    """Ranks that have done the action of this phase. While joining, lost ranks stay in this set."""
    since: float | None = None
    """Time of the first such action, or start of the last call or confirmation; seconds."""
    world: int = 0
    """Ranks that lived when this iteration's world was formed; in iteration 0 all ranks."""
    discarded: int = 0
    """Ranks of `world` that left because the assignment gave them no place."""
    places: tuple[GroupPlace, ...] = ()
    """Places of the ranks that entered this iteration, including ranks that have ended since."""
    entered: int = 0
    """Ranks that entered this iteration, as a set."""
    ready: int = 0
    """Ranks that are ready. A rank may be ready before the last call is over."""
    completed: bool = False
    """Whether the function of a rank has returned in this iteration."""
    faults: tuple[Fault, ...] = ()
    """Faults of this iteration."""
    reported: frozenset[tuple[int, int, int]] = frozenset()
    """Iteration, rank and number of each report in this iteration and the previous one."""
    before: Met | None = None
    """How the previous iteration ended."""
    ends: tuple[End, ...] = ()
    """How each ended rank ended."""
    awaited: int = 0
    """Ranks that ended in this iteration, and that another process may continue."""
    awaited_until: float = 0.0
    """Until when the group waits for these processes, in seconds."""
    given_up: int = 0
    """Ranks of which an agent has reported that no process continues them."""
    newcomers: int = 0
    """Ranks that ended, and whose next process waits for the next iteration."""
    origins: tuple[tuple[int, str], ...] = ()
    """See `Joined.origin`, for processes that have come since the last iteration began."""
    failure: GroupRefusal | None = None
    """Why no rank can continue; None if ranks can."""

    @property
    def finished(self) -> bool:
        """Whether no event can change the group any more."""
        joined = self.phase is not GroupPhase.JOINING
        over = self.phase is GroupPhase.OVER or self.failure is not None
        return over or (joined and not self.living)

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due, in seconds; None if no rank waits for another."""
        if self.since is None or self.finished:
            return None
        if self.phase is GroupPhase.ENDING and not self.living & ~self.here:
            return self.awaited_until
        return self.since + self.allowed

    def end_of(self, rank: int) -> End | None:
        """Return how a rank ended; None if it has not."""
        return next((end for end in self.ends if end.fault.rank == rank), None)

    @property
    def allowed(self) -> float:
        """Seconds for which this phase waits for missing ranks, counted from `since`."""
        if self.phase in (GroupPhase.RUNNING, GroupPhase.CONFIRMING):
            return self.timeouts.completion
        return (
            self.timeouts.last_call if self.phase is GroupPhase.LAST_CALL else self.timeouts.barrier
        )


def bit(rank: int) -> int:
    """Return the set with one rank."""
    return 1 << rank


def ranks_of(ranks: int) -> tuple[int, ...]:
    """Return the ranks of a set, ascending."""
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def reply(group: Group, asked: messages.Asked, now: float) -> messages.GroupReply | None:
    """Return the answer to a question; None while the question has to wait.

    For living ranks, questions of the same type and iteration have the same answer.
    """
    if isinstance(asked, messages.ReportDead) or (
        isinstance(asked, messages.Report) and asked.number == messages.OVERDUE
    ):
        return messages.Noted()  # the monitor may report for a rank that has ended
    if isinstance(asked, messages.LeaveGroup):
        return _reply_to_leave(group, asked, now)
    if isinstance(asked, messages.Join):
        return _reply_to_join(group, asked, now)
    end = None if bit(asked.rank) & group.living else group.end_of(asked.rank)
    if end is not None:
        if end.own and isinstance(asked, messages.Follow):
            return messages.Over()
        return _evicted(end)
    if isinstance(asked, messages.Report | messages.Completed):
        return messages.Noted()
    if asked.iteration == group.iteration - 1 and group.before is not None:
        if isinstance(asked, messages.Ready):
            met = group.before
            return messages.Gathered(met._replace(faults=met.faults._replace(now=now)))
        return messages.Interrupted(group.before.faults._replace(now=now))
    if asked.iteration != group.iteration:
        return GroupRefusal(
            "impossible",
            f"initial rank {asked.rank} asks about iteration {asked.iteration}, but the group is "
            f"in iteration {group.iteration}",
        )
    return _reply_now(group, asked, now)


def _reply_now(group: Group, asked: messages.Asked, now: float) -> messages.GroupReply | None:
    """Return the answer to a question about the current iteration."""
    phase = group.phase
    if group.failure is not None:
        return group.failure
    if phase is GroupPhase.OVER:
        return messages.Over()
    if phase is GroupPhase.ENDING or phase is GroupPhase.LAST_CALL:
        waits = isinstance(asked, messages.Ready) or (
            isinstance(asked, messages.AnswerLastCall) and phase is GroupPhase.LAST_CALL
        )
        return None if waits else messages.Interrupted(Faults(group.iteration, group.faults, now))
    happened = (
        (isinstance(asked, messages.RankDone) and phase is GroupPhase.CONFIRMING)
        or (
            isinstance(asked, messages.Enter)
            and phase in (GroupPhase.RUNNING, GroupPhase.CONFIRMING)
        )
        or (isinstance(asked, messages.WaitCompleted) and group.completed)
    )
    return messages.Go(group.iteration) if happened else None


def _reply_to_join(group: Group, asked: messages.Join, now: float) -> messages.GroupReply | None:
    if group.phase is GroupPhase.OVER and asked.incarnation:
        return messages.Over()
    if group.newcomers & bit(asked.rank):
        return group.failure
    end = None if group.living & bit(asked.rank) else group.end_of(asked.rank)
    if end is not None:
        return _evicted(end)
    if group.phase is GroupPhase.JOINING:
        return group.failure
    met = group.before
    place = (
        next((each.place for each in met.joined if each.rank == asked.rank), None) if met else None
    )
    if met is None or place is None:
        return messages.Go(group.iteration)
    return messages.Admitted(met._replace(faults=met.faults._replace(now=now)), place)


def _evicted(end: End) -> GroupRefusal:
    fault = end.fault
    return GroupRefusal(
        "evicted",
        f"initial rank {fault.rank} was evicted ({fault.kind}: {fault.message}); the other "
        f"ranks continue without it",
    )


def _reply_to_leave(group: Group, asked: messages.LeaveGroup, now: float) -> messages.GroupReply:
    """Confirm the exit of a rank only if the other ranks can continue without it."""
    if group.end_of(asked.rank) is None:
        if group.failure is not None:
            return group.failure
        if group.phase is GroupPhase.OVER:
            return messages.Over()
    faults = Faults(asked.iteration, (), now)  # of an iteration whose faults are no longer kept
    if asked.iteration == group.iteration:
        faults = faults._replace(records=group.faults)
    elif group.before is not None and asked.iteration == group.before.faults.iteration:
        faults = faults._replace(records=group.before.faults.records)
    return messages.Left(faults)
