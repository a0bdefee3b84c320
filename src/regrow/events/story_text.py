"""A story as text for the person on call: short, aligned, plain ASCII.

Incidents of all kinds are in one order, that of their time. Each line begins with the time of day
(of the reader's time zone) and the seconds since the start of the job.

Texts from the job (messages, host names, paths) are cut to a readable length. Characters that
are not printable ASCII are escaped, because a worker's message may contain anything, also the
control codes of a terminal.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from regrow.events.evidence import describe_node, short_scope
from regrow.events.log import NO_ID
from regrow.utils import source_text, time_stamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regrow.events.story_types import (
        Expiry,
        Failure,
        InProcessRestart,
        Losses,
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

__all__ = ["duration", "render"]

Row = tuple[str, str, str] | tuple[str, str, str, float | None]
"""Label, value, a note in parentheses, and the time; a row without a value is not shown."""
Line = tuple[float | None, str]
"""Seconds since the start of the job, and text."""
Block = list[Line]
"""The lines of one incident. A line without a time has that of the line before."""

_MOST_OTHERS = 4
_MOST_LOST = 16
_MOST_OF_A_KIND = 8  # most entries of suspensions, timers and stalls
_MOST_FAILURES = 20
_MOST_PLACES = 8  # most places of workers in a comparison of stacks
_MOST_RANKS = 32
_LATE = "an unknown delay: the guardian, which watches the workers, was paused"
_LONGEST = 300  # most characters of a text from the job


def render(story: Story, width: int) -> str:
    """Render the story in lines of at most `width` characters, where words and paths allow."""
    failures = [_failure(story, number, f) for number, f in enumerate(story.failures, 1)]
    restarts = [_in_process_restart(restart) for restart in story.in_place]
    incidents = [
        *_ends_of(failures, "failures"),
        *(_planned_restart(story, move) for move in story.moves),
        *_first_of([[_suspension(each)] for each in story.suspensions], "pauses"),
        *_first_of([_expiry(each) for each in story.expiries], "expired timers"),
        *([_server_end(end)] for end in story.server_ends),
        *_ends_of(restarts, "in-process restarts"),
        *_first_of([_stall(each) for each in story.stalls], "stalls"),
    ]
    incidents.sort(key=lambda block: math.inf if block[0][0] is None else block[0][0])
    end = story.duration_s
    last: Block = [(end, f"  {line}") for line in _summary(story)]
    blocks = [[(end, _headline(story))], *incidents, last]
    return "\n".join(_stamped(blocks, story, width))


def _summary(story: Story) -> list[str]:
    """Return the lines about the whole job, for the end of the story."""
    lines = [_clean(line) for line in story.helpers]
    if len(story.servers) > 1:
        first, *later = map(_clean, story.servers)
        lines.append(f"the rendezvous was served by {first}, then by {', '.join(later)}")
    if story.losses is not None:
        lines.append(_lost(story.losses, story.duration_s))
    if story.events_lost:
        lines.append(f"{_count(story.events_lost, 'event')} could not be written to the log")
    return lines


def _lost(losses: Losses, of: float | None) -> str:
    parts = [
        ("detecting", losses.detecting_s),
        ("pausing before restarts", losses.pausing_s),
        ("starting", losses.starting_s),
        ("restarting in process", losses.in_process_s),
        ("redoing steps", losses.redoing_s),
    ]
    known = [f"{what} {duration(seconds)}" for what, seconds in parts if seconds]
    if losses.redoing_s is None:
        known.append("redoing steps unknown: the script does not call regrow.step")
    total = f" of {duration(of)}" if of is not None else ""
    return f"{duration(losses.total_s)}{total} lost: {', '.join(known)}"


def _stamped(blocks: Iterable[Block], story: Story, width: int) -> list[str]:
    """Return the lines with their times, wrapped; the first mention of a host has its address."""
    stamped: list[tuple[str, str]] = []
    for block in blocks:
        at: float | None = None
        for own, text in block:
            at = at if own is None else own
            stamped.append(("" if at is None else time_stamp(at, story.started_at), text))
    size, unnamed, found = max(len(stamp) for stamp, _ in stamped), dict(story.addresses), []
    for stamp, text in stamped:
        day, _, since = stamp.rpartition(" ")
        begin = f"{day}{since:>{size - len(day)}} " if size else ""
        named = _HOST.sub(lambda match: _with_address(match[0], unnamed), text)
        first, *more = _wrap(named, width - len(begin))
        found += [begin + first, *(" " * len(begin) + line for line in more)]
    return found


_HOST = re.compile(r"\bhost [^\s:,]++(?! \()")
"""A host that is named without an address."""


def _with_address(named: str, unnamed: dict[str, str]) -> str:
    address = unnamed.pop(named.removeprefix("host "), "")
    return f"{named} ({_clean(address)})" if address else named


def _first_of(blocks: list[Block], what: str) -> list[Block]:
    """Return the first blocks, and a line with the number of further blocks."""
    more = blocks[_MOST_OF_A_KIND:]
    if not more:
        return blocks
    return [*blocks[:_MOST_OF_A_KIND], [(more[0][0][0], f"  ... {len(more)} more {what}")]]


def _ends_of(blocks: list[Block], what: str) -> list[Block]:
    """Return the first and last blocks; in a crash loop these show enough."""
    skipped, half = len(blocks) - _MOST_FAILURES, _MOST_FAILURES // 2
    if skipped <= 0:
        return blocks
    at = blocks[half][0][0]
    return [*blocks[:half], [(at, f"  ... {skipped} more {what} ...")], *blocks[-half:]]


def duration(seconds: float) -> str:
    """Format seconds with about two significant digits, in a readable unit."""
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


def _headline(story: Story) -> str:
    about = [_clean(story.script)] if story.script else []
    if story.workers:
        low, high = min(story.workers), max(story.workers)
        size = _count(high, "worker") if low == high else f"{low} to {high} workers"
        about.append(size + (f" on {_count(story.nodes, 'node')}" if story.nodes else ""))
    id = story.run_id or "?"
    named = "" if id == NO_ID and about else f" {_clean(id)}"
    if about:
        named += f" ({', '.join(about)})"
    return f"regrow: job{named} {_outcome(story)}"


def _outcome(story: Story) -> str:
    passed = duration(story.duration_s) if story.duration_s is not None else ""
    after = f" after {passed}" if passed else ""
    changes = story.membership_changes
    counts = [
        _count(number, noun)
        for number, noun in (
            (max(story.restarts - changes, 0), "restart"),
            (changes, "membership change"),
        )
        if number
    ]
    restarts = f" with {' and '.join(counts)}" if counts else ""
    reason = f": {_clean(story.reason)}" if story.reason else ""
    code = f" (exit code {story.exit_code})" if story.exit_code else ""
    if story.state is None:
        known = f", {passed} after its start" if passed else ""
        return (
            f"is UNFINISHED{restarts}{known}: "
            "the launcher's end is not recorded: it was killed, still runs, or its disk was full"
        )
    if story.state == "SIGNALED":
        step = f" at step {story.last_step}" if story.last_step is not None else ""
        return f"was stopped by {_clean(story.signal or 'a signal')}{after}{restarts}{step}"
    if story.state == "ERROR":
        return f"ended with an ERROR{code}{after}{restarts}{reason}"
    if story.state == "SUCCEEDED" or story.failures:
        reason = ""  # the lines below report it, or there is no reason
    return f"{_clean(story.state)}{code}{after}{restarts}{reason}"


def _server_end(end: ServerEnd) -> Line:
    where = f" on host {_clean(end.host)}" if end.host else ""
    what = f"  the store server{where} (pid {end.pid}) {_clean(end.how)}"
    if end.restarted_after_s is None:
        return end.at_s, f"{what}, and no other one took over: {_clean(end.reason or 'unknown')}"
    return end.at_s, f"{what}; another one took over after {duration(end.restarted_after_s)}"


def _failure(story: Story, number: int, failure: Failure) -> Block:
    who = _worker(failure.rank, failure.host, failure.pid)
    if failure.is_host_lost:
        who = ""
    elif failure.rank is None and failure.pid is None:
        who = f"on host {_clean(failure.host)}:" if failure.host else ""
    what = _clean(failure.what)
    compared = failure.compared
    hang: list[Row] = []
    if failure.timer is not None:
        end = f"killed by {failure.signal}" if failure.signal else f"sent {failure.timer.signal}"
        what = f"hung: {_expired(failure.timer)}, so it was {_clean(end)}"
        hang = _hang_rows(failure.timer, compared or failure.timer.compared)
    elif compared:  # another host reports the timer
        hang = _place_rows(compared)
    heading = f"  failure {number} (attempt {failure.attempt}): {who} {what}"
    return [
        (failure.at_s, heading.replace(":  ", ": ")),
        *_lines(
            [
                *_column("also lost", _lost_nodes(failure)),
                *hang,
                ("error file", _clean(failure.error_file or ""), ""),
                *_column("then also", _others(failure)),
                ("as a result", _consequences(failure), ""),
                _also_hung_row(failure),
                (
                    "detected after",
                    _detected(failure),
                    "",
                    _later(failure, failure.detected_after_s),
                ),
                _restart_row(story, failure),
                _step_row(story, failure),
                ("joined", _joined(failure), ""),
                _work_row(story, failure),
            ]
        ),
    ]


def _planned_restart(story: Story, restart: PlannedRestart) -> Block:
    reason = _clean(restart.reason)
    heading = f"  attempt {restart.attempt} was stopped without a failure: {reason}"
    rows: list[Row] = [
        _restarted_row(restart),
        ("joined", _joined(restart), ""),
        _step_row(story, restart),
        _work_row(story, restart),
    ]
    return [(restart.at_s, heading), *_lines(rows)]


def _joined(cost: RestartCost) -> str:
    hosts = [f"host {_clean(host)}" for host in cost.joined[:_MOST_LOST]]
    more = len(cost.joined) - len(hosts)
    return ", ".join(hosts) + (f" and {more} more" if more else "")


def _later(cost: RestartCost, seconds: float | None) -> float | None:
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
    shown = [_clean(describe_node(node)) for node in failure.lost_nodes[:_MOST_LOST]]
    more = len(failure.lost_nodes) - len(shown)
    return [*shown, f"and {_count(more, 'more node')}"] if more else shown


def _detected(failure: Failure) -> str:
    return _LATE if failure.noticed_late else _seconds(failure.detected_after_s)


def _restart_row(story: Story, failure: Failure) -> Row:
    if failure.restarted_attempt is not None:
        since = "since this host was notified" if failure.elsewhere else ""
        return _restarted_row(failure, "since its detection" if failure.noticed_late else since)
    value, note = "no restarts left", ""
    if story.state is None:
        value = "the log ends here"
    elif story.state == "FAILED" and story.restarts_left and story.closed:
        value, note = "the rendezvous is closed", _clean(story.closed)
    elif story.state != "FAILED" or story.restarts_left:
        value = "the job ended here"
    elif story.max_restarts == 0:
        value = "no restarts allowed (--max-restarts=0)"
    elif story.max_restarts is not None:
        value = f"no restarts left (--max-restarts={story.max_restarts})"
    return "not restarted", value, note


def _restarted_row(cost: RestartCost, since: str = "") -> Row:
    notes = [since] if cost.restarted_after_s is not None else []
    workers = cost.restarted_workers
    if workers is not None:
        started = "the one worker" if workers == 1 else f"all {workers} workers"
        forked = cost.forked_workers
        how = "" if not forked else ", from the template"
        if 0 < forked < workers:
            how = f", {forked} of them from the template"
        again = f"{started} started again{how}"
        if cost.kept_workers:
            again = f"{started} run again; those of this node in the same processes"
        notes.append(again)
    if cost.backoff_s is not None:
        notes.append(f"including a pause of {duration(cost.backoff_s)}")
    note = "; ".join(filter(None, notes))
    after = cost.restarted_after_s
    return "restarted after", _seconds(after) or "unknown", note, _later(cost, after)


def _step_row(story: Story, cost: RestartCost) -> Row:
    step = cost.first_step
    if step is None:
        expected = cost.restarted_attempt is not None and story.reports_steps
        return "first step after", "unknown: none is recorded" if expected else "", ""
    rank = f"rank {step.rank}, " if step.rank is not None else ""
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
        value = _count(cost.work_lost, "step")
        if cost.last_step is None:
            return label, value, "the attempt made no step"
        resumed = cost.resumed_from or 0
        since = f"resumed from step {resumed}" if resumed > 0 else "started over"
        note = f"step {cost.last_step} reached, {since}"
        if cost.work_lost_s and cost.work_lost:
            note += f"; about {duration(cost.work_lost_s)} of training"
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
    ranks = _ranks(other.rank for other in follow)
    return f"{ranks or 'other workers'} lost a peer: {_other(follow[0])}"


def _also_hung_row(failure: Failure) -> Row:
    return "also hung", _ranks(each.rank for each in failure.hung_too), ""


def _ranks(of: Iterable[int | None]) -> str:
    ranks = sorted({rank for rank in of if rank is not None})
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}" if ranks else ""


def _other(other: OtherFailure) -> str:
    after = f", {duration(other.after_s)} later" if other.after_s is not None else ""
    return f"{_worker(other.rank, other.host, other.pid)} {_clean(other.what)}{after}"


def _expiry(expiry: Expiry) -> Block:
    who = _worker(expiry.rank, expiry.host, expiry.pid)
    if expiry.helper:
        who = f"a process that {_worker(expiry.rank, expiry.host, None)} had started"
        who += f" (pid {expiry.pid})"
    end = f"so it was sent {_clean(expiry.signal)}" if expiry.signal else "which is only reported"
    heading = f"  {who}: {_expired(expiry)}, {end} (attempt {expiry.attempt})"
    return [(expiry.at_s, heading), *_lines(_hang_rows(expiry, expiry.compared))]


def _stall(stall: StalledProgress) -> Block:
    who = _worker(stall.rank, stall.host, stall.pid)
    heading = f"  {who} stalled: {_clean(stall.what)} (attempt {stall.attempt})"
    return [(stall.at_s, heading), *_lines(_hang_rows(stall, ()))]


def _in_process_restart(restart: InProcessRestart) -> Block:
    who = f"rank {restart.rank}: " if restart.rank is not None else ""
    of = f" of attempt {restart.attempt}" if restart.attempt else ""
    what = f"{who}{_clean(restart.what)}"
    rows: list[Row] = []
    if restart.phases:
        phase, after = restart.phases[-1]
        steps = ", ".join(f"{name} {duration(s)}" for name, s in restart.phases[:-1])
        at = None if restart.at_s is None else restart.at_s + after
        rows.append((f"{phase} after", duration(after), steps, at))
    rows += _column("replaced", [_replacement(each) for each in restart.replaced])
    rows += _column("not replaced", [_clean(each) for each in restart.not_replaced])
    rows += _column("state", [_sent_state(each) for each in restart.states])
    if restart.lost_count:
        ranks = ", ".join(map(str, restart.lost))
        more = restart.lost_count - len(restart.lost)
        also = f" and {more} more" if more > 0 else ""
        left = f"; {restart.world_size} continue" if restart.world_size is not None else ""
        plural = "s" if restart.lost_count > 1 else ""
        rows.append(("without", f"rank{plural} {ranks}{also}{left}", ""))
    heading = f"  in-process restart (iteration {restart.iteration}{of}): {what}"
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
        return f"rank {of.rank}: {_clean(of.origin or 'the agent of its host has the details')}"
    at = f" after step {of.last_step}" if of.last_step is not None else ""
    start = source_text(of.source)
    after = f" {duration(of.started_after_s)} later" if of.started_after_s is not None else ""
    left = f"; {_count(of.restarts_left, 'restart')} left" if of.restarts_left is not None else ""
    return (
        f"rank {of.rank}: pid {of.ended_pid} ended {_clean(of.how)}{at}; pid {of.pid} started "
        f"{start}{after}{left}"
    )


def _expired(expiry: Expiry) -> str:
    if expiry.heartbeat and expiry.after_s is not None:
        return f"no heartbeat for {duration(expiry.after_s + (expiry.over_s or 0.0))}"
    of = f" of {expiry.after_s:.10g} s" if expiry.after_s is not None else ""
    by = f" by {duration(expiry.over_s)}" if expiry.over_s is not None else ""
    return f"timer {_clean(short_scope(expiry.scope))}{of} was exceeded{by}"


def _place_rows(compared: Sequence[str]) -> list[Row]:
    places = [_clean(line) for line in compared[:_MOST_PLACES]]
    more = len(compared) - len(places)
    return _column("compared", [*places, f"... {more} more places"] if more else places)


def _hang_rows(of: Expiry | StalledProgress, compared: Sequence[str]) -> list[Row]:
    stood, stacks = _clean(of.stood), _clean(of.stacks or "")
    return [("location", stood, ""), *_place_rows(compared), ("stacks", stacks, "")]


def _suspension(suspension: Suspension) -> Line:
    who = _worker(suspension.rank, suspension.host, suspension.pid)
    held = suspension.duration_s
    end = "and not resumed" if held is None else f"for {duration(held)}"
    what = f"was paused by {_clean(suspension.signal)} {end} (attempt {suspension.attempt})"
    return suspension.at_s, f"  {who} {what}"


def _worker(rank: int | None, host: str | None, pid: int | None) -> str:
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
    # Further rows are aligned with the value; sentences get a deeper indent than their first line.
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
