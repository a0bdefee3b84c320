"""In-process restarts in a story, with the processes that took the places of lost ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from regrow.events.evidence import (
    Record,
    integer,
    integers,
    one_line,
    real,
    signal_name,
    since,
    text,
)
from regrow.events.story_types import InProcessRestart, Replacement, SentState

Named = Callable[[str], list[Record]]
"""Returns the events with a name, in order of time."""

_IN_PROCESS = "regrow.inprocess.restarted"
_REPLACED, _VACATED = "regrow.worker.replaced", "regrow.worker.vacated"
_CAUSES = {
    "EXCEPTION": "exception",
    "BASE_EXCEPTION": "exception",
    "SOFT_TIMEOUT": "hang",
    "HARD_TIMEOUT": "hang",
    "UNRESPONSIVE": "hang",
    "TERMINATED": "exit",
}


def in_process_restarts(named: Named) -> tuple[InProcessRestart, ...]:
    """Return the restarts; each has the replacements of its ranks since the one before.

    Args:
        named: returns the events with a name, in order of time.
    """
    replaced = {key: deque(all) for key, all in _by(_RANK, named(_REPLACED)).items()}
    vacated = _by(_PROCESS, named(_VACATED))
    ends = _by(_RANK, [*named(_VACATED), *named("regrow.inprocess.lost")])
    refused = _by(_RANK, named("regrow.worker.not_replaced"))
    sent = _by(_ITERATION, named("regrow.state.sent"))
    restarts = []
    for event in named(_IN_PROCESS):
        origins = event.get("origins")
        known = origins if isinstance(origins, list) else []
        first: dict[int, Record] = {
            rank: {"rank": rank, "origin": origin}
            for rank, origin in zip_longest(integers(event, "replaced"), known)
            if rank is not None
        }
        attempt = integer(event, "attempt")
        for rank in first:
            if waiting := replaced.get((attempt, rank)):
                first[rank] = waiting.popleft()
        found = [_replacement(each, vacated) for each in first.values()]
        states = sent.get(_values(_ITERATION, event), ())
        restarts.append(
            replace(
                _in_process_restart(event, found, ends.get(_values(_RANK, event), ())),
                not_replaced=_not_replaced(event, refused),
                states=tuple(map(_sent_state, states)),
            )
        )
    return tuple(restarts)


_RANK, _ITERATION = ("attempt", "rank"), ("attempt", "iteration")
_PROCESS = ("attempt", "rank", "incarnation")

_Index = Mapping[tuple[int | None, ...], list[Record]]


def _by(fields: tuple[str, ...], events: list[Record]) -> _Index:
    """Return events by the values of some fields; a long job has many of them."""
    found: dict[tuple[int | None, ...], list[Record]] = {}
    for event in events:
        found.setdefault(_values(fields, event), []).append(event)
    return found


def _values(fields: tuple[str, ...], event: Record) -> tuple[int | None, ...]:
    return tuple(integer(event, field) for field in fields)


def _not_replaced(restart: Record, refused: _Index) -> tuple[str, ...]:
    attempt = integer(restart, "attempt")
    return tuple(
        one_line(f"rank {rank}: {text(each, 'reason') or '?'}")
        for rank in dict.fromkeys(integers(restart, "lost"))
        for each in refused.get((attempt, rank), ())
    )


def _replacement(event: Record, vacated: _Index) -> Replacement:
    before = (integer(event, "incarnation") or 1) - 1
    same = vacated.get((*_values(_RANK, event), before), ())
    ended = next((each for each in same if each.get("host") == event.get("host")), {})
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
        targets=tuple(integers(event, "targets")),
        size=integer(event, "bytes") or 0,
        duration_s=real(event, "duration_s"),
    )


def _cause_of(kind: str, at: float, ends: Sequence[Record]) -> str:
    """Return the kind of the fault of a rank; see `InProcessRestart.cause`.

    Args:
        kind: the name of the interruption.
        at: monotonic seconds of the restart.
        ends: how the processes of the rank ended.
    """
    end = min(ends, key=lambda each: abs((real(each, "monotonic") or 0.0) - at), default={})
    if kind == "TERMINATED" and signal_name({"exit_code": integer(end, "exitcode")}):
        return "signal"
    return _CAUSES.get(kind, "unknown")


def _in_process_restart(
    event: Record, replaced: list[Replacement], ends: Sequence[Record]
) -> InProcessRestart:
    ranks, seconds = integers(event, "lost"), event.get("seconds")
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
        cause=_cause_of(kind, real(event, "monotonic") or 0.0, ends),
        lost=tuple(ranks),
        lost_count=integer(event, "lost_count") or len(ranks),
        phases=tuple(known_phases),
        replaced=tuple(sorted(replaced, key=lambda each: each.rank)),
        at_s=since(real(event, "monotonic"), max((s for _, s in known_phases), default=0.0)),
    )
