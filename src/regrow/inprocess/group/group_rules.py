"""Rules of a group: when an iteration ends, and which ranks are alive for the next one.

A group is in one phase at a time. A phase ends for all ranks at once:

    JOINING ──► ENTERING ──► RUNNING ──► CONFIRMING ──► OVER
     all have   all have  │   all are  │  all know that
     joined     entered   │   done     │  all are done
                  ▲       ▼            ▼ a fault, while entering too
                  │    LAST_CALL ──► ENDING
                  │     all have      all are ready
                  │     answered         │
                  └──────────────────────┘ the next iteration

Each phase is a barrier of the living ranks. It is over when no living rank is missing, so it also
ends when the last missing rank ends. Each phase has a time-out with its own effect:

- A last call is over, even if answers are missing.
- A rank that is missing among the done, or among those that confirm, has a fault.
- At the other barriers the state of a missing rank is unknown, and its monitor should have ended it
  long before. So the group fails, and every rank receives the missing ranks.

CONFIRMING handles a rank that dies at the end. Before the call is over, the other ranks can
continue without it. Afterwards its result is lost. Its launcher has to distinguish the two cases.
So each rank first learns that all ranks are done. It then records, where its launcher can read it,
that no rank continues in its place (`regrow._progress`). Then it confirms. The call is over when
all have confirmed.

A fault ends the iteration in which it is recorded. A fault after ENDING and before
the next RUNNING belongs to the next iteration: its ranks enter, receive the fault at once, and meet
again.

**Places.** The rank assignment runs on every rank. The server receives only its result: the place
with which each rank enters. The places must fit together, or ranks would meet in two different
worlds. They also show which places are empty after a loss: the places that no living rank holds.
This works even if the lost rank never sent its place.
"""

from __future__ import annotations

from typing import NamedTuple

from regrow.inprocess.attribution import list_ranks
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import End, Group, GroupPhase, GroupPlace, bit, ranks_of
from regrow.inprocess.group.group_messages import (
    SOFT_TIMEOUT,
    Fault,
    Faults,
    GroupRefusal,
    Joined,
    Met,
)


class Lost(NamedTuple):
    """Event: the connection of a rank is over."""

    rank: int
    kind: str
    message: str
    lag: float = 0.0
    """Seconds since the connection was lost."""


class Tick(NamedTuple):
    """Event: time has passed."""


Event = messages.Asked | messages.NotReplaced | Lost | Tick

_AWAITED = {
    GroupPhase.JOINING: messages.Join,
    GroupPhase.ENTERING: messages.Enter,
    GroupPhase.RUNNING: messages.RankDone,
    GroupPhase.CONFIRMING: messages.Confirm,
    GroupPhase.LAST_CALL: messages.AnswerLastCall,
    GroupPhase.ENDING: messages.Ready,
}
"""The question by which a rank arrives at the barrier of a phase."""


def step(group: Group, event: Event, now: float) -> Group:
    """Return the group after an event; the same object if the event changes nothing.

    Args:
        group: the group before the event.
        event: the event. A question that only waits changes nothing.
        now: seconds of a monotonic clock, never less than before.

    Raises:
        ValueError: the event is impossible in this state; the text gives the reason.
    """
    after = _handle(group, event, now)
    while (further := _advance(after, now)) is not after:
        after = further
    return after


# ----------------------------------------------------------------------- events


