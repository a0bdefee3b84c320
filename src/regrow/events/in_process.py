"""In-process restarts in a story, with the processes that took the places of lost ranks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from regrow.events.evidence import (
    Record,
    cause_of,
    describe_failure,
    expiry,
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
_KINDS = {
    "EXCEPTION": ("exception", "raised an exception"),
    "BASE_EXCEPTION": ("exception", "left the function"),
    "SOFT_TIMEOUT": ("hang", "hung"),
    "HARD_TIMEOUT": ("hang", "hung and was killed"),
    "UNRESPONSIVE": ("hang", "sent nothing for too long"),
    "TERMINATED": ("exit", "ended"),
}
"""The cause and the predicate of each kind of fault."""
_NO_PROGRESS = {"automatic": "it ran no Python code", "manual": "it did not call ping()"}
_ENDING = frozenset({"BASE_EXCEPTION", "HARD_TIMEOUT", "TERMINATED", "UNRESPONSIVE"})
"""Kinds of faults after which the process ends."""
TIME_OUTS = ("SOFT_TIMEOUT", "HARD_TIMEOUT")
NEAR_S = 60.0  # most seconds between the end of a process and the restart that it caused


def in_process_restarts(named: Named) -> tuple[InProcessRestart, ...]:
    """Return the restarts; each has the replacements of its ranks since the one before.

    Args:
        named: returns the events with a name, in order of time.
    """
    replaced = {key: deque(all) for key, all in by_fields(RANK, named(_REPLACED)).items()}
    vacated = by_fields(_PROCESS, named(_VACATED))
    ends = by_fields(RANK, [*named(_VACATED), *named("regrow.inprocess.lost")])
    expired = by_fields(TIMER_OF, named("regrow.timer.expired"))
    refused = by_fields(RANK, named("regrow.worker.not_replaced"))
    sent = by_fields(_ITERATION, named("regrow.state.sent"))
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
        found = [replacement(each, vacated) for each in first.values()]
        states = sent.get(_values(_ITERATION, event), ())
        restarts.append(
            replace(
                _in_process_restart(event, found, ends.get(_values(RANK, event), ()), expired),
                not_replaced=_not_replaced(event, refused),
                states=tuple(map(_sent_state, states)),
            )
        )
    return tuple(restarts)


RANK, _ITERATION = ("attempt", "rank"), ("attempt", "iteration")
_PROCESS = ("attempt", "rank", "incarnation")
TIMER_OF = ("attempt", "pid")
"""The fields that the event of a timer has in common with that of the end of its process."""

_Index = Mapping[tuple[int | None, ...], list[Record]]


def by_fields(fields: tuple[str, ...], events: Iterable[Record]) -> _Index:
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


def replacement(event: Record, vacated: _Index) -> Replacement:
    """Return a replacement.

    Args:
        event: the start of the new process.
        vacated: the ends of workers, by attempt, rank and incarnation.
    """
    ended = _end_before(event, vacated)
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


def _end_before(replaced: Record, vacated: _Index) -> Record:
    """Return the end of the process that another one replaced; empty if it is not recorded."""
    before = (integer(replaced, "incarnation") or 1) - 1
    same = vacated.get((*_values(RANK, replaced), before), ())
    return next((each for each in same if each.get("host") == replaced.get("host")), {})


def cut_short(
    named: Named, failed: Mapping[int | None, float | None]
) -> tuple[InProcessRestart, ...]:
    """Return the restarts whose attempt failed before the new process had joined the other ranks.

    Args:
        named: returns the events with a name, in order of time.
        failed: when each attempt failed, by its number.
    """
    vacated = by_fields(_PROCESS, named(_VACATED))
    expired = by_fields(TIMER_OF, named("regrow.timer.expired"))
    joined: dict[tuple[int | None, int], float] = {}  # time of the last restart, by new process
    iterations: dict[int | None, int] = {}  # number of the last function call, by attempt
    for event in named(_IN_PROCESS):
        attempt = integer(event, "attempt")
        iterations[attempt] = integer(event, "iteration") or 0
        for rank in integers(event, "replaced"):
            joined[attempt, rank] = real(event, "monotonic") or 0.0
    found = []
    for event in named(_REPLACED):
        new, ended = replacement(event, vacated), _end_before(event, vacated)
        number = integer(event, "attempt")
        begin, over = real(ended, "ended_monotonic"), failed.get(number)
        waits = (real(event, "monotonic") or 0.0) > joined.get((number, new.rank), -1.0)
        # Not all restarts are in the logs of each host, but this one ended after the restart began.
        if waits and begin is not None and over is not None and begin <= over < begin + NEAR_S:
            timer = timer_of(ended, expired)
            cause, did = _cause_and_predicate("TERMINATED", None, ended, timer)
            found.append(
                InProcessRestart(
                    attempt=number or 0,
                    iteration=iterations.get(number, 0) + 1,
                    world_size=None,
                    rank=new.rank,
                    what=did,
                    cause=cause,
                    did=did,
                    host=text(ended, "host"),
                    pid=integer(ended, "pid"),
                    exit_code=integer(ended, "exitcode"),
                    lost=(),
                    lost_count=0,
                    phases=(("cut short", over - begin),),
                    replaced=(new,),
                    at_s=begin,
                    timer=expiry(timer) if timer else None,
                )
            )
    return tuple(found)


def _sent_state(event: Record) -> SentState:
    return SentState(
        step=integer(event, "step"),
        rank=integer(event, "rank"),
        targets=tuple(integers(event, "targets")),
        size=integer(event, "bytes") or 0,
        duration_s=real(event, "duration_s"),
    )


def end_of(kind: str | None, at: float | None, ends: Sequence[Record]) -> Record:
    """Return the end of the process that caused a restart; empty if it lives.

    Args:
        kind: the name of the interruption.
        at: monotonic seconds of the fault.
        ends: how the processes of the rank ended.
    """
    return nearest(at, ends) if at is not None and kind in _ENDING else {}


def timer_of(ended: Record, expired: _Index) -> Record:
    """Return the event of the timer whose signal ended a process; empty if none did.

    Args:
        ended: the end of the process.
        expired: the events of the timers, by the fields `TIMER_OF`.
    """
    signal = signal_name({"exit_code": integer(ended, "exitcode")})
    if signal is None or integer(ended, "pid") is None:
        return {}
    same = expired.get(_values(TIMER_OF, ended), ())
    sent = (each for each in same if text(each, "signal") == signal)
    return next((each for each in sent if each.get("host") == ended.get("host")), {})


def nearest(at: float, events: Sequence[Record]) -> Record:
    """Return the event nearest to a time on its clock; empty if all are `NEAR_S` away or more."""
    near = [(abs(time - at), e) for e in events if (time := real(e, "monotonic")) is not None]
    distance, event = min(near, key=lambda each: each[0], default=(NEAR_S, {}))
    return event if distance < NEAR_S else {}


def silent_s(restart: Record) -> float:
    """Return the seconds without progress before a restart after a time-out of the wrapper."""
    is_time_out = text(restart, "kind") in TIME_OUTS
    found = _SILENCE.search(text(restart, "message") or "") if is_time_out else None
    return float(found[1]) if found is not None else 0.0


_SILENCE = re.compile(r"\bprogress for (\d{1,9}(?:\.\d{1,9})?) s\b")


def _cause_and_predicate(
    kind: str | None, message: str | None, end: Record, expired: Record
) -> tuple[str, str]:
    """Return the fields `cause` and `did` of a restart."""
    if kind == "TERMINATED" and end:
        ended = {"exit_code": integer(end, "exitcode"), "message": text(expired, "message")}
        timer = expiry(expired) if expired else None
        return cause_of(ended, timer), describe_failure(ended)
    cause, did = _KINDS.get(kind or "", ("unknown", f"had a fault ({kind or 'unknown'})"))
    for progress, meaning in _NO_PROGRESS.items():
        message = (message or "").replace(f"no {progress} progress", meaning, 1)
    return cause, one_line(f"{did}: {message}" if message else did)


def _since_end(at: float | None, restart: Record, end: Record) -> tuple[float | None, float]:
    """Return when a fault happened, and how much earlier that is than `at`.

    Args:
        at: when the ranks say that it happened.
        restart: the event of the restart.
        end: the end of the process that caused it, which its agent may know more exactly.
    """
    known = real(end, "ended_monotonic" if "ended_monotonic" in end else "lost_monotonic")
    same = text(end, "host") == text(restart, "host")
    if at is None or known is None or not (same and at - NEAR_S < known < at):
        return at, 0.0
    return known, at - known


def _in_process_restart(
    event: Record, replaced: list[Replacement], ends: Sequence[Record], expired: _Index
) -> InProcessRestart:
    ranks, seconds = integers(event, "lost"), event.get("seconds")
    known = seconds if isinstance(seconds, Mapping) else {}
    phases = ((str(phase), real(known, phase)) for phase in known)
    known_phases = [(phase, after) for phase, after in phases if after is not None]
    kind, message = text(event, "kind"), text(event, "message")
    at = since(real(event, "monotonic"), max((s for _, s in known_phases), default=0.0))
    end = end_of(kind, at, ends)
    at, earlier = _since_end(at, event, end)
    known_phases = [(phase, after + earlier) for phase, after in known_phases]
    timer = timer_of(end, expired) if kind == "TERMINATED" else {}
    cause, did = _cause_and_predicate(kind, message, end, timer)
    shown = kind or "an unknown fault"
    return InProcessRestart(
        attempt=integer(event, "attempt") or 0,
        iteration=integer(event, "iteration") or 0,
        world_size=integer(event, "world_size"),
        rank=integer(event, "rank"),
        what=one_line(f"{shown}: {message}" if message else shown),
        cause=cause,
        did=did,
        host=text(end, "host"),
        pid=integer(end, "pid"),
        exit_code=integer(end, "exitcode"),
        lost=tuple(ranks),
        lost_count=integer(event, "lost_count") or len(ranks),
        phases=tuple(known_phases),
        replaced=tuple(sorted(replaced, key=lambda each: each.rank)),
        at_s=at,
        timer=expiry(timer) if timer else None,
        silent_s=silent_s(event),
    )
