"""In-process restarts in a story, with the processes that took the places of lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest

from regrow.events.evidence import Record, integer, one_line, real, since, text
from regrow.events.story_types import InProcessRestart, Replacement, SentState

Named = Callable[[str], list[Record]]
"""Returns the events with a name, in order of time."""

_IN_PROCESS = "regrow.inprocess.restarted"
_REPLACED, _VACATED = "regrow.worker.replaced", "regrow.worker.vacated"


def in_process_restarts(named: Named) -> tuple[InProcessRestart, ...]:
    """Return the restarts; each has the replacements of its ranks since the one before.

    Args:
        named: returns the events with a name, in order of time.
    """
    replaced, vacated = named(_REPLACED), named(_VACATED)
    restarts = []
    for event in _once(named(_IN_PROCESS)):
        origins = event.get("origins")
        known = origins if isinstance(origins, list) else []
        first: dict[int, Record] = {
            rank: {"rank": rank, "origin": origin}
            for rank, origin in zip_longest(_ranks(event, "replaced"), known)
            if rank is not None
        }
        for each in reversed(replaced):
            rank = integer(each, "rank")
            if rank in first and each.get("attempt") == event.get("attempt"):
                first[rank] = each
        replaced = [each for each in replaced if each not in first.values()]
        found = [_replacement(each, vacated) for each in first.values()]
        restarts.append(
            replace(
                _in_process_restart(event, found),
                not_replaced=_not_replaced(event, named),
                states=tuple(map(_sent_state, _of_iteration(named("regrow.state.sent"), event))),
            )
        )
    return tuple(restarts)


def _not_replaced(restart: Record, named: Named) -> tuple[str, ...]:
    lost = _ranks(restart, "lost")
    return tuple(
        one_line(f"rank {integer(each, 'rank')}: {text(each, 'reason') or '?'}")
        for each in named("regrow.worker.not_replaced")
        if integer(each, "rank") in lost and each.get("attempt") == restart.get("attempt")
    )


def _of_iteration(events: list[Record], restart: Record) -> list[Record]:
    keys = ("attempt", "iteration")
    return [e for e in events if all(e.get(k) == restart.get(k) for k in keys)]


def _once(restarts: list[Record]) -> list[Record]:
    """Return each in-process restart once, if several hosts recorded it."""
    by_number = {(integer(e, "attempt"), integer(e, "iteration")): e for e in reversed(restarts)}
    return list(by_number.values())[::-1]


def _replacement(event: Record, vacated: list[Record]) -> Replacement:
    keys = "host", "attempt", "rank"
    before = (integer(event, "incarnation") or 1) - 1
    ended = next(
        (
            each
            for each in vacated
            if all(each.get(key) == event.get(key) for key in keys)
            and integer(each, "incarnation") == before
        ),
        {},
    )
    return Replacement(
        rank=integer(event, "rank") or 0,
        pid=integer(event, "pid"),
        ended_pid=integer(ended, "pid"),
        how=one_line(text(ended, "how") or "for an unknown reason"),
        last_step=integer(ended, "last_step"),
        source=one_line(text(event, "started_from") or "exec"),
        started_after_s=since(real(event, "started_monotonic"), real(ended, "ended_monotonic")),
        restarts_left=integer(event, "restarts_left"),
        origin=one_line(origin) if (origin := text(event, "origin")) else None,
    )


def _sent_state(event: Record) -> SentState:
    return SentState(
        step=integer(event, "step"),
        rank=integer(event, "rank"),
        targets=tuple(_ranks(event, "targets")),
        size=integer(event, "bytes") or 0,
        duration_s=real(event, "duration_s"),
    )


def _in_process_restart(event: Record, replaced: list[Replacement]) -> InProcessRestart:
    ranks, seconds = _ranks(event, "lost"), event.get("seconds")
    known = seconds if isinstance(seconds, Mapping) else {}
    phases = ((str(phase), real(known, phase)) for phase in known)
    known_phases = [(phase, after) for phase, after in phases if after is not None]
    kind = text(event, "kind") or "an unknown fault"
    message = text(event, "message")
    return InProcessRestart(
        attempt=integer(event, "attempt") or 0,
        iteration=integer(event, "iteration") or 0,
        world_size=integer(event, "world_size"),
        rank=integer(event, "rank"),
        what=one_line(f"{kind}: {message}" if message else kind),
        lost=tuple(ranks),
        lost_count=integer(event, "lost_count") or len(ranks),
        phases=tuple(known_phases),
        replaced=tuple(sorted(replaced, key=lambda each: each.rank)),
        at_s=since(real(event, "monotonic"), max((s for _, s in known_phases), default=0.0)),
    )


def _ranks(event: Record, name: str) -> list[int]:
    found = event.get(name)
    return [each for each in found if isinstance(each, int)] if isinstance(found, list) else []