def _handle(group: Group, event: Event, now: float) -> Group:
    if isinstance(event, Tick | messages.ReportDead) or group.finished:
        return group
    if isinstance(event, messages.Join):
        return _join(group, event, now)
    one = bit(event.rank)
    if isinstance(event, messages.NotReplaced):
        # The report may come before that of the loss.
        return group._replace(awaited=group.awaited & ~one, given_up=group.given_up | one)
    if isinstance(event, Lost) and group.newcomers & one:  # it has taken part in nothing yet
        return _await(group._replace(newcomers=group.newcomers & ~one), one, now)
    if not group.living & one:
        return group
    if isinstance(event, Lost):
        fault = _fault(event, now)
        return _await(_ended(_record(group, fault), fault, own=False), one, now)
    if event.iteration > group.iteration:
        raise ValueError(
            f"initial rank {event.rank} is in iteration {event.iteration}, but the group is in "
            f"iteration {group.iteration}"
        )
    if isinstance(event, messages.LeaveGroup):
        return _leave(group, event, now)
    if isinstance(event, messages.Report):
        return _report(group, event, now)
    if event.iteration < group.iteration or group.phase is GroupPhase.JOINING:
        return group
    return (
        _enter(group, event, now) if isinstance(event, messages.Enter) else _act(group, event, now)
    )


def _join(group: Group, event: messages.Join, now: float) -> Group:
    one = bit(event.rank)
    if group.living & one:
        return group
    if group.phase is not GroupPhase.JOINING:
        if not event.incarnation or group.newcomers & one:
            return group
        others = tuple(each for each in group.origins if each[0] != event.rank)
        origins = (*others, (event.rank, event.origin))[: messages.TEXTS]  # every rank gets them
        return _continued(group, one)._replace(newcomers=group.newcomers | one, origins=origins)
    return _arrive(
        _continued(group, one)._replace(
            living=group.living | one,
            # Another process replaces a process that ended before the first iteration.
            faults=tuple(fault for fault in group.faults if fault.rank != event.rank),
            ends=tuple(end for end in group.ends if end.fault.rank != event.rank),
        ),
        one,
        now,
    )


def _continued(group: Group, one: int) -> Group:
    """Return the group without the wait for a rank: another process continues it."""
    return group._replace(awaited=group.awaited & ~one, given_up=group.given_up & ~one)


def _act(group: Group, event: messages.OfIteration, now: float) -> Group:
    """Handle what a rank does after it has entered the current iteration."""
    one, phase = bit(event.rank), group.phase
    acts = not isinstance(event, messages.AnswerLastCall | messages.Follow | messages.WaitCompleted)
    if acts and not group.entered & one:
        raise ValueError(f"initial rank {event.rank} never entered iteration {group.iteration}")
    if isinstance(event, messages.Confirm) and phase is GroupPhase.RUNNING:
        raise ValueError(
            f"initial rank {event.rank} confirms the end of iteration {group.iteration}, but not "
            f"all ranks are done"
        )
    if isinstance(event, messages.Completed) and phase is GroupPhase.RUNNING:
        return group if group.completed else group._replace(completed=True)
    if isinstance(event, messages.Ready):
        if phase not in (GroupPhase.LAST_CALL, GroupPhase.ENDING):
            raise ValueError(
                f"initial rank {event.rank} is ready for the end of iteration {group.iteration}, "
                f"but the iteration has no fault"
            )
        return _arrive(group._replace(ready=group.ready | one), one, now)
    return _arrive(group, one, now) if isinstance(event, _AWAITED[phase]) else group


def _arrive(group: Group, one: int, now: float) -> Group:
    """Count a rank at the barrier of the current phase."""
    if group.here & one:
        return group
    since = now if group.since is None else group.since
    return group._replace(here=group.here | one, since=since)


def _enter(group: Group, event: messages.Enter, now: float) -> Group:
    one = bit(event.rank)
    if event.place >= event.world_size:
        raise ValueError(
            f"initial rank {event.rank} enters as rank {event.place} of {event.world_size} ranks"
        )
    if group.entered & one:
        return group
    place = GroupPlace(event.rank, event.place, event.world_size, event.active)
    group = group._replace(places=(*group.places, place), entered=group.entered | one)
    return _arrive(group, one, now) if group.phase is GroupPhase.ENTERING else group


def _report(group: Group, event: messages.Report, now: float) -> Group:
    known = event.iteration, event.rank, event.number
    if known in group.reported:
        return group
    group = group._replace(reported=group.reported | {known})
    fault = _fault(event, now)
    if event.iteration == group.iteration:
        return _record(group, fault)
    before = group.before
    if before is None or before.faults.iteration != event.iteration:
        return group
    faults = before.faults._replace(records=(*before.faults.records, fault))
    return group._replace(before=before._replace(faults=faults))


