"""Who listens to whom, where nodes run the rounds themselves.

Each node listens to the three that follow it in the order of ranks, so what it reads every second
does not grow with the job. When those are silent it listens to as many more as are silent or were
found lost, which doubles their number again and again: so of a thousand nodes that die at once, the
last is found soon after the first.

How long silence is borne is another matter (`_patience`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regrow.rendezvous._news import Lost
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._state import Round, watched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regrow.rendezvous._news import LastCallOver

_NEIGHBOURS = 3  # nodes that each one listens to


@dataclass(frozen=True, slots=True)
class Ear:
    """What one node remembers of those it listens to."""

    patience: Patience = field(default_factory=Patience)
    lost: int = 0
    """Nodes that it has found lost since one was last heard."""


def whom(ear: Ear, state: Round, id: str, bounds: Bounds) -> Sequence[str] | None:
    """Return the nodes to listen to; None if the node is itself none of the rendezvous."""
    longest = bounds.keep_alive
    silent = frozenset(id for id, (_, s) in ear.patience.silent.items() if s >= longest)
    return neighbours(state, id, silent, ear.lost)


def listen(
    ear: Ear,
    state: Round,
    id: str,
    others: Sequence[str],
    beats: Mapping[str, int],
    bounds: Bounds,
    now: float,
) -> tuple[Ear, tuple[LastCallOver | Lost, ...], float | None]:
    """Judge what is due by what was heard of those one listens to.

    Args:
        ear: what the last call returned; `Ear()` at first.
        state: the rounds.
        id: the node that listens.
        others: what `whom` said.
        beats: the latest beat heard of each of them.
        bounds: how long is too long.
        now: seconds of the node's monotonic clock.

    Returns:
        What to remember, and what `_patience.look` returns besides.
    """
    before = ear.patience.silent
    heard = any(other in before and before[other][0] != beats.get(other, 0) for other in others)
    patience, due, again = look(ear.patience, state, beats, bounds, now, id, {*others})
    lost = sum(isinstance(event, Lost) for event in due)
    return Ear(patience, lost if heard else ear.lost + lost), due, again


def neighbours(
    state: Round, id: str, silent: frozenset[str], lost: int = 0
) -> Sequence[str] | None:
    """Return the nodes that a node listens to; None if it is itself none of the rendezvous.

    Args:
        state: the rounds.
        id: the node.
        silent: of the nodes it listens to, those that have not been heard of as they should.
        lost: how many it has found lost, in the same run of silence.
    """
    order = [*state.ranks] if state.complete else [*state.members]
    ring = [*order, *sorted(state.awaited), *state.queue]
    minding = watched(state)
    ring = [other for other in ring if other in minding]
    if id not in ring:
        return None
    at = ring.index(id)
    after = [*ring[at + 1 :], *ring[:at]]
    wanted = max(_NEIGHBOURS, lost + sum(other in silent for other in after))
    chosen: list[str] = []
    heard = 0
    for other in after:
        if heard == wanted:
            break
        chosen.append(other)
        heard += other not in silent
    return chosen
