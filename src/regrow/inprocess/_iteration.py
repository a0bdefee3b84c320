"""The rules of a group: who is in which iteration, and when it ends.

A group is in one phase at a time, and a phase ends for all of it at once:

    JOINING ──► ENTERING ──► RUNNING ──► OVER
     all have   all have  │   all are
     joined     entered   │   done
                  ▲       ▼ a fault, while entering too
                  │    LAST_CALL ──► ENDING
                  │     all have      all are ready
                  │     heard            │
                  └──────────────────────┘ the next iteration

Each phase is a barrier of the living ranks: it is over when none of them is missing, whether the
last one came or ended. Each has a time from which on the missing have to answer for it. A last call
is then over all the same. Who is missing among the done has a fault. At the other barriers nobody
can tell what became of the missing, whose watchers should have ended them long before; so the group
fails, and every rank is told who was missing.

A fault ends the iteration in which it is recorded. What happens between "met" and the next world's
beginning is a fault of the next iteration: its ranks enter, are told at once, and meet again.

Places. The rank assignment runs on every rank; here only its outcome is known, the place that each
rank enters with. They must be each other's complement, or ranks would meet in two different worlds.
And they say which places are empty when ranks have been lost: those that no living rank holds, also
if the lost rank never told its own.
"""

from __future__ import annotations

from typing import NamedTuple

from regrow.inprocess import _messages as messages
from regrow.inprocess._group import End, Group, Phase, Place, bit, ranks_of
from regrow.inprocess._link import SOFT_TIMEOUT, Fault, Faults, Met

SHOWN = 8
"""How many missing ranks an error names."""


class Lost(NamedTuple):
    """A rank's connection is over."""

    rank: int
    kind: str
    message: str
    lag: float = 0.0
    """For how many seconds it has been."""


class Tick(NamedTuple):
    """Time has passed."""


Event = messages.Asked | Lost | Tick


def step(group: Group, event: Event, now: float) -> Group:
    """Return what becomes of a group; the same object if the event changes nothing.

    Args:
        group: as it is.
        event: what happened. A question that only waits changes nothing.
        now: seconds of a monotonic clock, never less than before.

    Raises:
        ValueError: what the event says cannot be; says why.
    """
    after = _take_in(group, event, now)
    while (further := _advance(after, now)) is not after:
        after = further
    return after


# ----------------------------------------------------------------------- events


def _take_in(group: Group, event: Event, now: float) -> Group:
    if isinstance(event, Tick) or group.finished:
        return group
    if isinstance(event, messages.Join):
        return _join(group, event, now)
    one = bit(event.rank)
    if not group.living & one:
        return group
    if isinstance(event, Lost | messages.Accuse):
        lag = event.lag if isinstance(event, Lost) else 0.0
        fault = Fault(event.kind, event.rank, event.message[: messages.TEXT], now, lag)
        return _ended(_record(group, fault), fault, own=False)
    if event.iteration > group.iteration:
        raise ValueError(
            f"rank {event.rank} is in iteration {event.iteration}, and the others in "
            f"{group.iteration}"
        )
    if isinstance(event, messages.Leave):
        return _leave(group, event, now)
    if isinstance(event, messages.Report):
        return _report(group, event, now)
    if event.iteration < group.iteration or group.phase is Phase.JOINING:
        return group
    return _arrive(group, event, one, now)


def _join(group: Group, event: messages.Join, now: float) -> Group:
    one = bit(event.rank)
    if group.phase is not Phase.JOINING or group.living & one:
        return group
    return group._replace(
        living=group.living | one,
        here=group.here | one,
        since=now if group.since is None else group.since,
        # Another process takes the place of one that has ended before anything began.
        faults=tuple(fault for fault in group.faults if fault.rank != event.rank),
        ends=tuple(end for end in group.ends if end.fault.rank != event.rank),
    )


def _arrive(group: Group, event: messages.OfIteration, one: int, now: float) -> Group:
    if isinstance(event, messages.Enter):
        return _enter(group, event, one, now)
    acts = isinstance(event, messages.Ready | messages.Done | messages.Completed)
    if acts and not group.entered & one:
        raise ValueError(f"rank {event.rank} never entered iteration {group.iteration}")
    phase = group.phase
    if isinstance(event, messages.Completed) and phase is Phase.RUNNING:
        return group._replace(completed=True) if not group.completed else group
    if isinstance(event, messages.Ready):
        if phase not in (Phase.LAST_CALL, Phase.ENDING):
            raise ValueError(
                f"rank {event.rank} is ready for the end of iteration {group.iteration}, in which "
                f"nothing has failed"
            )
        group = group._replace(ready=group.ready | one)
        return _here(group, one, now)
    waited_for = (isinstance(event, messages.Heard) and phase is Phase.LAST_CALL) or (
        isinstance(event, messages.Done) and phase is Phase.RUNNING
    )
    return _here(group, one, now) if waited_for else group


def _here(group: Group, one: int, now: float) -> Group:
    if group.here & one:
        return group
    since = now if group.since is None else group.since
    return group._replace(here=group.here | one, since=since)


def _enter(group: Group, event: messages.Enter, one: int, now: float) -> Group:
    if event.place >= event.world_size:
        raise ValueError(
            f"rank {event.rank} cannot be the new rank {event.place} of {event.world_size}"
        )
    if group.entered & one:
        return group
    place = Place(event.rank, event.place, event.world_size)
    group = group._replace(places=(*group.places, place), entered=group.entered | one)
    return _here(group, one, now) if group.phase is Phase.ENTERING else group