def _leave(group: Group, event: messages.LeaveGroup, now: float) -> Group:
    fault, one = _fault(event, now), bit(event.rank)
    if event.discarded and not group.entered & one and group.phase is not GroupPhase.JOINING:
        group = group._replace(discarded=group.discarded | one)
    else:
        group = _record(group, fault)
    group = _ended(group, fault, own=True)
    return _await(group, one, now) if event.replaced else group


def _await(group: Group, one: int, now: float) -> Group:
    """Let the group wait for another process of a rank that has ended, if the ranks want that."""
    wait = group.timeouts.replacement
    if not wait or group.given_up & one:
        return group
    return group._replace(awaited=group.awaited | one, awaited_until=now + wait)


def _fault(event: Lost | messages.Report | messages.LeaveGroup, now: float) -> Fault:
    return Fault(event.kind, event.rank, event.message[: messages.TEXT], now, event.lag)


def _ended(group: Group, fault: Fault, *, own: bool) -> Group:
    """Count a rank that died or left out of the living ranks of the group."""
    living = group.living & ~bit(fault.rank)
    return group._replace(living=living, ends=(*group.ends, End(fault, own)))


def _record(group: Group, fault: Fault) -> Group:
    if len(group.faults) >= messages.TEXTS:
        fault = fault._replace(message="")
    return group._replace(faults=(*group.faults, fault))


# ----------------------------------------------------------------------- phases


def _advance(group: Group, now: float) -> Group:
    """Return the group in its next phase, if the current one is over."""
    if group.finished:
        if group.living or group.failure is not None or not group.newcomers:
            return group
        text = "every rank that could continue the function has ended"
        return group._replace(failure=GroupRefusal("missing", text))
    phase = group.phase
    if group.faults and phase in (GroupPhase.ENTERING, GroupPhase.RUNNING, GroupPhase.CONFIRMING):
        return _begin(group, GroupPhase.LAST_CALL, since=now)
    late = group.since is not None and now >= group.since + group.allowed
    missing = _missing(group)
    if missing and not late:
        return group
    if phase is GroupPhase.LAST_CALL:
        since = now if group.ready else None
        return _begin(group, GroupPhase.ENDING, here=group.ready, since=since)
    if missing and phase in (GroupPhase.RUNNING, GroupPhase.CONFIRMING):
        return _blame(group, missing, now)
    if missing:
        return group._replace(failure=GroupRefusal("missing", _missing_text(group, missing)))
    if phase is GroupPhase.JOINING:
        return _begin(group._replace(world=_everyone(group)), GroupPhase.ENTERING)
    if phase is GroupPhase.RUNNING:
        return _begin(group, GroupPhase.CONFIRMING, since=now)
    if phase is GroupPhase.CONFIRMING:
        return _begin(group, GroupPhase.OVER)
    if phase is GroupPhase.ENDING and now < group.awaited_until and _waits_for_replacement(group):
        return group
    clash = _clash(group)
    if clash:
        return group._replace(failure=GroupRefusal("mismatch", clash))
    return _begin(group, GroupPhase.RUNNING) if phase is GroupPhase.ENTERING else _meet(group, now)


def _missing(group: Group) -> int:
    awaited = _everyone(group) if group.phase is GroupPhase.JOINING else group.living
    return awaited & ~group.here


def _everyone(group: Group) -> int:
    return (1 << group.size) - 1


def _begin(group: Group, phase: GroupPhase, *, here: int = 0, since: float | None = None) -> Group:
    return group._replace(phase=phase, here=here, since=since)


