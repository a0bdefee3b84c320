"""The rules of a group, as its ranks run them by counting in a c10d store.

At each barrier every rank adds one, and whoever completes the number tells the others by setting a
key, for which all of them wait. A rank that has ended, and had not added one, is not waited for.

**Who says that a rank has ended** does all that follows from it, also if it was said before, as
several do at once: whoever was the first may be killed half-way, by what has killed that rank.

**One truth.** `N/end` says how iteration N ended, by a fault or for good, and is set once: who
comes second finds what the first one said. So is `N/met`. `N/entered` is set by the last rank to
enter, or by any rank that has seen the end. Everything that has to be known before is written
before.

The keys of iteration N, all under `N/`:

    count                    how many ranks are living when it begins
    entereds heards ...      how many have come to each barrier; `entered/R` that rank R has
    end entered completed    how the iteration, the wait to enter and the wait in reserve ended
    heard/over ready/over    the last call is over; somebody writes down how the ranks met
    met                      how they did
    places                   a line for each rank: its initial rank, its place, the world's size
    faults gone discarded    a line for each fault, and each rank that ended by one or without one;
                             lines may come twice. `gone/R` holds the fault of rank R

Beside them `iteration` is the number of the latest one, and `ended/R` says that rank R has ended.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from regrow.inprocess._c10d_keys import Keys
from regrow.inprocess._link import SOFT_TIMEOUT, Fault, Faults
from regrow.inprocess._messages import TEXT

SHOWN: Final = 8
"""How many ranks an error names."""
MEETING: Final = 1.0
"""Seconds after which it is written down by another one how all met, if somebody has ended."""

FAULT, OVER, GO = "fault", "over", "go"
"""What the keys say that end a wait: a fault, the end of the call, and that one may go on."""

DISCARDED = "discarded"
"""What is said of the end of a rank that its assignment has no place for."""

_BARRIERS = ("entered", "heard", "ready", "done")
_AFTER = ("heard", "ready")
"""Those after the end of an iteration, at which nobody waits for a rank that is gone."""
_ONCE = ("count", "end", "entered", "completed", "heard/over", "ready/over", "met", "late")
_LISTS = ("places", "faults", "gone", "discarded")


class Meeting(NamedTuple):
    """How the ranks met after an iteration."""

    terminated: list[int]
    """Places that no living rank holds."""
    lost: list[int]
    """Initial ranks that ended by a fault."""
    discarded: list[int]
    """Initial ranks that their assignment had no place for."""
    left: int
    """How many go on."""


def arrive(keys: Keys, iteration: int, barrier: str, rank: int) -> None:
    """Count a rank at a barrier, once; tell the others if it was the last."""
    if keys.add(f"{iteration}/{barrier}/{rank}") > 1:
        return
    _settle(keys, iteration, barrier, keys.add(f"{iteration}/{barrier}s"))


def record(keys: Keys, iteration: int, fault: Fault) -> None:
    """Record a fault, and end the iteration by it unless it has ended."""
    keys.append(f"{iteration}/faults", _line(fault))
    _end(keys, iteration)


def free(keys: Keys, iteration: int) -> None:
    """Let those go who wait for what will not come any more."""
    keys.set_first(f"{iteration}/entered", FAULT)
    keys.set_first(f"{iteration}/completed", FAULT)


def end_rank(keys: Keys, iteration: int, fault: Fault, *, discarded: bool = False) -> bool:
    """Count a rank out; returns whether nobody had.

    Args:
        keys: of the group.
        iteration: in which it ends.
        fault: by which it does.
        discarded: it has no place in this iteration, and the others know.
    """
    if _count(keys, iteration) is None:  # all have met since, once and again: who says so is slow
        return _current(keys) > iteration and accuse(keys, fault)
    rank = fault.rank
    mine = DISCARDED if discarded else _line(fault)
    said = keys.set_first(f"{iteration}/gone/{rank}", mine)
    keys.set(f"ended/{rank}", "1")
    if discarded and said == mine:
        keys.append(f"{iteration}/discarded", str(rank))
        for barrier in _BARRIERS:
            arrive(keys, iteration, barrier, rank)
    if discarded or said == DISCARDED:
        return discarded and said == mine
    # Whoever says so does all of it: the first to say so may have ended half-way.
    if str(rank) not in keys.lines(f"{iteration}/gone"):
        keys.append(f"{iteration}/gone", str(rank))
    if said not in keys.lines(f"{iteration}/faults"):
        keys.append(f"{iteration}/faults", said)
    _end(keys, iteration)
    for barrier in _AFTER:
        _settle(keys, iteration, barrier, keys.numbers([f"{iteration}/{barrier}s"])[0])
    if _met_with(keys, iteration, rank):
        return end_rank(keys, iteration + 1, fault)
    return said == mine


def _met_with(keys: Keys, iteration: int, rank: int) -> bool:
    """Whether the others have met without knowing that a rank has ended, which has been said now.

    It was ready then, and who writes down how they met may be at it still, or have ended in it.
    """
    if not keys.numbers([f"{iteration}/ready/over"])[0]:
        return False
    said = keys.wait(f"{iteration}/met", MEETING)
    met = _meet(keys, iteration) if said is None else read_meeting(said)
    return met is not None and rank not in met.lost


def accuse(keys: Keys, fault: Fault) -> bool:
    """Count a rank out in whichever iteration it is; returns whether that was news."""
    iteration = _current(keys)
    # In this order: whoever has ended it before they met for that iteration has said so by now.
    ended = keys.there(f"ended/{fault.rank}") and not keys.there(f"{iteration}/gone/{fault.rank}")
    if ended or keys.lines(f"{iteration}/end") == [OVER]:
        return False
    return end_rank(keys, iteration, fault)


def _current(keys: Keys) -> int:
    said = keys.lines("iteration")
    return int(said[0]) if said else 0


def faults_of(keys: Keys, iteration: int) -> Faults:
    """Return what was recorded in an iteration."""
    first: dict[str, Fault] = {}
    for line in keys.lines(f"{iteration}/faults"):
        kind, rank, message = json.loads(line)
        # A soft time-out is seen from inside and from outside, and said in other words.
        known = f"{kind} {rank}" if kind == SOFT_TIMEOUT else line
        first.setdefault(known, Fault(kind, rank, message, 0.0))
    return Faults(iteration, tuple(first.values()), 0.0)


def meeting(keys: Keys, iteration: int) -> Meeting | None:
    """Return how the ranks met after an iteration, if they have."""
    said = keys.lines(f"{iteration}/met")
    return read_meeting(said[0]) if said else None


def read_meeting(text: str) -> Meeting:
    """Return what the key `met` says."""
    return Meeting(**json.loads(text))


def missing(keys: Keys, iteration: int, barrier: str, living: set[int]) -> list[int]:
    """Return which of the living ranks have not come to a barrier."""
    return [rank for rank in sorted(living) if not keys.there(f"{iteration}/{barrier}/{rank}")]


def forget(keys: Keys, iteration: int, rank: int, *, leads: bool) -> None:
    """Delete the keys of an iteration that nobody asks about any more.

    Args:
        keys: of the group.
        iteration: which.
        rank: who deletes: the keys of its own.
        leads: delete those of all and of the ranks that ended, too; one rank does.
    """
    ranks = [rank]
    if leads:
        met = meeting(keys, iteration)
        ranks += [*met.lost, *met.discarded] if met is not None else []
        counts = [f"{barrier}s" for barrier in _BARRIERS]
        keys.delete([f"{iteration}/{key}" for key in (*_ONCE, *_LISTS, *counts)])
    for each in ranks:
        keys.delete([f"{iteration}/{key}/{each}" for key in (*_BARRIERS, "gone")])


def _line(fault: Fault) -> str:
    return json.dumps([fault.kind, fault.rank, fault.message[:TEXT]])


def _end(keys: Keys, iteration: int) -> None:
    if keys.set_first(f"{iteration}/end", FAULT) == FAULT:
        free(keys, iteration)


def _settle(keys: Keys, iteration: int, barrier: str, arrived: int) -> None:
    """Tell the others if so many are all that there are."""
    count = _count(keys, iteration)
    if count is None or (
        arrived < count and not _is_full(keys, iteration, barrier, arrived, count)
    ):
        return
    if barrier == "entered":
        keys.set_first(f"{iteration}/entered", _clash(keys, iteration) or GO)
    elif barrier == "done":
        keys.set_first(f"{iteration}/end", OVER)
    elif barrier == "heard":
        keys.set(f"{iteration}/heard/over", "1")
    elif keys.add(f"{iteration}/ready/over") == 1:
        _meet(keys, iteration)


def _is_full(keys: Keys, iteration: int, barrier: str, arrived: int, count: int) -> bool:
    """Whether nobody is missing at a barrier but ranks that are gone, counted there or not."""
    if barrier not in _AFTER:
        return False
    gone = set(map(int, keys.lines(f"{iteration}/gone")))
    left = count - len(gone)
    if not gone or arrived < left:
        return False
    discarded = map(int, keys.lines(f"{iteration}/discarded"))
    others = {*_places(keys, iteration), *discarded} - gone
    return sum(keys.there(f"{iteration}/{barrier}/{rank}") for rank in others) >= left


def _count(keys: Keys, iteration: int) -> int | None:
    """How many go on in an iteration; None if it is over, and forgotten."""
    if said := keys.lines(f"{iteration}/count"):
        return int(said[0])
    met = meeting(keys, iteration - 1)
    return None if met is None else met.left  # who wrote that may have got no further


def _meet(keys: Keys, iteration: int) -> Meeting | None:
    """Write down how all meet after an iteration, unless that is done; None as for `_count`."""
    count = _count(keys, iteration)
    if count is None:
        return None
    gone = set(map(int, keys.lines(f"{iteration}/gone")))
    discarded = list(map(int, keys.lines(f"{iteration}/discarded")))
    living = {r: place for r, place in _places(keys, iteration).items() if r not in gone}
    size = max((size for _, size in living.values()), default=0)
    held = {place for place, _ in living.values()}
    terminated = [place for place in range(size) if place not in held]
    left = count - len(gone) - len(discarded)
    mine = Meeting(terminated, sorted(gone), discarded, left)
    met = read_meeting(keys.set_first(f"{iteration}/met", json.dumps(mine._asdict())))
    keys.set(f"{iteration + 1}/count", str(met.left))
    keys.set("iteration", str(iteration + 1))
    return met


def _places(keys: Keys, iteration: int) -> dict[int, tuple[int, int]]:
    lines = (line.split() for line in keys.lines(f"{iteration}/places"))
    return {int(rank): (int(place), int(size)) for rank, place, size in lines}


def _clash(keys: Keys, iteration: int) -> str:
    """Return how the ranks disagree about the world, if they do."""
    places = _places(keys, iteration)
    if sorted(places.values()) == [(place, len(places)) for place in range(len(places))]:
        return ""
    said = ", ".join(f"{r}: {p} of {n}" for r, (p, n) in sorted(places.items())[:SHOWN])
    return (
        f"the ranks disagree about the world of iteration {iteration} (initial rank: rank of "
        f"world size; {said}): the rank assignment must come to the same on all ranks"
    )
