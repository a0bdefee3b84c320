"""What a rank is told, as it follows from the state of its group alone.

A question is answered when there is an answer, and waits until there is. So one that comes twice
gets the same answer as the first time, in whatever order the events came, and the iteration before
is remembered for those whose answer was lost. No living rank can be further behind, since the group
only goes on when all of them are ready.
"""

from __future__ import annotations

from regrow.inprocess import _messages as messages
from regrow.inprocess._group import Group, Phase, bit
from regrow.inprocess._link import Faults


def reply(group: Group, asked: messages.Asked, now: float) -> messages.Told | None:
    """Return what a question is answered with, or None while it has to wait.

    The questions of all living ranks have the same answer if they are of one type and iteration.
    """
    if isinstance(asked, messages.Report) and asked.number == messages.OVERDUE:
        return messages.Noted(True)  # who asks may be another one, whatever became of that rank
    if isinstance(asked, messages.Accuse):
        return messages.Noted(_ended_by(group, asked))
    if isinstance(asked, messages.Leave):
        return messages.Left(_faults_of(group, asked, now))
    end = None if bit(asked.rank) & group.living else group.end_of(asked.rank)
    if end is not None:
        if end.own and isinstance(asked, messages.Follow):
            return messages.Over()
        return messages.CountedOut(end.fault)
    if isinstance(asked, messages.Join):
        joined = group.phase is not Phase.JOINING
        return messages.Go(group.iteration) if joined else group.failure
    if isinstance(asked, messages.Report | messages.Completed):
        return messages.Noted(True)
    if asked.iteration == group.iteration - 1 and group.before is not None:
        if isinstance(asked, messages.Ready):
            met = group.before
            return messages.Gathered(met._replace(faults=met.faults._replace(now=now)))
        return messages.Interrupted(group.before.faults._replace(now=now))
    if asked.iteration != group.iteration:
        return messages.Problem(
            f"rank {asked.rank} asks about iteration {asked.iteration}, and the others are in "
            f"{group.iteration}"
        )
    return _reply_now(group, asked, now)


def _reply_now(group: Group, asked: messages.Asked, now: float) -> messages.Told | None:
    phase = group.phase
    if group.failure is not None:
        return group.failure
    if phase is Phase.OVER:
        return messages.Over()
    waits_on = isinstance(asked, messages.Heard) and phase is Phase.LAST_CALL
    if phase in (Phase.LAST_CALL, Phase.ENDING):
        if waits_on or isinstance(asked, messages.Ready):
            return None
        return messages.Interrupted(Faults(group.iteration, group.faults, now))
    entered = isinstance(asked, messages.Enter) and phase is Phase.RUNNING
    if entered or (isinstance(asked, messages.WaitCompleted) and group.completed):
        return messages.Go(group.iteration)
    return None


def _faults_of(group: Group, asked: messages.Leave, now: float) -> Faults:
    """What a rank that leaves is told: all of its iteration, or the least if that is gone."""
    if asked.iteration == group.iteration:
        return Faults(group.iteration, group.faults, now)
    if group.before is not None and asked.iteration == group.before.faults.iteration:
        return group.before.faults._replace(now=now)
    end = group.end_of(asked.rank)
    if end is None:  # the group had failed, or was over, before it left
        return Faults(asked.iteration, (), now)
    records = (end.fault,) if end.fault == end.root else (end.root, end.fault)
    return Faults(end.iteration, records, now)


def _ended_by(group: Group, asked: messages.Accuse) -> bool:
    end = group.end_of(asked.rank)
    said = asked.kind, asked.message[: messages.TEXT]
    return end is not None and not end.own and (end.fault.kind, end.fault.message) == said
