"""The incidents of a story as lines of text: failures, restarts, hangs and pauses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from regrow.events.evidence import EXITED_AFTER_EXCEPTION, describe_node, short_scope
from regrow.events.silences import without_heartbeat_s
from regrow.utils import source_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regrow.events.story_types import (
        Expiry,
        Failure,
        InProcessRestart,
        OtherFailure,
        PlannedRestart,
        Replacement,
        RestartCost,
        SentState,
        ServerEnd,
        StalledProgress,
        Story,
        Suspension,
    )

Row = tuple[str, str, str] | tuple[str, str, str, float | None]
"""Label, value, a note in parentheses, and the time; a row without a value is not shown."""
Line = tuple[float | None, str]
"""Seconds since the start of the job, and text."""
Block = list[Line]
"""The lines of one incident. A line without a time has that of the line before."""

_MOST_OTHERS = 4
_MOST_LOST = 16
_MOST_PLACES = 8  # most places of workers in a comparison of stacks
_MOST_RANKS = 32
_LATE = "an unknown delay: the guardian, which watches the workers, was paused"
_LONGEST = 300  # most characters of a text from the job


def server_end(end: ServerEnd) -> Line:
    """Describe the end of a store server."""
    where = f" on host {clean(end.host)}" if end.host else ""
    what = f"  the store server{where} (pid {end.pid}) {clean(end.how)}"
    if end.restarted_after_s is None:
        return end.at_s, f"{what}, and no other one took over: {clean(end.reason or 'unknown')}"
    return (
        end.at_s,
        f"{what}; its agent had started another one after {duration(end.restarted_after_s)}",
    )


def failed(story: Story, number: int | None, failure: Failure) -> Block:
    """Describe a failure and its cost; a host that left with notice has no number."""
    who = _worker(failure.rank, failure.host, failure.pid)
    if failure.is_host_lost:
        who = ""
    elif failure.rank is None and failure.pid is None:
        who = f"on host {clean(failure.host)}:" if failure.host else ""
    what = clean(failure.what)
    compared = failure.compared
    hang: list[Row] = []
    if failure.timer is not None:
        what = _hung(failure.timer, failure.signal)
        what += "; the wrapper gave up" if failure.gave_up is not None else ""
        hang = _hang_rows(failure.timer, compared or failure.timer.compared)
    elif compared:  # another host reports the timer
        hang = _place_rows(compared)
    kind = "change" if number is None else f"failure {number}"
    heading = f"  {kind} (attempt {failure.attempt}): {who} {what}"
    return [
        (failure.at_s, heading.replace(":  ", ": ")),
        *_lines(
            [
                *_column("also lost", _lost_nodes(failure)),
                *hang,
                ("error file", clean(failure.error_file or ""), ""),
                *_column("then also", _others(failure)),
                ("as a result", _consequences(failure), ""),
                _also_hung_row(failure),
                _detected_row(failure),
                _killed_row(failure),
                _restart_row(story, failure),
                _step_row(story, failure),
                ("joined", _joined(failure), ""),
                _work_row(story, failure),
            ]
        ),
    ]


def planned_restart(story: Story, restart: PlannedRestart) -> Block:
    """Describe a restart without a failure."""
    reason = clean(restart.reason)
    heading = f"  attempt {restart.attempt} was stopped without a failure: {reason}"
    rows: list[Row] = [
        _killed_row(restart),
        _restarted_row(restart),
        ("joined", _joined(restart), ""),
        _step_row(story, restart),
        _work_row(story, restart),
    ]
    return [(restart.at_s, heading), *_lines(rows)]


def _joined(cost: RestartCost) -> str:
    hosts = [f"host {clean(host)}" for host in cost.joined[:_MOST_LOST]]
    more = len(cost.joined) - len(hosts)
    return ", ".join(hosts) + (f" and {more} more" if more else "")


def _later(cost: RestartCost | InProcessRestart, seconds: float | None) -> float | None:
    return None if cost.at_s is None or seconds is None else cost.at_s + seconds


def _lines(rows: Iterable[Row]) -> Block:
    """Return a line for each row that has a value."""
    return [
        (
            at[0] if at else None,
            f"    {label:<17}" + (f"{value:<10} ({note})" if note else value),
        )
        for label, value, note, *at in rows
        if value
    ]


def _column(label: str, values: Iterable[str]) -> list[Row]:
    """Return one row for each value; only the first row shows the label."""
    return [("" if index else label, value, "") for index, value in enumerate(values)]


def _lost_nodes(failure: Failure) -> list[str]:
    shown = [clean(describe_node(node)) for node in failure.lost_nodes[:_MOST_LOST]]
    more = len(failure.lost_nodes) - len(shown)
    return [*shown, f"and {count(more, 'more node')}"] if more else shown


def _detected_row(failure: Failure) -> Row:
    after, silent = failure.detected_after_s, failure.silent_s
    value, note = _LATE if failure.noticed_late else _seconds(after), ""
    told = without_heartbeat_s(failure.what) if failure.is_host_lost else None
    if failure.has_left and silent:
        return "notified after", duration(silent), "since the signal to its agent"
    if failure.is_host_lost and (not silent or (told and abs(silent - told) < 0.05 * told)):
        value = ""  # the heading has the silence
    elif silent and not failure.noticed_late:
        value = duration(silent + (after or 0.0))
        is_of_steps = failure.timer is None and failure.last_step is not None
        note = "since the last step" if is_of_steps else _since(failure.timer)
    return "detected after", value, note, _later(failure, after)


def _killed_row(cost: RestartCost) -> Row:
    """Return when the workers had ended, if some had to be killed for it."""
    killed, after = _ranks(cost.killed), cost.stopped_after_s
    if not killed or after is None:
        return "ended after", "", ""
    return "ended after", duration(after), f"{killed} had to be killed", _later(cost, after)


def _since(timer: Expiry | None) -> str:
    is_paused = timer is not None and timer.paused_by is not None
    return "since it was paused" if is_paused else "since its last sign of life"


def _restart_row(story: Story, failure: Failure) -> Row:
    if failure.restarted_attempt is not None:
        host = f"host {clean(failure.notified)}" if failure.notified else "this host"
        since = f"since {host} was notified" if failure.elsewhere else ""
        is_later = failure.noticed_late or (failure.silent_s and not since)
        if failure.timer is not None and is_later:
            since = "since it was given up"
        elif is_later:
            since = "since its detection"
        budget = _budget(failure.restarts_left)
        return _restarted_row(failure, since, budget)
    value, note = "no restarts left", ""
    if story.state is None:
        value = "the log ends here"
    elif story.state == "FAILED" and story.restarts_left and story.closed:
        value, note = "the rendezvous is closed", clean(story.closed)
    elif story.state != "FAILED" or story.restarts_left:
        value = "the job ended here"
        if failure.searched_s is not None:
            note = f"its agent searched for the other hosts for {duration(failure.searched_s)}"
    elif story.max_restarts == 0:
        value = "no restarts allowed (--max-restarts=0)"
    elif story.max_restarts is not None:
        value = f"no restarts left (--max-restarts={story.max_restarts})"
    return "not restarted", value, note


def _budget(left: int | None) -> str:
    if left is None:
        return ""
    return f"{count(left, 'restart') if left else 'no restarts'} left"


def _restarted_row(cost: RestartCost, since: str = "", budget: str = "") -> Row:
    notes = [since] if cost.restarted_after_s is not None else []
    workers = cost.restarted_workers
    if workers is not None:
        started = "the one worker" if workers == 1 else f"all {workers} workers"
        forked = cost.forked_workers
        how = "" if not forked else ", from the template"
        if 0 < forked < workers:
            how = f", {forked} of them from the template"
        again = f"{started} {'started' if cost.joined else 'started again'}{how}"
        if cost.kept_workers == workers:
            again = f"{started} run again, in the same processes"
        elif cost.kept_workers and cost.recorded_workers == workers:
            again = f"{started} run again, {cost.kept_workers} of them in the same processes"
        elif cost.kept_workers:
            again = f"{started} run again, those of this host in the same processes"
        notes.append(again)
    if cost.backoff_s is not None:
        notes.append(f"including a pause of {duration(cost.backoff_s)}")
    note = "; ".join(filter(None, [*notes, budget]))
    after = cost.restarted_after_s
    return "restarted after", _seconds(after) or "unknown", note, _later(cost, after)


def _step_row(story: Story, cost: RestartCost) -> Row:
    step = cost.first_step
    if step is None:
        expected = cost.restarted_attempt is not None and story.reports_steps
        return "first step after", "unknown: none is recorded" if expected else "", ""
    rank = f"rank {step.rank} had made " if step.rank is not None else ""
    note = f"{rank}step {step.step}"
    if step.attempt != cost.restarted_attempt:
        note += f", attempt {step.attempt}"
    after = cost.first_step_after_s
    return "first step after", _seconds(after) or "unknown", note, _later(cost, after)


def _work_row(story: Story, cost: RestartCost) -> Row:
    label = "work lost"
    if not story.reports_steps:
        return label, "", ""
    if cost.work_lost is not None:
        value = count(cost.work_lost, "step")
        if cost.last_step is None:
            return label, value, "the attempt made no step"
        resumed = cost.resumed_from or 0
        since = f"resumed from step {resumed}" if resumed > 0 else "started over"
        note = f"step {cost.last_step} reached, {since}"
        if cost.work_lost_s and cost.work_lost:
            note += f"; about {duration(cost.work_lost_s)} the first time"
        return label, value, note
    if cost.last_step is not None:
        return label, f"unknown: step {cost.last_step} reached, and no step after that", ""
    return label, "unknown: the attempt's last step is not recorded", ""


def _others(failure: Failure) -> list[str]:
    others = [other for other in failure.others if not other.is_consequence]
    shown = [_other(other) for other in others[:_MOST_OTHERS]]
    more = len(others) - len(shown)
    total = len(failure.others) + 1
    return [*shown, f"and {more} more of {total} failed workers"] if more else shown


def _consequences(failure: Failure) -> str:
    """Describe the errors that follow from the end of a peer, by the first one."""
    follow = [other for other in failure.others if other.is_consequence]
    if not follow:
        return ""
    more = _ranks(other.rank for other in follow[1:])
    return _other(follow[0]) + (f"; {more} failed in the same way" if more else "")


def _also_hung_row(failure: Failure) -> Row:
    return "also hung", _ranks(each.rank for each in failure.hung_too), ""


def _ranks(of: Iterable[int | None]) -> str:
    ranks = sorted({rank for rank in of if rank is not None})
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}" if ranks else ""


def _other(other: OtherFailure) -> str:
    after = f", {duration(other.after_s)} later" if other.after_s is not None else ""
    if (
        exited := EXITED_AFTER_EXCEPTION.match(other.what)
    ) is not None:  # it ended later than it failed
        who = _worker(other.rank, other.host, other.pid)
        return f"{who} failed with {clean(exited[2])}{after}, and exited with code {exited[1]}"
    if other.stopped_with is not None:
        after += f"; the agent then stopped it with {other.stopped_with}"
    return f"{_worker(other.rank, other.host, other.pid)} {clean(other.what)}{after}"


def expired_timer(expiry: Expiry) -> Block:
    """Describe a timer that expired and belongs to no failure."""
    who = _worker(expiry.rank, expiry.host, expiry.pid)
    if expiry.helper:
        who = f"a process that {_worker(expiry.rank, expiry.host, None)} had started"
        who += f" (pid {expiry.pid})"
    end = f"so it was sent {clean(expiry.signal)}" if expiry.signal else "which is only reported"
    heading = f"  {who}: {_expired(expiry)}, {end} (attempt {expiry.attempt})"
    return [(expiry.at_s, heading), *_lines(_hang_rows(expiry, expiry.compared))]


def stalled(stall: StalledProgress) -> Block:
    """Describe a worker that made no steps while others did."""
    who = _worker(stall.rank, stall.host, stall.pid)
    named = f"rank {stall.rank} "  # begins the text of the rank itself
    did = clean(stall.what)
    did = did.removeprefix(named) if did.startswith(named) else f"stalled: {did}"
    heading = f"  {who} {did} (attempt {stall.attempt})"
    return [(stall.at_s, heading), *_lines(_hang_rows(stall, ()))]


def in_process_restart(restart: InProcessRestart) -> Block:
    """Describe a restart of the function in the same processes."""
    who = _worker(restart.rank, restart.host, restart.pid) if restart.rank is not None else "a rank"
    of = f" of attempt {restart.attempt}" if restart.attempt else ""
    what = f"{who} {clean(restart.did)}"
    rows: list[Row] = []
    if (timer := restart.timer) is not None:
        what = f"{who} {_hung(timer, timer.signal)}"
        rows += _hang_rows(timer, timer.compared)
    if restart.silent_s:
        detected = dict(restart.phases).get("detected", 0.0)
        silent, at = duration(restart.silent_s + detected), _later(restart, detected)
        note = _since(timer) if timer is not None else "the time-out of its wrapper"
        rows.append(("detected after", silent, note, at))
    if restart.phases:
        phase, after = restart.phases[-1]
        steps = ", ".join(
            f"{clean(name)} {duration(s)}"
            for name, s in restart.phases[:-1]
            if s or not restart.silent_s  # a time-out is noticed by the rank itself
        )
        begin = "it was given up" if restart.silent_s else "the fault"
        note = f"times since {begin}: {steps}" if steps else ""
        rows.append((f"{clean(phase)} after", duration(after), note, _later(restart, after)))
    rows += _column("replaced", [_replacement(each) for each in restart.replaced])
    rows += _column("not replaced", [clean(each) for each in restart.not_replaced])
    rows += _column("state", [_sent_state(each) for each in restart.states])
    if restart.lost_count:
        ranks = ", ".join(map(str, restart.lost))
        more = restart.lost_count - len(restart.lost)
        also = f" and {more} more" if more > 0 else ""
        left = f"; {restart.world_size} continue" if restart.world_size is not None else ""
        plural = "s" if restart.lost_count > 1 else ""
        rows.append(("without", f"rank{plural} {ranks}{also}{left}", ""))
    kind = "replacement" if restart.replaced else "in-process restart"
    heading = f"  {kind} (iteration {restart.iteration}{of}): {what}"
    return [(restart.at_s, heading), *_lines(rows)]


def _sent_state(sent: SentState) -> str:
    plural = "s" if len(sent.targets) > 1 else ""
    took = f" in {duration(sent.duration_s)}" if sent.duration_s is not None else ""
    return (
        f"step {sent.step} from rank {sent.rank} to rank{plural} "
        f"{', '.join(map(str, sent.targets))}: {sent.size / 1e6:.1f} MB{took}"
    )


def _replacement(of: Replacement) -> str:
    if of.pid is None:  # another host has the events
        return f"rank {of.rank}: {clean(of.origin or 'the agent of its host has the details')}"
    at = f" after step {of.last_step}" if of.last_step is not None else ""
    start = source_text(of.source)
    after = f" {duration(of.started_after_s)} later" if of.started_after_s is not None else ""
    new = f"pid {of.pid} started {start}{after}"
    if of.source == "standby":
        new = f"pid {of.pid}, a standby at the wrapped call, took its place{after}"
    parts = [
        f"rank {of.rank}: pid {of.ended_pid} ended {clean(of.how)}{at}",
        new,
        _budget(of.restarts_left),
    ]
    return "; ".join(filter(None, parts))


def _hung(timer: Expiry, killed_by: str | None) -> str:
    """Describe a worker whose timer expired, as a predicate."""
    end = f"killed by {killed_by}" if killed_by else f"sent {timer.signal}"
    did = "hung" if timer.paused_by is None else f"was paused by {clean(timer.paused_by)}"
    return f"{did}: {_expired(timer)}, so it was {clean(end)}"


def _expired(expiry: Expiry) -> str:
    if expiry.heartbeat and expiry.after_s is not None:
        return f"no heartbeat for {duration(expiry.after_s + (expiry.over_s or 0.0))}"
    of = f" of {expiry.after_s:.10g} s" if expiry.after_s is not None else ""
    by = f" by {duration(expiry.over_s)}" if expiry.over_s is not None else ""
    return f"timer {clean(short_scope(expiry.scope))}{of} was exceeded{by}"


def _place_rows(compared: Sequence[str]) -> list[Row]:
    places = [clean(line) for line in compared[:_MOST_PLACES]]
    more = len(compared) - len(places)
    return _column("compared", [*places, f"... {more} more places"] if more else places)


def _hang_rows(of: Expiry | StalledProgress, compared: Sequence[str]) -> list[Row]:
    stood, stacks = clean(of.stood), clean(of.stacks or "")
    return [("location", stood, ""), *_place_rows(compared), ("stacks", stacks, "")]


def paused(suspension: Suspension) -> Line:
    """Describe a worker that a signal paused."""
    who = _worker(suspension.rank, suspension.host, suspension.pid)
    held = suspension.duration_s
    end = "and not resumed" if held is None else f"for {duration(held)}"
    what = f"was paused by {clean(suspension.signal)} {end} (attempt {suspension.attempt})"
    return suspension.at_s, f"  {who} {what}"


def _worker(rank: int | None, host: str | None, pid: int | None) -> str:
    who = "a worker" if rank is None else f"rank {rank}"
    if host:
        who += f" on host {clean(host)}"
    return who + (f" (pid {pid})" if pid is not None else "")


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def duration(seconds: float) -> str:
    """Format seconds with about two significant digits, in a readable unit.

    The result is "an unknown time" for infinity and NaN: a log may hold any number.
    """
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clean(text: str, longest: int = _LONGEST) -> str:
    """Return a text of the job as printable ASCII of at most so many characters."""
    plain = text[: longest + 1].encode("ascii", "backslashreplace").decode("ascii")
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in plain)
    return plain if len(plain) <= longest else f"{plain[: longest - 3]}..."
