"""A ledger as text: the output of `regrow goodput`."""

from __future__ import annotations

from collections.abc import Iterator

from regrow.events import NO_ID, clean
from regrow.ledger import buckets
from regrow.ledger.ledger import Ledger

_WIDTH = 23
_SHOWN_S = 0.0005


def render(ledger: Ledger) -> str:
    """Return the ledger as a table: both ratios with their formulas, then the biggest losses."""
    return "\n".join(_lines(ledger))


def _lines(ledger: Ledger) -> Iterator[str]:
    total = ledger.total
    productive, unknown = ledger.seconds[buckets.PRODUCTIVE], ledger.seconds[buckets.UNKNOWN]
    end = "" if ledger.finished or ledger.running else "; its end is not recorded"
    id = "" if ledger.run_id in (None, NO_ID) else f" {clean(ledger.run_id or '')}"
    scheduled = f"{_count(ledger.sessions, 'run')}, " if ledger.sessions > 1 else ""
    yield (
        f"job{id}: {scheduled}{_count(ledger.workers, 'worker')}, "
        f"{_count(ledger.attempts, 'start')} of the workers, {duration(ledger.end - ledger.begin)}"
        f"{end}"
    )
    yield ""
    training = productive + ledger.phases
    yield _ratio("goodput", ledger.goodput, f"productive {duration(productive)}", total)
    effective = ledger.effective_training_time_ratio
    yield _ratio(
        "effective training time", effective, f"productive and phases {duration(training)}", total
    )
    yield ""
    yield f"  {'worker-time':<{_WIDTH}} {'':>10}  {'share':>6}"
    steps = "" if ledger.highest_step is None else f", up to step {ledger.highest_step}"
    yield _row(buckets.PRODUCTIVE, productive, total, buckets.MEANINGS[buckets.PRODUCTIVE] + steps)
    for bucket, seconds in ledger.losses():
        if seconds < _SHOWN_S:
            continue
        meaning = buckets.MEANINGS.get(bucket, "")
        if bucket == buckets.REDONE and ledger.redone_steps:
            meaning += f": {_count(ledger.redone_steps, 'step')}"
        yield _row(bucket, seconds, total, meaning)
    yield _row(buckets.UNKNOWN, unknown, total, buckets.MEANINGS[buckets.UNKNOWN])
    yield f"  {'all':<{_WIDTH}} {duration(total):>10}  {_share(1.0 if total else None)}"
    if ledger.injected_seconds is not None:
        share = ledger.injected_seconds / total if total else None
        yield ""
        yield (
            f"  of which injected by --chaos: {duration(ledger.injected_seconds)},"
            f" {_share(share).strip()} of all, after {_count(ledger.injected_faults or 0, 'fault')}"
        )
    if ledger.running:
        yield ""
        yield "  The job runs. Its agents record the time of workers every minute, or every 2 % of"
        yield "  their age if that is longer; the time after that is left out."
    elif ledger.highest_step is None:
        yield ""
        yield "  The script reports no steps, so its time is unknown: call regrow.step(n)."
    if ledger.highest_step is not None and ledger.silent_workers:
        yield ""
        silent = _count(ledger.silent_workers, "worker")
        yield f"  {silent} of a node reported no steps: call regrow.step(n) on every rank."


def _ratio(name: str, ratio: float | None, numerator: str, total: float) -> str:
    return f"  {name:<{_WIDTH}} {_share(ratio)}  = {numerator} / all {duration(total)}"


def _row(bucket: str, seconds: float, total: float, meaning: str) -> str:
    name = buckets.title(bucket)
    share = _share(seconds / total if total else None)
    return f"  {name:<{_WIDTH}} {duration(seconds):>10}  {share}  {meaning}".rstrip()


def _share(ratio: float | None) -> str:
    return "     -" if ratio is None else f"{100 * ratio:>5.1f}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a duration with two units at most: "3 h 12 min", "4.2 s", "310 ms"."""
    if seconds < _SHOWN_S:
        return "0 s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return (
            f"{minutes} min"
            if seconds >= 600
            else f"{int(seconds) // 60} min {int(seconds) % 60} s"
        )
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours} h {minutes} min"
    return f"{hours} h"
