"""A story as text for the person on call: short, aligned, plain ASCII.

Texts that come from the job (messages, host names, paths) are cut to a
sensible length, and what is not printable ASCII is escaped: a worker's
message may hold anything, also a terminal's control codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._describe import short_scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._story import Expiry, Failure, InPlace, OtherFailure, Stall, Story, Suspension

__all__ = ["duration", "render"]

_MOST_OTHERS = 4
_MOST_SUSPENSIONS = 8
_MOST_FAILURES = 20
_MOST_EXPIRIES = 8
_MOST_PLACES = 8  # in which workers stood
_MOST_RANKS = 32
_LONGEST = 300  # characters of a text from the job


def render(story: Story, width: int) -> str:
    """The story in lines of at most `width` characters, where words and paths allow."""
    lines = [_headline(story)]
    failures = [_failure(story, number, f) for number, f in enumerate(story.failures, 1)]
    if (skipped := len(failures) - _MOST_FAILURES) > 0:
        # A crash loop: its beginning and its end say all there is to say.
        half = _MOST_FAILURES // 2
        failures[half:-half] = [[f"  ... {skipped} more failures ..."]]
    for block in failures:
        lines += block
    for move in story.moves:
        reason = _clean(move.reason)
        lines.append(f"  attempt {move.attempt} was stopped without a failure: {reason}")
        if move.restarted_after_s is not None:
            value = duration(move.restarted_after_s)
            note = _started_again(move.restarted_workers)
            lines.append(f"    {'restarted after':<17}{value:<10}{f' ({note})' if note else ''}")
    for suspension in story.suspensions[:_MOST_SUSPENSIONS]:
        lines.append(_suspension(suspension))
    if len(story.suspensions) > _MOST_SUSPENSIONS:
        lines.append(f"  ... {len(story.suspensions) - _MOST_SUSPENSIONS} more suspensions")
    for expiry in story.expiries[:_MOST_EXPIRIES]:
        lines += _expiry(expiry)
    if len(story.expiries) > _MOST_EXPIRIES:
        lines.append(f"  ... {len(story.expiries) - _MOST_EXPIRIES} more timers that ran out")
    shown = [_in_place(each) for each in story.in_place]
    if (skipped := len(shown) - _MOST_FAILURES) > 0:
        half = _MOST_FAILURES // 2
        shown[half:-half] = [[f"  ... {skipped} more restarts in place ..."]]
    for block in shown:
        lines += block
    for stall in story.stalls[:_MOST_EXPIRIES]:
        lines += _stall(stall)
    if len(story.stalls) > _MOST_EXPIRIES:
        lines.append(f"  ... {len(story.stalls) - _MOST_EXPIRIES} more stalls")
    if story.events_lost:
        lines.append(f"  {_count(story.events_lost, 'event')} could not be written to the log")
    return "\n".join(wrapped for line in lines for wrapped in _wrap(line, width))


def duration(seconds: float) -> str:
    """Seconds with three digits that matter, in the unit a person would use."""
    if seconds < 0.99995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def _headline(story: Story) -> str:
    about = [_clean(story.script)] if story.script else []
    if story.workers:
        low, high = min(story.workers), max(story.workers)
        size = _count(high, "worker") if low == high else f"{low} to {high} workers"
        about.append(size + (f" on {_count(story.nodes, 'node')}" if story.nodes else ""))
    named = f"regrow: job {_clean(story.run_id or '?')}"
    if about:
        named += f" ({', '.join(about)})"
    return f"{named} {_outcome(story)}"


def _outcome(story: Story) -> str:
    passed = duration(story.duration_s) if story.duration_s is not None else ""
    after = f" after {passed}" if passed else ""
    restarts = f" with {_count(story.restarts, 'restart')}" if story.restarts else ""
    reason = f": {_clean(story.reason)}" if story.reason else ""
    code = f" (exit code {story.exit_code})" if story.exit_code else ""
    if story.state is None:
        known = f", {passed} after its start" if passed else ""
        return (
            f"is UNFINISHED{restarts}{known}: "
            "the launcher's end is not recorded: it was killed or still runs"
        )
    if story.state == "SIGNALED":
        return f"was stopped by {_clean(story.signal or 'a signal')}{after}{restarts}"
    if story.state == "ERROR":
        return f"ended with an ERROR{code}{after}{restarts}{reason}"
    if story.state == "SUCCEEDED" or story.failures:
        reason = ""  # said below, or nothing to say
    return f"{_clean(story.state)}{code}{after}{restarts}{reason}"


def _failure(story: Story, number: int, failure: Failure) -> list[str]:
    who = _who(failure.rank, failure.host, failure.pid)
    if failure.rank is None and failure.pid is None:
        who = f"on host {_clean(failure.host)}:" if failure.host else ""
    what = _clean(failure.what)
    if failure.timer is not None:
        fate = f"killed by {failure.signal}" if failure.signal else f"sent {failure.timer.signal}"
        what = f"hung: {_ran_out(failure.timer)}, so it was {_clean(fate)}"
    heading = f"  failure {number} (attempt {failure.attempt}): {who} {what}"
    rows = [
        *_failure_hang_rows(failure),
        ("error file", _clean(failure.error_file or ""), ""),
        ("detected after", _seconds(failure.detected_after_s), ""),
        _restart_row(story, failure),
        _step_row(story, failure),
        _work_row(story, failure),
    ]
    lines = [heading.replace(":  ", ": ")]
    for label, value, note in rows:
        if value:
            shown = f"{value:<10} ({note})" if note else value
            lines.append(f"    {label:<17}{shown}")
    return lines + _others(failure) + _hung_too(failure)


def _restart_row(story: Story, failure: Failure) -> tuple[str, str, str]:
    if failure.restarted_attempt is not None:
        note = _started_again(failure.restarted_workers)
        if failure.elsewhere and failure.restarted_after_s is not None:
            note = f"of the news; {note}" if note else "of the news"
        if failure.backoff_s is not None:
            pause = f"{duration(failure.backoff_s)} of it a pause"
            note = f"{note}; {pause}" if note else pause
        return "restarted after", _seconds(failure.restarted_after_s) or "unknown", note
    if story.state is None:
        return "not restarted", "as far as the log goes", ""
    if story.state != "FAILED":
        return "not restarted", "the job ended here", ""
    allowed = story.max_restarts
    if allowed is None:
        return "not restarted", "no restarts left", ""
    if allowed == 0:
        return "not restarted", "no restarts allowed (--max-restarts=0)", ""
    return "not restarted", f"no restarts left (--max-restarts={allowed})", ""


def _started_again(workers: int | None) -> str:
    if workers is None:
        return ""
    return (
        "the one worker started again" if workers == 1 else f"all {workers} workers started again"
    )


def _step_row(story: Story, failure: Failure) -> tuple[str, str, str]:
    step = failure.first_step
    if step is None:
        expected = failure.restarted_attempt is not None and story.reports_steps
        return "first step after", "unknown: none is recorded" if expected else "", ""
    rank = f"rank {step.rank}, " if step.rank is not None else ""
    note = f"{rank}step {step.step}"
    if step.attempt != failure.restarted_attempt:
        note += f", attempt {step.attempt}"
    return "first step after", _seconds(failure.first_step_after_s) or "unknown", note


def _work_row(story: Story, failure: Failure) -> tuple[str, str, str]:
    label = "work lost"
    if not story.reports_steps:
        went_on = failure.restarted_attempt is not None
        return label, "unknown: the script does not call regrow.step" if went_on else "", ""
    if failure.work_lost is not None:
        value = _count(failure.work_lost, "step")
        if failure.last_step is None:
            return label, value, "the attempt had made none"
        resumed = failure.resumed_from or 0
        since = f"resumed from step {resumed}" if resumed > 0 else "started over"
        note = f"step {failure.last_step} reached, {since}"
        if failure.work_lost_s and failure.work_lost:
            note += f"; about {duration(failure.work_lost_s)} of training"
        return label, value, note
    if failure.last_step is not None:
        return label, f"unknown: step {failure.last_step} reached, and no step made since", ""
    return label, "unknown: the attempt's last step is not recorded", ""


def _others(failure: Failure) -> list[str]:
    shown = [_other(other) for other in failure.others[:_MOST_OTHERS]]
    more = len(failure.others) - len(shown)
    if more:
        shown.append(f"and {more} more of {len(failure.others) + 1} failed workers")
    labels = ["then also"] + [""] * len(shown)
    return [f"    {label:<17}{line}" for label, line in zip(labels, shown, strict=False)]


def _hung_too(failure: Failure) -> list[str]:
    ranks = sorted({each.rank for each in failure.hung_too if each.rank is not None})
    if not ranks:
        return []
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    label = "also hung"
    return [f"    {label:<17}rank{'s' if len(ranks) > 1 else ''} {shown}{more}"]


def _other(other: OtherFailure) -> str:
    after = f", {duration(other.after_s)} later" if other.after_s is not None else ""
    return f"{_who(other.rank, other.host, other.pid)} {_clean(other.what)}{after}"


def _expiry(expiry: Expiry) -> list[str]:
    who = _who(expiry.rank, expiry.host, expiry.pid)
    if expiry.helper:
        who = f"a process that {_who(expiry.rank, expiry.host, None)} had started"
        who += f" (pid {expiry.pid})"
    fate = f"so it was sent {_clean(expiry.signal)}" if expiry.signal else "which is only reported"
    lines = [f"  {who}: {_ran_out(expiry)}, {fate} (attempt {expiry.attempt})"]
    return lines + [
        f"    {label:<17}{value}" for label, value, _ in _hang_rows(expiry, expiry.compared)
    ]


def _stall(stall: Stall) -> list[str]:
    who = _who(stall.rank, stall.host, stall.pid)
    rows = [("stood", stall.stood), *([("stacks", stall.stacks)] if stall.stacks else [])]
    return [
        f"  {who} stalled: {_clean(stall.what)} (attempt {stall.attempt})",
        *(f"    {label:<17}{_clean(value)}" for label, value in rows),
    ]


def _in_place(restart: InPlace) -> list[str]:
    who = f"rank {restart.rank}: " if restart.rank is not None else ""
    of = f" of attempt {restart.attempt}" if restart.attempt else ""
    lines = [
        f"  restarted in place (iteration {restart.iteration}{of}): {who}{_clean(restart.what)}"
    ]
    if restart.phases:
        phase, after = restart.phases[-1]
        steps = ", ".join(f"{name} {duration(s)}" for name, s in restart.phases[:-1])
        lines.append(
            f"    {phase + ' after':<17}{duration(after):<10}{f' ({steps})' if steps else ''}"
        )
    if restart.lost_count:
        ranks = ", ".join(map(str, restart.lost))
        more = restart.lost_count - len(restart.lost)
        left = f"; {restart.world_size} go on" if restart.world_size is not None else ""
        label = "without"
        lines.append(
            f"    {label:<17}rank{'s' if restart.lost_count > 1 else ''} {ranks}"
            f"{f' and {more} more' if more > 0 else ''}{left}"
        )
    return lines


def _ran_out(expiry: Expiry) -> str:
    if expiry.heartbeat and expiry.after_s is not None:
        return f"no heartbeat for {duration(expiry.after_s + (expiry.over_s or 0.0))}"
    of = f" of {expiry.after_s:.10g} s" if expiry.after_s is not None else ""
    by = f" by {duration(expiry.over_s)}" if expiry.over_s is not None else ""
    return f"timer {_clean(short_scope(expiry.scope))}{of} was over{by}"


def _failure_hang_rows(failure: Failure) -> list[tuple[str, str, str]]:
    if failure.timer is None:  # it is told by another host
        return _place_rows(failure.compared)
    return _hang_rows(failure.timer, failure.compared or failure.timer.compared)


def _place_rows(compared: Sequence[str]) -> list[tuple[str, str, str]]:
    places = [("", _clean(line), "") for line in compared[:_MOST_PLACES]]
    if places:
        places[0] = ("compared", *places[0][1:])
    if (more := len(compared) - len(places)) > 0:
        places.append(("", f"... {more} more places", ""))
    return places


def _hang_rows(expiry: Expiry, compared: Sequence[str]) -> list[tuple[str, str, str]]:
    places = _place_rows(compared)
    stacks = [("stacks", _clean(expiry.stacks), "")] if expiry.stacks else []
    return [("stood", _clean(expiry.stood), ""), *places, *stacks]


def _suspension(suspension: Suspension) -> str:
    who = _who(suspension.rank, suspension.host, suspension.pid)
    held = suspension.duration_s
    end = "and not resumed" if held is None else f"for {duration(held)}"
    return (
        f"  {who} was suspended by {_clean(suspension.signal)} {end} (attempt {suspension.attempt})"
    )


def _who(rank: int | None, host: str | None, pid: int | None) -> str:
    who = "a worker" if rank is None else f"rank {rank}"
    if host:
        who += f" on host {_clean(host)}"
    return who + (f" (pid {pid})" if pid is not None else "")


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _clean(text: str) -> str:
    plain = text[: _LONGEST + 1].encode("ascii", "backslashreplace").decode("ascii")
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in plain)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3]}..."


def _wrap(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    import textwrap

    indent = len(line) - len(line.lstrip())
    # Rows go on below their value, sentences a little further in than they began.
    further = " " * (21 if indent == 4 else indent + 4)
    if indent > 4:
        further = " " * indent
    return textwrap.wrap(
        line,
        max(width, len(further) + 20),
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