def _blame(group: Group, missing: int, now: float) -> Group:
    """Record a fault of each rank that missed the completion time-out; all ranks then restart."""
    late = f"{group.timeouts.completion:g} s after"
    text = f"not done {late} the first rank was"
    if group.phase is GroupPhase.CONFIRMING:
        text = f"did not confirm the end of the call {late} all ranks were done"
    for rank in ranks_of(missing):
        reported = group.reported | {(group.iteration, rank, messages.OVERDUE)}
        group = _record(group._replace(reported=reported), Fault(SOFT_TIMEOUT, rank, text, now))
    return group


def _waits_for_replacement(group: Group) -> bool:
    """Return whether ranks that are ready wait for another process of a rank that has ended.

    Ranks in reserve take over at once, as do processes that wait to join.
    """
    reserve = sum(bit(place.rank) for place in group.places if not place.active)
    spare = (reserve & (group.living | group.newcomers)) | (group.newcomers & ~group.world)
    return (group.awaited & ~reserve).bit_count() > spare.bit_count()


def _meet(group: Group, now: float) -> Group:
    held = {place.place for place in group.places if group.living & bit(place.rank)}
    world_size = next(p.world_size for p in group.places if group.living & bit(p.rank))
    empty = [place for place in range(world_size) if place not in held]
    joined = _seat_newcomers(group, empty, world_size)
    taken = {each.place for each in joined}
    iteration, living = group.iteration + 1, group.living | group.newcomers
    met = Met(
        iteration,
        tuple(place for place in empty if place not in taken),
        ranks_of(group.world & ~living & ~group.discarded),
        Faults(group.iteration, group.faults, now),
        max([world_size, *(place + 1 for place in taken)]),
        joined,
    )
    return Group(
        size=group.size,
        timeouts=group.timeouts,
        phase=GroupPhase.ENTERING,
        iteration=iteration,
        living=living,
        world=living,
        reported=frozenset(known for known in group.reported if known[0] == group.iteration),
        before=met,
        ends=tuple(end for end in group.ends if not group.newcomers & bit(end.fault.rank)),
        given_up=group.given_up,
    )


def _seat_newcomers(group: Group, empty: list[int], world_size: int) -> tuple[Joined, ...]:
    """Return the place of each newcomer, in the numbering of the iteration that ends.

    A rank that ended in this iteration gets its place back. If it had not entered, its place is not
    known here, and any empty place will do. A rank that ended earlier has none: it gets a new place
    after the others.
    """
    newcomers = ranks_of(group.newcomers)
    places = {place.rank: place.place for place in group.places if place.rank in newcomers}
    free = [place for place in empty if place not in places.values()]
    end = world_size
    for rank in newcomers:
        if rank not in places and group.world & bit(rank) and free:
            places[rank] = free.pop(0)
        elif rank not in places:
            places[rank], end = end, end + 1
    origins = dict(group.origins)
    return tuple(Joined(rank, places[rank], origins.get(rank, "")) for rank in newcomers)


def _clash(group: Group) -> str:
    """Return how the living ranks disagree about the world; empty if they agree."""
    first: GroupPlace | None = None
    holders: dict[int, int] = {}
    for place in group.places:
        if not group.living & bit(place.rank):
            continue
        first = first or place
        other = holders.setdefault(place.place, place.rank)
        if place.world_size != first.world_size:
            text = (
                f"initial rank {first.rank} entered a world of {first.world_size} ranks, and "
                f"initial rank {place.rank} one of {place.world_size}"
            )
            break
        if other != place.rank:
            text = f"initial ranks {other} and {place.rank} both entered as rank {place.place}"
            break
    else:
        if first is None or group.faults or len(holders) == first.world_size:
            return ""
        text = f"{len(holders)} ranks entered a world of {first.world_size} ranks"
    return (
        f"{text} (iteration {group.iteration}): the rank assignment must give the same result on "
        f"all ranks"
    )


def _missing_text(group: Group, missing: int) -> str:
    ranks = ranks_of(missing)
    return (
        f"{len(ranks)} of {group.size} ranks ({list_ranks(ranks)}) did not arrive at the barrier "
        f"{group.phase.value!r} of iteration {group.iteration} within {group.timeouts.barrier:g} s "
        f"(barrier_timeout) of the first that did"
    )
