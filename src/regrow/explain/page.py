"""An explanation as a page of plain ASCII text, and all of a job as a list.

Texts of the job are cut and escaped as in the story: a message may hold anything, also the control
codes of a terminal.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from regrow.events import NO_ID, clean
from regrow.explain.explanation import RUNG_NAMES, RUNGS, Cost, Explanation, Fact
from regrow.explain.long_settings import LEAST_S, LEAST_SHARE
from regrow.explain.words import count, seconds
from regrow.ledger import MEANINGS, title
from regrow.utils import time_stamp

WIDTH = 100
_LABEL = 14
_BUCKET = 21
_PLACE = 'File "'
"""What a line of a traceback has that is not wrapped: a path, to be copied."""
_BAR = 30  # characters of the longest bar of a timeline
_SHOWN_S = 0.0005
_MOST = 600  # characters of what another rank did: its message of at most 300, and what followed


def page(explanation: Explanation, of: int | None = None) -> str:
    """Return the page of one failure.

    Args:
        explanation: the failure.
        of: number of failures of the job; None leaves it out.
    """
    return "\n".join(line.rstrip() for line in _page(explanation, of))


def list_of(explanations: Sequence[Explanation]) -> str:
    """Return one line for each failure: number, time, cause, rung, cost."""
    rows = [("", "when", "rung", "time lost", "redone", "what happened")]
    for each in explanations:
        cost = each.cost
        rows.append(
            (
                str(each.number),
                "?" if each.at_s is None else time_stamp(each.at_s, _day(each)),
                str(each.rung or "-"),
                "?" if cost.seconds is None else seconds(cost.seconds),
                "?" if cost.steps is None else count(cost.steps, "step"),
                clean(each.title),
            )
        )
    sizes = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(line for row in rows for line in _list_row(row, sizes))


def _list_row(row: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    *cells, what = row
    begin = "  ".join(
        cell.ljust(size) if column == 1 else cell.rjust(size)
        for column, (cell, size) in enumerate(zip(cells, sizes, strict=True))
    )
    first, *more = textwrap.wrap(what, max(WIDTH - len(begin) - 2, 40)) or [""]
    yield f"{begin}  {first}"
    yield from (f"{'':{len(begin)}}  {line}" for line in more)


def _day(each: Explanation) -> float | None:
    return None if each.time is None or each.at_s is None else each.time - each.at_s


def heading(each: Explanation) -> str:
    """Return what an explanation is of, with its number: `Failure 2`."""
    kind = "Change" if each.is_planned else "Stop" if each.cause == "stop" else "Failure"
    return f"{kind} {each.number}"


_BEGUN = {
    "node": ("no sign of training{on} after", "the loss was noticed"),
    "hang": ("silent from", "given up"),
    "heartbeat": ("silent from", "given up"),
}
"""By cause, what a failure began with, and what ended the time in which regrow could not know."""


def _page(each: Explanation, of: int | None) -> Iterator[str]:
    total = f" of {of}" if of is not None else ""
    id = "" if each.run_id in (None, NO_ID) else f" {clean(each.run_id or '')}"
    script = f" ({clean(each.script)})" if each.script else ""
    yield from _wrapped(f"{heading(each)}{total} of job{id}{script}: {clean(each.title)}", "  ")
    when = [] if each.at_s is None else [_moment(each.at_s, _day(each))]
    begun, noticed = _BEGUN.get(each.cause, ("", "the process ended"))
    on = f" on host {each.host}" if each.host else ""
    begun = each.begun or (begun.format(on=on) if each.noticed_s is not None else "")
    if begun:
        when = [clean(f"{begun} {part.removeprefix('at ')}") for part in when]
    if each.at_s is not None and each.noticed_s is not None:
        later, clock = seconds(each.noticed_s - each.at_s), _clock(each.noticed_s, _day(each))
        when.append(f"and {each.noticed or noticed} {later} later{clock and f' at {clock}'}")
    if each.run > 1:
        when.append(f"in run {each.run} of the job")
    if each.attempt is not None:
        when.append(f"in attempt {each.attempt}")
    if each.story_number is not None and f"Failure {each.story_number}" != heading(each):
        when.append(f"failure {each.story_number} of `regrow events`")
    parts = filter(None, [", ".join(when), clean(each.outcome)])
    yield from _wrapped(f"  {'; '.join(parts)}", "  ")
    yield ""
    yield "Cause and evidence"
    yield from _facts(each.evidence)
    if each.peers:
        yield ""
        yield "The ranks" if each.cause in ("stop", "server") else "The other ranks"
        yield from (
            line for peer in each.peers for line in _wrapped(f"  {clean(peer, _MOST)}", "    ")
        )
    yield ""
    rung = f": rung {each.rung}, {RUNGS[each.rung]}" if each.rung in RUNGS else ""
    yield f"What regrow did{rung}"
    yield from (line for did in each.action for line in _wrapped(f"  {clean(did)}", "    "))
    for refusal in each.refusals:
        what = f"not rung {refusal.rung} ({RUNG_NAMES[refusal.rung]}): {clean(refusal.reason)}"
        yield from _wrapped(f"  {what}", "    ")
    if each.timeline:
        yield ""
        yield "Timeline"
        yield from _timeline(each)
    yield ""
    yield "Cost"
    yield from _cost(each)
    yield ""
    yield "What made it long"
    if not each.long:
        least = f"{LEAST_S:g} s and {LEAST_SHARE:.0%}".replace("%", " %")
        yield f"  no setting is known to have decided a large part of it (at least {least})"
    for held in each.long:
        setting, value, text = clean(held.setting), clean(held.value), clean(held.text)
        yield from _row(seconds(held.seconds), f"{setting} ({value}): {text}")


def _moment(at_s: float, day: float | None) -> str:
    clock, since = _clock(at_s, day), f"{seconds(max(at_s, 0.0))} after the start of the job"
    return f"at {clock}, {since}" if clock else since


def _clock(at_s: float, day: float | None) -> str:
    """Return a time of day, cut off after hundredths of a second; empty if it is unknown."""
    if day is None or not math.isfinite(day + at_s):
        return ""
    second, hundredth = divmod(math.floor(100 * (day + at_s)), 100)
    clock = time_stamp(0.0, second).rpartition(" ")[0]
    return clock and f"{clock}.{hundredth:02}"


def _facts(facts: Iterable[Fact]) -> Iterator[str]:
    for fact in facts:
        if not fact.lines:
            yield from _row(fact.label, clean(fact.text))
            continue
        for number, line in enumerate(fact.lines):
            shown = f"  {'' if number else fact.label:<{_LABEL}} {clean(line)}"
            yield from [shown] if _PLACE in line else _wrapped(shown, " " * (_LABEL + 7))


def _row(label: str, text: str) -> Iterator[str]:
    return _wrapped(f"  {label:<{_LABEL}} {text}", " " * (_LABEL + 3))


def _wrapped(line: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _timeline(each: Explanation) -> Iterator[str]:
    whole = each.timeline[-1].end_s or 1.0
    for phase in each.timeline:
        begin = _column(phase.start_s / whole)
        size = max(_column(phase.end_s / whole) - begin, 1)
        bar = f"{'':{min(begin, _BAR - 1)}}{'=' * size}"
        yield (
            f"  {clean(phase.name):<{_LABEL}} {seconds(phase.length_s):>9}  "
            f"|{bar:<{_BAR}}| {clean(phase.meaning)}"
        )
    yield f"  {'all':<{_LABEL}} {seconds(whole):>9}"


def _column(share: float) -> int:
    return round(_BAR * share) if math.isfinite(share) else 0


def _cost(each: Explanation) -> Iterator[str]:
    cost = each.cost
    redone = f", {seconds(cost.redone_s)} of them to redo steps" if cost.redone_s else ""
    until = f" until the workers ran; then unknown: {cost.why_unknown}" if cost.why_unknown else ""
    on = ": the workers ran on" if each.cause == "server" and cost.seconds == 0 else ""
    yield from _row("time", f"{_known(cost.seconds)}{redone}{until}{on}")
    yield from _row("steps", _steps(each))
    buckets = {bucket: s for bucket, s in cost.buckets.items() if s >= _SHOWN_S}
    parts = "; by the buckets of `regrow goodput`:" if buckets else ""
    yield from _row("worker-time", f"{worker_time(cost)}{parts}")
    for bucket, s in buckets.items():
        yield f"    {title(bucket):<{_BUCKET}} {seconds(s):>9}  {MEANINGS.get(bucket, '')}"


def _steps(each: Explanation) -> str:
    if each.cost.steps is not None:
        is_part = each.cost.steps and each.cost.redone_s == 0
        note = ", in the time of the startup: the attempt made no other step" if is_part else ""
        return f"{count(each.cost.steps, 'step')} done again{note}"
    if each.cost.why_unknown:
        return f"unknown: {each.cost.why_unknown}"
    if each.cause == "stop":
        return "unknown: it depends on what the workers have saved"
    if each.rung is None:
        return "unknown: those since the last checkpoint are lost"
    return "unknown"


def worker_time(cost: Cost) -> str:
    """Return the worker-seconds of a failure, of which workers they are, and since when."""
    if cost.worker_seconds is None or cost.worker_hours is None:
        return "unknown"
    hours = cost.worker_hours
    about = f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}" if hours >= 0.001 else "below 0.001"
    known, every = cost.workers, cost.all_workers
    together = cost.which or " together"
    whose = f"all {known} workers{together}" if known and known > 1 else f"all workers{together}"
    if known is not None and every is not None and known < every:
        whose = f"the {count(known, 'worker')} of {every} whose time is recorded"
    before = (
        ""
        if cost.has_unfinished_steps
        else "; the steps that were cut off are not included (see `regrow goodput`)"
    )
    if cost.before_s >= _SHOWN_S:
        before = f", {seconds(cost.before_s)} of it before the timeline, since their last steps"
    return f"{seconds(cost.worker_seconds)} of {whose} ({about} worker-hours){before}"


def _known(value: float | None) -> str:
    return "unknown" if value is None else seconds(value)
