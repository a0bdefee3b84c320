"""The life of one group of workers: one fails, all are stopped; all are gone, the group is over.

Pure: what happened goes in, what to do comes out. The context (`_context`) feeds it with the
guardian's events and carries out the actions.

A worker *ends* when its process does and is *gone* when nothing that it started is left either. The
group is over when every worker is gone, so that no process of one attempt can meet one of the next.

A worker that ends after it was told to stop has not failed, however it ended: what it did then, it
did because of us. That one of them had failed before, and only lingered, shows in its error file;
`_result` looks at those.

A worker may be one that the others can do without: they have an in-process restarter, and so had
it. Then its end is a *loss*, and they go on, as long as one of them runs or has ended well. What
became of the others says how the group ended. If none is left, the losses were failures.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one worker."""

    code: int | None = None
    """Its exit code, negative for a signal, once it ended."""
    exited: float | None = None
    """When it ended, in seconds of the monotonic clock."""
    well: bool = False
    """It did all that it was started for."""
    failed: bool = False
    """It ended by itself, and not well."""
    lost: bool = False
    """It did, too, and the others go on without it."""
    gone: bool = False
    """Nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Group:
    """All workers, by local rank."""

    members: tuple[Member, ...]
    grace: float
    """Seconds between SIGTERM and SIGKILL when a failure ends the group."""
    stopped_at: float | None = None
    """When the workers were first told to stop, in seconds of the monotonic clock."""

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that failed."""
        return tuple(rank for rank, member in enumerate(self.members) if member.failed)

    @property
    def over(self) -> bool:
        """Nothing of any worker is left."""
        return all(member.gone for member in self.members)


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of worker `rank` ended at `at`."""

    rank: int
    code: int
    well: bool
    """It did all that it was started for."""
    told_to: bool
    """It had been told to stop."""
    at: float
    replaceable: bool = False
    """The others can go on without it."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of worker `rank` is left."""

    rank: int


@dataclass(frozen=True, slots=True)
class Close:
    """Whoever owns the group wants it ended, within `grace` seconds."""

    signum: int
    grace: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Signal these ranks with `signum`, and after `grace` seconds with SIGKILL."""

    ranks: tuple[int, ...]
    signum: int
    grace: float


def step(group: Group, event: Ended | Gone | Close, now: float) -> tuple[Group, Stop | None]:
    """The group after `event`, and whom to stop because of it.

    Args:
        group: as it was.
        event: what happened.
        now: seconds of the monotonic clock.
    """
    match event:
        case Ended(rank, code, well, told_to, at, replaceable):
            failed = not well and not told_to
            lost = failed and replaceable and group.stopped_at is None
            member = replace(group.members[rank], code=code, exited=at, well=well)
            group = _with(group, rank, replace(member, failed=failed and not lost, lost=lost))
            if lost and any(_counts(member) for member in group.members):
                return group, None
            if lost:
                group = _all_lost(group)
            if failed and group.stopped_at is None:
                return _stop(group, signal.SIGTERM, group.grace, now)
            return group, None
        case Gone(rank):
            return _with(group, rank, replace(group.members[rank], gone=True)), None
        case Close(signum, grace):
            return _stop(group, signum, grace, now)


def _counts(member: Member) -> bool:
    """Whether a worker runs, or did what it was started for."""
    return member.code is None or member.well


def _all_lost(group: Group) -> Group:
    """Nobody is left who could go on: whoever was lost has failed."""
    found = (replace(m, failed=True, lost=False) if m.lost else m for m in group.members)
    return replace(group, members=tuple(found))


def _stop(group: Group, signum: int, grace: float, now: float) -> tuple[Group, Stop | None]:
    ranks = tuple(rank for rank, member in enumerate(group.members) if not member.gone)
    if not ranks:
        return group, None
    first = now if group.stopped_at is None else group.stopped_at
    return replace(group, stopped_at=first), Stop(ranks, signum, grace)


def _with(group: Group, rank: int, member: Member) -> Group:
    return replace(group, members=(*group.members[:rank], member, *group.members[rank + 1 :]))
