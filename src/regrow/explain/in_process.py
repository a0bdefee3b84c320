"""Explanations of in-process restarts: the workers' function was called again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Set
from itertools import takewhile, zip_longest
from typing import NamedTuple

from regrow._accounts import REPEATED
from regrow.events import InProcessRestart
from regrow.events.accounts import redone_s, step_s, steps_of
from regrow.events.evidence import Record, integer, real, steps, text
from regrow.events.in_process import NEAR_S, TIME_OUTS, end_of
from regrow.explain import ladder, long_settings
from regrow.explain.explanation import Cost, Explanation, Fact, Phase
from regrow.explain.findings import of_suspension, what_hung_did
from regrow.explain.peers import last_step_of, places_of_others, silence_of
from regrow.explain.replacements import WAITED, facts_of_end, how_replaced, last_step_before
from regrow.explain.scene import Scene
from regrow.explain.words import count, many_ranks, relative, seconds, worker
from regrow.utils import shortened

_SHOWN_S = 0.0005
_MOST_RANKS = 1 << 16
_PHASES = {
    "detected": ("detection", "until the fault was noticed"),
    "notified": ("notification", "until the other ranks knew"),
    "aborted": ("abort", "until the ranks had left the function"),
    "finalized": ("finalize", "for the plug-in finalize, if any"),
    "checked": ("health check", "for the plug-in health_check, if any"),
    "met": ("barrier", "the ranks waited for each other"),
    "called": ("call", "until the function was called again"),
}


def explain_in_process(scene: Scene) -> Iterator[Explanation]:
    """Yield an explanation of each in-process restart, in order of time."""
    restarts, recorded = scene.story.in_place, _Recorded(scene)
    ends = {attempt: _end_of_attempt(scene, attempt) for attempt in {r.attempt for r in restarts}}
    gone: dict[int, set[int]] = {}  # by attempt, the ranks that were lost up to now
    for restart, later in zip_longest(restarts, restarts[1:]):
        until = ends[restart.attempt]
        if later is not None and later.attempt == restart.attempt:
            event = recorded.event_of(later)
            made = integer(event, "repeated_steps"), integer(event, "last_step")
            if made[0] is not None:
                until = _AttemptEnd(None, *made, until.pace_s)
        lost = gone.setdefault(restart.attempt, set())
        lost.update(restart.lost)
        yield _explained(scene, restart, recorded, until, lost)


class _Recorded:
    """The events of restarts, and of the exceptions that caused them.

    Several calls in one process have the same iterations. Of the events with the same numbers, that
    of a restart is the nearest in time.
    """

    def __init__(self, scene: Scene) -> None:
        self._events: defaultdict[object, list[tuple[float, Record]]] = defaultdict(list)
        self._raised: defaultdict[object, list[tuple[float, Record]]] = defaultdict(list)
        for event in scene.named("inprocess.restarted"):
            number = integer(event, "attempt"), integer(event, "iteration")
            self._events[number].append((real(event, "monotonic") or 0.0, event))
        shown: dict[object, str] = {}  # the last traceback of each rank
        for event in scene.named("inprocess.raised"):
            rank = integer(event, "attempt"), integer(event, "rank")
            if isinstance(traceback := event.get("traceback"), str):
                shown[rank] = traceback  # else it is that of the event before
            found = {**event, "traceback": shown.get(rank)}
            self._raised[*rank, integer(event, "iteration")].append(
                (real(event, "monotonic") or 0.0, found)
            )

    def event_of(self, restart: InProcessRestart) -> Record:
        """Return the event of a restart."""
        ends = (restart.at_s or 0.0) + max((after for _, after in restart.phases), default=0.0)
        same = self._events[restart.attempt, restart.iteration]
        return min(same, key=lambda each: abs(each[0] - ends), default=(0.0, {}))[1]

    def raised_before(self, restart: InProcessRestart) -> Record:
        """Return the event of the exception that caused a restart; empty if there is none."""
        same = self._raised[restart.attempt, restart.rank, restart.iteration - 1]
        near = [(abs(at - (restart.at_s or 0.0)), event) for at, event in same]
        found = [each for each in near if each[0] < NEAR_S]
        return min(found, key=lambda each: each[0], default=(0.0, {}))[1]


class _AttemptEnd(NamedTuple):
    """What is known of the steps of an attempt at its end, or at its next restart."""

    redone_s: float | None
    """Mean seconds in which a worker has done steps again; None if that is not recorded."""

    repeated_steps: int | None
    """How many steps a worker has done again, at most."""
    last_step: int | None
    """The last step of any worker."""
    pace_s: float | None
    """Mean seconds of a step."""


def _explained(
    scene: Scene,
    restart: InProcessRestart,
    recorded: _Recorded,
    end: _AttemptEnd,
    lost: Set[int],
) -> Explanation:
    """Explain a restart.

    Args:
        scene: the run.
        restart: the restart.
        recorded: the events of all restarts.
        end: the event of the next restart in this attempt, or else of the end of the attempt.
        lost: the ranks that were lost up to this restart.
    """
    event = recorded.event_of(restart)
    kind = text(event, "kind") or ""
    ended = _end_of(scene, restart, kind)
    silent, timeline, begin = restart.silent_s, tuple(_timeline(restart)), _begin_of(restart)
    did = restart.did if restart.timer is None else what_hung_did(restart.timer)
    redone = _redone(scene, event, end.repeated_steps)
    size = restart.world_size or scene.world_size(restart.attempt)
    lasted = timeline[-1].end_s if timeline else None
    redone_s = 0.0 if redone == 0 else None
    if redone and end.redone_s is not None and redone == end.repeated_steps:
        redone_s = end.redone_s
    elif redone and end.pace_s is not None:
        redone_s = redone * end.pace_s
    if lasted is not None and redone and (loading := restart.loading_s or 0.0) >= _SHOWN_S:
        meaning = "loading, up to the first step"
        timeline = (*timeline, Phase("startup", lasted, lasted + loading, meaning))
        lasted += loading
    whole = None if lasted is None else lasted + (redone_s or 0.0)
    if redone_s and lasted is not None and redone:
        again = f"{count(redone, 'step')} done again"
        timeline = (*timeline, Phase("redoing", lasted, lasted + redone_s, again))
    return Explanation(
        attempt=restart.attempt,
        iteration=restart.iteration,
        title=f"{worker(restart.rank, restart.host, restart.pid)} {did}",
        cause=restart.cause,
        rung=2 if restart.replaced else 1,
        outcome=f"the function was called again (iteration {restart.iteration})"
        + (f" on {count(restart.world_size, 'rank')}" if restart.world_size is not None else "")
        + _went_on(event, redone, end.last_step),
        rank=restart.rank,
        host=restart.host,
        pid=restart.pid,
        at_s=begin,
        noticed_s=restart.at_s if silent else None,
        begun="silent at the latest from" if silent and restart.timer is None else "",
        injected=_injected(event, ended, recorded.raised_before(restart)),
        evidence=tuple(_evidence(scene, restart, recorded, ended)),
        peers=tuple(_peers(scene, restart, event, lost)),
        action=tuple(_action(scene, restart)),
        refusals=ladder.refusals_in_process(restart),
        timeline=timeline,
        cost=Cost(
            seconds=whole,
            steps=redone,
            redone_s=redone_s,
            worker_seconds=None if whole is None or size is None else whole * size,
            workers=size,
            all_workers=size,
            which=" that went on" if restart.lost else "",
            has_unfinished_steps=not scene.story.reports_steps,
            restarts=len(restart.replaced),
            restarts_left=_restarts_left(restart),
        ),
        long=long_settings.of_in_process(scene, restart, kind, timeline),
    )


def _begin_of(restart: InProcessRestart) -> float | None:
    """Return when a fault began: if a rank hung, its last sign of life."""
    return None if restart.at_s is None else restart.at_s - restart.silent_s


def _went_on(event: Record, redone: int | None, reached: int | None) -> str:
    """Return the first step after a restart, if the last step before it was reached again."""
    last = integer(event, "last_step")
    if last is None or redone is None or reached is None or reached < last + (redone == 0):
        return ""
    return f"; training went on with step {last - redone + 1}"


def _end_of(scene: Scene, restart: InProcessRestart, kind: str) -> Record:
    """Return the event of the end of the process that caused the restart; empty if it lives."""
    at = restart.at_s or 0.0
    ends = [
        event
        for name in ("worker.vacated", "inprocess.lost")
        for event in scene.between(name, restart.attempt, at - NEAR_S, at + NEAR_S)
        if integer(event, "rank") == restart.rank
    ]
    return end_of(kind, restart.at_s, ends)


def _evidence(
    scene: Scene, restart: InProcessRestart, recorded: _Recorded, ended: Record
) -> Iterator[Fact]:
    event = recorded.event_of(restart)
    if injected := _injected(event, ended, recorded.raised_before(restart)):
        yield Fact("injected", f"by --chaos: {injected}")
    if ended:
        yield from facts_of_end(ended, restart.timer)
    if restart.timer is not None:
        yield from of_suspension(scene, restart, ended)
    said = text(ended, "message") or ""
    if restart.timer is None and said and not said.startswith(("Signal ", "<N/A>", "exit")):
        yield Fact("message", said)
    kind, message = text(event, "kind") or "unknown", text(event, "message") or "?"
    raised = recorded.raised_before(restart)
    traceback = text(raised, "traceback") or ""
    if kind not in ("EXCEPTION", "BASE_EXCEPTION"):
        if kind in TIME_OUTS:
            yield Fact("time-out", f"{kind.lower()} of the wrapper")
        elif not ended:  # else its exit is known
            yield Fact("reported as", message)
        if stack := _before_interrupt(traceback):
            yield Fact("stack", "", stack)
    elif traceback:
        yield Fact("traceback", "", shortened(traceback))
    else:
        yield Fact("exception", message)
        yield Fact("traceback", "in the stderr of the rank; its event is not in these logs")
    step, at = integer(ended or raised, "last_step"), None
    begin, what = _begin_of(restart), silence_of(restart) or "the failure"
    if ended and step is not None:
        yield Fact("last step", last_step_before(ended, begin, what))
        step = None
    if step is None and restart.rank in restart.lost:
        step, at = last_step_of(scene, restart.attempt, restart.rank)
    if step is not None:
        when = relative(at, begin, what)
        yield Fact("last step", ", ".join(filter(None, [f"step {step}", when])))
    if log_file := scene.log_file(restart.rank, restart.attempt):
        yield Fact("log file", log_file)
    if (faults := integer(event, "faults") or 1) > 1:
        yield Fact("faults", f"{faults} ranks reported a fault; this was the first")


def _injected(*events: Record) -> str | None:
    """Return the fault of `--chaos` that one of the events names; None if none does."""
    return next((found for event in events if (found := text(event, "injected"))), None)


def _before_interrupt(traceback: str) -> tuple[str, ...]:
    """Return the lines of a traceback up to the interrupt by regrow."""
    return tuple(takewhile(lambda line: not _INTERRUPT.search(line), shortened(traceback)))


_INTERRUPT = re.compile(r"/regrow/inprocess/interrupt/|^regrow\.inprocess\.exception\.")


def _peers(scene: Scene, restart: InProcessRestart, event: Record, lost: Set[int]) -> Iterator[str]:
    gone = {restart.rank, *lost, *(each.rank for each in restart.replaced)}
    started = scene.first("attempt.started", restart.attempt)
    host = text(event, "host")
    size = integer(started, "world_size")
    yield from places_of_others(restart.rank, restart.timer.compared if restart.timer else ())
    if (step := integer(event, "last_step")) is not None:
        with_it = f", rank {restart.rank} included," if host == restart.host else ""
        yield f"the highest step of any rank on host {host}{with_it} was step {step}"
    if size is not None and size <= _MOST_RANKS and restart.lost_count <= len(restart.lost):
        others = [rank for rank in range(size) if rank not in gone]
        if others:
            whose = (
                "its call and kept its process"
                if len(others) == 1
                else ("their calls and kept their processes")
            )
            yield f"{many_ranks(others)} ended {whose}"


def _action(scene: Scene, restart: InProcessRestart) -> Iterator[str]:
    for each in restart.replaced:
        yield how_replaced(each)
    if restart.lost:
        more = restart.lost_count - len(restart.lost)
        lost = many_ranks(restart.lost) + (f" and {more} more" if more > 0 else "")
        before, size = scene.world_size(restart.attempt), restart.world_size
        on = f", with {size} of {count(before, 'worker')}" if before and size else ""
        yield f"went on without {lost}{on}; the bucket lost ranks of `regrow goodput` has that cost"
        yield f"no new process took the place: {ladder.why_not_replaced(scene, restart)}"
    for sent in restart.states:
        yield (
            f"rank {sent.rank} sent its state of step {sent.step} to {many_ranks(sent.targets)}"
            f" ({sent.size / 1e6:.1f} MB in {seconds(sent.duration_s)})"
        )
    left = _restarts_left(restart)
    if restart.replaced:
        spent = count(len(restart.replaced), "restart")
        rest = f"; {left or 'none'} left" if left is not None else ""
        yield f"it spent {spent} of --max-restarts{rest}"
    else:
        yield "it spent no restart of --max-restarts"


def _restarts_left(restart: InProcessRestart) -> int | None:
    left = [each.restarts_left for each in restart.replaced if each.restarts_left is not None]
    return min(left, default=None)


def _timeline(restart: InProcessRestart) -> Iterator[Phase]:
    now = silent = restart.silent_s
    if silent:
        waited = "no progress; the wrapper waited"
        if restart.timer is not None:
            waited = "no sign of life; regrow waited"
        yield Phase("silent", 0.0, silent, waited)
    for name, after in restart.phases:
        if silent + after - now >= _SHOWN_S:
            label, meaning = _PHASES.get(name, (name, ""))
            if name == "met" and restart.replaced:
                meaning = WAITED
            yield Phase(label, now, silent + after, meaning)
            now = silent + after


def _redone(scene: Scene, event: Record, later: int | None) -> int | None:
    """Return how many steps were done again after a restart, until the next one."""
    before = integer(event, "repeated_steps")
    if before is None or later is None or not scene.story.reports_steps:
        return None
    return later - before if later >= before else None  # a new process counts from 0


def _end_of_attempt(scene: Scene, attempt: int) -> _AttemptEnd:
    accounts = scene.accounts(attempt)
    found = [redone_s(event) or [] for event in scene.named("attempt.ended", attempt)]
    redone = [seconds for each in found for seconds in each]
    made = [each for event in scene.named("attempt.ended", attempt) for each in steps(event)]
    reached = [each.last_step for each in made if each.last_step is not None]
    return _AttemptEnd(
        redone_s=sum(redone) / len(redone) if redone else None,
        repeated_steps=max((steps_of(each, REPEATED) for each in accounts), default=None),
        last_step=max(reached, default=None),
        pace_s=step_s(accounts),
    )
