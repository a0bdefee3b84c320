"""How long to wait: the judgement of one who waits, by its own clock.

The rules of the round (`_round`) know no time. Whoever drives them calls `look` with what it has
heard so far and what its own monotonic clock says, and gets the events that have become due and
when to look again. No time of another host takes part in it: a node's beat is a number that
changes, and what counts is when the change was *seen*.

Not hearing of a node is evidence against it only while one listens. A waiter that was stopped for
a minute, or whose host was, finds a clock that has jumped and nothing heard in between; so one
look adds one keep-alive interval of silence at most, however long ago the last one was. It may also
have been stopped between hearing and looking. So a look that comes late gives nobody up who was not
due before: the next one does, with what was heard by then.

A node that cannot be heard may still run its workers, until its lease is over and they are killed.
The lease lasts as long as the silence that is borne, counted from the last beat that was heard, by
the node's own clock; so nobody takes its place before that time and `kill` seconds more. Only who
knows otherwise that a node has ended (its connection was closed) need not wait.

The last call is different: its end expels nobody, so it is simply so many seconds after it was
first seen. What follows for those who have not come back by then is as long as a lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from regrow.rendezvous._news import LastCallOver, Lost
from regrow.rendezvous._state import Round, place, watched


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long is too long."""

    last_call: float = 30.0
    """Seconds that a big enough round waits for more nodes."""
    keep_alive: float = 1.0
    """Seconds between two beats of a node."""
    misses: int = 3
    """Beats that may fail to come before the node's lease is over."""
    kill: float = 1.0
    """Seconds more, in which a node whose lease is over kills its workers."""
    grace: float = 0.0
    """Seconds that a node may take to stop its workers when a round is over."""

    @property
    def lease(self) -> float:
        """Seconds for which a node may run its workers after a beat that was heard."""
        return self.keep_alive * self.misses

    @property
    def comeback(self) -> float:
        """Seconds for which members of a round that is over are waited for.

        No last call is shorter than that: it would cut the grace of workers that save a checkpoint.
        """
        return max(self.last_call, self.grace + self.kill)


@dataclass(frozen=True, slots=True)
class Patience:
    """What a waiter remembers between two looks."""

    looked: float = 0.0
    """When it last looked, in seconds of its clock."""
    call: int = 0
    """The last call that it has seen begin; 0: none."""
    since: float = 0.0
    """When it first saw it."""
    silent: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """For each node: its latest beat, and seconds of silence listened to since."""


def look(
    patience: Patience,
    state: Round,
    beats: Mapping[str, int] | None,
    bounds: Bounds,
    now: float,
    me: str = "",
    among: Set[str] | None = None,
) -> tuple[Patience, tuple[LastCallOver | Lost, ...], float | None]:
    """Judge what is due.

    Args:
        patience: what the last look returned; `Patience()` at first.
        state: the round as it is now.
        beats: the latest beat heard of each node; everything that has arrived must have been
            taken in before. A node of whom nothing was heard yet is watched like any other.
            None: nodes are known to be lost in another way, and none is watched.
        bounds: how long is too long.
        now: seconds of this waiter's monotonic clock.
        me: the waiter's own node, if it has one, which it does not watch.
        among: the nodes that it watches, if not all.

    Returns:
        What to remember; the events that are due, each to be given to `step`; and when to look
        again at the latest, None if nothing can become due by waiting alone.
    """
    due: list[LastCallOver | Lost] = []
    again: list[float] = []
    passed = max(now - patience.looked, 0.0)
    listened = min(passed, bounds.keep_alive)
    limit = bounds.lease + bounds.kill
    silent: dict[str, tuple[int, float]] = {}
    ids = watched(state) - {me} if beats is not None else frozenset()
    for id in sorted(ids if among is None else ids & among):
        heard = (beats or {}).get(id, 0)
        beat, before = patience.silent.get(id, (heard, -listened))
        silence = 0.0 if heard != beat else before + listened
        silent[id] = (heard, silence)
        if silence < limit:
            again.append(now + min(limit - silence, bounds.keep_alive))
        elif before < limit and passed > bounds.keep_alive:
            again.append(now)
        else:
            due.append(Lost(id, f"nothing was heard of it for {silence:.3g} s", place(state, id)))
    since = patience.since if state.last_call == patience.call else now
    if state.last_call:
        awaiting = bounds.comeback if state.awaited else bounds.last_call
        wait = limit if state.evicting else awaiting
        if now - since >= wait:
            due.append(LastCallOver(state.last_call))
        else:
            again.append(since + wait)
    remembered = Patience(now, state.last_call, since, silent)
    return remembered, tuple(due), min(again, default=None)