def _report(group: Group, event: messages.Report, now: float) -> Group:
    known = event.iteration, event.rank, event.number
    if known in group.reported:
        return group
    group = group._replace(reported=group.reported | {known})
    fault = Fault(event.kind, event.rank, event.message[: messages.TEXT], now, event.lag)
    if event.iteration == group.iteration:
        return _record(group, fault)
    before = group.before
    if before is None or before.faults.iteration != event.iteration:
        return group
    faults = before.faults._replace(records=(*before.faults.records, fault))
    return group._replace(before=before._replace(faults=faults))


def _leave(group: Group, event: messages.Leave, now: float) -> Group:
    fault = Fault(event.kind, event.rank, event.message[: messages.TEXT], now, event.lag)
    one = bit(event.rank)
    if event.discarded and not group.entered & one and group.phase is not Phase.JOINING:
        group = group._replace(discarded=group.discarded | one)
    else:
        group = _record(group, fault)
    return _ended(group, fault, own=True)


def _ended(group: Group, fault: Fault, *, own: bool) -> Group:
    root = group.faults[0] if group.faults else fault
    end = End(fault, own, group.iteration, root)
    return group._replace(living=group.living & ~bit(fault.rank), ends=(*group.ends, end))


def _record(group: Group, fault: Fault) -> Group:
    if len(group.faults) >= messages.TEXTS:
        fault = fault._replace(message="")
    return group._replace(faults=(*group.faults, fault))


# ----------------------------------------------------------------------- phases


def _advance(group: Group, now: float) -> Group:
    """Return the group in its next phase, if this one is over."""
    if group.finished:
        return group
    phase = group.phase
    if group.faults and phase in (Phase.ENTERING, Phase.RUNNING):
        return _begin(group, Phase.LAST_CALL, since=now)
    late = group.since is not None and now >= group.since + group.allowed
    missing = _missing(group)
    if missing and not late:
        return group
    if phase is Phase.LAST_CALL:
        since = now if group.ready else None
        return _begin(group, Phase.ENDING, here=group.ready, since=since)
    if missing and phase is Phase.RUNNING:
        return _blame(group, missing, now)
    if missing:
        return group._replace(failure=messages.Failed(True, _who_is_missing(group, missing)))
    if phase is Phase.JOINING:
        return _begin(group._replace(world=_everyone(group)), Phase.ENTERING)
    if phase is Phase.RUNNING:
        return _begin(group, Phase.OVER)
    clash = _clash(group)
    if clash:
        return group._replace(failure=messages.Failed(False, clash))
    return _begin(group, Phase.RUNNING) if phase is Phase.ENTERING else _meet(group, now)


def _missing(group: Group) -> int:
    awaited = _everyone(group) if group.phase is Phase.JOINING else group.living
    return awaited & ~group.here


def _everyone(group: Group) -> int:
    return (1 << group.size) - 1


def _begin(group: Group, phase: Phase, *, here: int = 0, since: float | None = None) -> Group:
    return group._replace(phase=phase, here=here, since=since)


def _blame(group: Group, missing: int, now: float) -> Group:
    """Those who are not done in time have failed; they restart with the others."""
    text = f"not done {group.timeouts.completion:g} s after the first rank was"
    for rank in ranks_of(missing):
        reported = group.reported | {(group.iteration, rank, messages.OVERDUE)}
        group = _record(group._replace(reported=reported), Fault(SOFT_TIMEOUT, rank, text, now))
    return group


def _meet(group: Group, now: float) -> Group:
    held = {place.place for place in group.places if group.living & bit(place.rank)}
    world_size = next(p.world_size for p in group.places if group.living & bit(p.rank))
    iteration = group.iteration + 1
    met = Met(
        iteration,
        tuple(place for place in range(world_size) if place not in held),
        ranks_of(group.world & ~group.living & ~group.discarded),
        Faults(group.iteration, group.faults, now),
    )
    return Group(
        size=group.size,
        timeouts=group.timeouts,
        phase=Phase.ENTERING,
        iteration=iteration,
        living=group.living,
        world=group.living,
        reported=frozenset(known for known in group.reported if known[0] == group.iteration),
        before=met,
        ends=group.ends,
    )


def _clash(group: Group) -> str:
    """Return how the living ranks disagree about the world, if they do."""
    first: Place | None = None
    holders: dict[int, int] = {}
    for place in group.places:
        if not group.living & bit(place.rank):
            continue
        first = first or place
        other = holders.setdefault(place.place, place.rank)
        if place.world_size != first.world_size:
            said = (
                f"initial rank {first.rank} entered a world of {first.world_size} ranks, and "
                f"initial rank {place.rank} one of {place.world_size}"
            )
            break
        if other != place.rank:
            said = f"initial ranks {other} and {place.rank} both entered as rank {place.place}"
            break
    else:
        if first is None or group.faults or len(holders) == first.world_size:
            return ""
        said = f"{len(holders)} ranks entered a world of {first.world_size} ranks"
    return (
        f"{said} (iteration {group.iteration}): the rank assignment must come to the same on all "
        f"ranks"
    )


def _who_is_missing(group: Group, missing: int) -> str:
    ranks = ranks_of(missing)
    named = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return (
        f"{len(ranks)} of {group.size} ranks ({named}{more}) did not come to the barrier "
        f"{group.phase.value!r} of iteration {group.iteration} within {group.timeouts.barrier:g} s "
        f"(barrier_timeout) of the first that did"
    )
