"""A story as text for the person on call: short, aligned, plain ASCII.

Texts from the job (messages, host names, paths) are cut to a readable length. Characters that
are not printable ASCII are escaped, because a worker's message may contain anything, also the
control codes of a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.events.evidence import describe_node, short_scope
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

__all__ = ["duration", "render"]

Row = tuple[str, str, str]
"""Label, value, and a note in parentheses; a row without a value is not shown."""

_MOST_OTHERS = 4
_MOST_LOST = 16
_MOST_OF_A_KIND = 8  # most entries of suspensions, timers and stalls
_MOST_FAILURES = 20
_MOST_PLACES = 8  # most places of workers in a comparison of stacks
_MOST_RANKS = 32
_LATE = "an unknown delay: the guardian, which watches the workers, was suspended"
_LONGEST = 300  # most characters of a text from the job


def render(story: Story, width: int) -> str:
    """Render the story in lines of at most `width` characters, where words and paths allow."""
    failures = [_failure(story, number, f) for number, f in enumerate(story.failures, 1)]
    restarts = [_in_process_restart(restart) for restart in story.in_place]
    blocks = [
        [_headline(story)],
        *_ends_of(failures, "failures"),
        *(_planned_restart(story, move) for move in story.moves),
        *_first_of([[_suspension(each)] for each in story.suspensions], "suspensions"),
        *_first_of([_expiry(each) for each in story.expiries], "expired timers"),
        *([_server_end(end)] for end in story.server_ends),
        *([_moved(story.servers)] if len(story.servers) > 1 else []),
        *_ends_of(restarts, "in-process restarts"),
        *_first_of([_stall(each) for each in story.stalls], "stalls"),
        *([f"  {_clean(line)}"] for line in story.helpers),
    ]
    if story.events_lost:
        blocks.append([f"  {_count(story.events_lost, 'event')} could not be written to the log"])
    return "\n".join(
        wrapped for block in blocks for line in block for wrapped in _wrap(line, width)
    )


def _first_of(blocks: list[list[str]], what: str) -> list[list[str]]:
    """Return the first blocks, and a line with the number of further blocks."""
    more = len(blocks) - _MOST_OF_A_KIND
    return blocks if more <= 0 else [*blocks[:_MOST_OF_A_KIND], [f"  ... {more} more {what}"]]


def _ends_of(blocks: list[list[str]], what: str) -> list[list[str]]:
    """Return the first and last blocks; in a crash loop these show enough."""
    skipped, half = len(blocks) - _MOST_FAILURES, _MOST_FAILURES // 2
    if skipped <= 0:
        return blocks
    return [*blocks[:half], [f"  ... {skipped} more {what} ..."], *blocks[-half:]]


def duration(seconds: float) -> str:
    """Format seconds with three significant digits, in a readable unit."""
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
            "the launcher's end is not recorded: it was killed, still runs, or its disk was full"
        )
    if story.state == "SIGNALED":
        return f"was stopped by {_clean(story.signal or 'a signal')}{after}{restarts}"
    if story.state == "ERROR":
        return f"ended with an ERROR{code}{after}{restarts}{reason}"
    if story.state == "SUCCEEDED" or story.failures:
        reason = ""  # the lines below report it, or there is no reason
    return f"{_clean(story.state)}{code}{after}{restarts}{reason}"


def _moved(servers: tuple[str, ...]) -> list[str]:
    first, *later = map(_clean, servers)
    return [f"  the rendezvous was served by {first}, then by {', '.join(later)}"]


def _server_end(end: ServerEnd) -> str:
    where = f" on host {_clean(end.host)}" if end.host else ""
    what = f"  the store server{where} (pid {end.pid}) {_clean(end.how)}"
    if end.restarted_after_s is None:
        return f"{what}, and no other one took over: {_clean(end.reason or 'unknown')}"
    return f"{what}; another one took over after {duration(end.restarted_after_s)}"


def _failure(story: Story, number: int, failure: Failure) -> list[str]:
    who = _worker(failure.rank, failure.host, failure.pid)
    if failure.rank is None and failure.pid is None:
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
        heading.replace(":  ", ": "),
        *_lines(
            [
                *_column("also lost", _lost_nodes(failure)),
                *hang,
                ("error file", _clean(failure.error_file or ""), ""),
                ("detected after", _detected(failure), ""),
                _restart_row(story, failure),
                _step_row(story, failure),
                _work_row(story, failure),
                *_column("then also", _others(failure)),
                _also_hung_row(failure),
            ]
        ),
    ]


def _planned_restart(story: Story, restart: PlannedRestart) -> list[str]:
    reason = _clean(restart.reason)
    heading = f"  attempt {restart.attempt} was stopped without a failure: {reason}"
    rows = [_restarted_row(restart), _step_row(story, restart), _work_row(story, restart)]
    return [heading, *_lines(rows)]


def _lines(rows: Iterable[Row]) -> list[str]:
    """Return a line for each row that has a value."""
    return [
        f"    {label:<17}" + (f"{value:<10} ({note})" if note else value)
        for label, value, note in rows
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
    return "restarted after", _seconds(cost.restarted_after_s) or "unknown", note


def _step_row(story: Story, cost: RestartCost) -> Row:
    step = cost.first_step
    if step is None:
        expected = cost.restarted_attempt is not None and story.reports_steps
        return "first step after", "unknown: none is recorded" if expected else "", ""
    rank = f"rank {step.rank}, " if step.rank is not None else ""
    note = f"{rank}step {step.step}"
    if step.attempt != cost.restarted_attempt:
        note += f", attempt {step.attempt}"
    return "first step after", _seconds(cost.first_step_after_s) or "unknown", note


def _work_row(story: Story, cost: RestartCost) -> Row:
    label = "work lost"
    if not story.reports_steps:
        restarted = cost.restarted_attempt is not None
        return label, "unknown: the script does not call regrow.step" if restarted else "", ""
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
    shown = [_other(other) for other in failure.others[:_MOST_OTHERS]]
    more = len(failure.others) - len(shown)
    total = len(failure.others) + 1
    return [*shown, f"and {more} more of {total} failed workers"] if more else shown


def _also_hung_row(failure: Failure) -> Row:
    ranks = sorted({each.rank for each in failure.hung_too if each.rank is not None})
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return "also hung", f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}" if ranks else "", ""


def _other(other: OtherFailure) -> str:
    after = f", {duration(other.after_s)} later" if other.after_s is not None else ""
    return f"{_worker(other.rank, other.host, other.pid)} {_clean(other.what)}{after}"


def _expiry(expiry: Expiry) -> list[str]:
    who = _worker(expiry.rank, expiry.host, expiry.pid)
    if expiry.helper:
        who = f"a process that {_worker(expiry.rank, expiry.host, None)} had started"
        who += f" (pid {expiry.pid})"
    end = f"so it was sent {_clean(expiry.signal)}" if expiry.signal else "which is only reported"
    heading = f"  {who}: {_expired(expiry)}, {end} (attempt {expiry.attempt})"
    return [heading, *_lines(_hang_rows(expiry, expiry.compared))]


def _stall(stall: StalledProgress) -> list[str]:
    who = _worker(stall.rank, stall.host, stall.pid)
    heading = f"  {who} stalled: {_clean(stall.what)} (attempt {stall.attempt})"
    return [heading, *_lines(_hang_rows(stall, ()))]


def _in_process_restart(restart: InProcessRestart) -> list[str]:
    who = f"rank {restart.rank}: " if restart.rank is not None else ""
    of = f" of attempt {restart.attempt}" if restart.attempt else ""
    what = f"{who}{_clean(restart.what)}"
    rows: list[Row] = []
    if restart.phases:
        phase, after = restart.phases[-1]
        steps = ", ".join(f"{name} {duration(s)}" for name, s in restart.phases[:-1])
        rows.append((f"{phase} after", duration(after), steps))
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
    return [f"  in-process restart (iteration {restart.iteration}{of}): {what}", *_lines(rows)]


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


def _suspension(suspension: Suspension) -> str:
    who = _worker(suspension.rank, suspension.host, suspension.pid)
    held = suspension.duration_s
    end = "and not resumed" if held is None else f"for {duration(held)}"
    return (
        f"  {who} was suspended by {_clean(suspension.signal)} {end} (attempt {suspension.attempt})"
    )


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
