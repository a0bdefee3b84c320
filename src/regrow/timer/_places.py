"""Which ranks stand together and which elsewhere: a few lines, in which the odd one is named.

Ranks that wait in one call say the same to the letter. Those that wait by looking again and again
do not: one is met in `sleep`, another in `glob`, each on another line of the same loop, and all of
them would look odd. So they are compared by all that is known, then by the line of the user's own
code, then by its function alone, until more than half of them agree. What all have in common, such
as the function that trains, tells nothing: if nothing else brings them together, each is shown
where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from regrow.timer._frames import UNKNOWN


class _Own(NamedTuple):
    """The user's own function in what `where` says."""

    function: str
    """Such as "step (train.py"."""
    line: str
    """Empty where it is not known."""
    rest: str


def compare_places(places: Mapping[int, str], world_size: int = 0) -> list[str]:
    """Which ranks stand together, and which elsewhere.

    That one stands elsewhere alone is said only where it is known of all where they stand.

    Args:
        places: by rank, what `where` says.
        world_size: how many ranks there are, if more than were asked.

    Returns:
        a line for each place, that of the most ranks first.
    """
    known = {rank: place for rank, place in places.items() if not place.startswith(UNKNOWN)}
    unknown = {rank: place for rank, place in places.items() if rank not in known}
    groups = [*_groups(known), *_alike(unknown)]
    ordered = sorted(groups, key=lambda ranks: (-len(ranks), ranks[0]))
    most = _most(groups)
    total = max(len(places), world_size)
    return [
        _line(_shared([places[rank] for rank in ranks]), ranks, total, most, not unknown)
        for ranks in ordered
    ]


def _groups(places: Mapping[int, str]) -> list[list[int]]:
    """The ranks that stand together, of those of which it is known."""
    exact = _alike(places)
    if 2 * _most(exact) > len(places):
        return exact
    own = {rank: _own(place) for rank, place in places.items()}
    for groups in (
        _alike(own),
        _alike({rank: each._replace(line="") for rank, each in own.items()}),
    ):
        if len(places) > _most(groups) > len(places) / 2:
            return groups
    return exact


def _alike(places: Mapping[int, object]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank], []).append(rank)
    return list(groups.values())


def _most(groups: Iterable[Sequence[int]]) -> int:
    return max(map(len, groups), default=0)


def _own(place: str) -> _Own:
    call, closed, rest = place.removeprefix("in ").rpartition(", called by ")[2].partition(")")
    if not closed or not place.startswith("in "):
        return _Own(place, "", "")
    function, _, line = call.rpartition(":")
    known = line.isdecimal() and len(line) < 10  # another host may have said anything
    return _Own(function, line, rest) if known else _Own(call, "", rest)


def _shared(places: Sequence[str]) -> str:
    """What is said of ranks that stand together: where all stand, or the function they are in."""
    if len(set(places)) == 1:
        return places[0]
    own = [_own(place) for place in places]
    lines = _numbers({int(each.line) for each in own if each.line})
    return f"in {own[0].function}{':' if lines else ''}{lines}){own[0].rest}"


def _line(place: str, ranks: Sequence[int], total: int, most: int, known: bool) -> str:
    one = len(ranks) == 1
    who = f"rank {ranks[0]}" if one else f"ranks {_numbers(ranks)}"
    if one and most > 1 and known:
        who += " alone"
    elif not one and most == total:
        who = f"all {total} ranks"
    if place.startswith("in "):
        return f"{who} {'stands' if one else 'stand'} {place}"
    if place.startswith("stopped "):
        return f"{who} {'is' if one else 'are'} {place}"
    return f"{who} could not be asked: {place.removeprefix(UNKNOWN)}"


def _numbers(numbers: Iterable[int]) -> str:
    """0, 2-5 and the like."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = []
    for first, last in runs:
        shown += (
            [f"{first}-{last}"] if last > first + 1 else [str(n) for n in range(first, last + 1)]
        )
    return ", ".join(shown)
