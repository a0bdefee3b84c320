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
from dataclasses import replace
from typing import TYPE_CHECKING

from regrow.events.evidence import describe_failure
from regrow.events.log import NO_ID
from regrow.events.story_incidents import (
    Block,
    clean,
    count,
    duration,
    expired_timer,
    failed,
    in_process_restart,
    paused,
    planned_restart,
    server_end,
    stalled,
)
from regrow.utils import time_stamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regrow.events.story_types import InProcessRestart, Losses, Story

__all__ = ["after_report", "render"]

_MOST_OF_A_KIND = 8  # most entries of pauses, timers and stalls
_MOST_FAILURES = 20


def render(story: Story, width: int, *, is_running: bool = False) -> str:
    """Render the story in lines of at most `width` characters, where words and paths allow.

    Args:
        story: the story.
        width: in characters.
        is_running: whether the job is known to run.
    """
    failures = [failed(story, number, failure) for number, failure in story.numbered]
    restarts = [in_process_restart(each) for each in (*story.in_place, *story.cut_short)]
    incidents = [
        *_ends_of(failures, "failures"),
        *(planned_restart(story, move) for move in story.moves),
        *_first_of([[paused(each)] for each in story.suspensions], "pauses"),
        *_first_of([expired_timer(each) for each in story.expiries], "expired timers"),
        *([server_end(end)] for end in story.server_ends),
        *_ends_of(restarts, "in-process restarts"),
        *_first_of([stalled(each) for each in story.stalls], "stalls"),
    ]
    incidents.sort(key=lambda block: math.inf if block[0][0] is None else block[0][0])
    end = story.duration_s
    last: Block = [(end, f"  {line}") for line in _summary(story)]
    blocks = [[(end, _headline(story, is_running=is_running))], *incidents, last]
    return "\n".join(_stamped(blocks, story, width))


def after_report(story: Story, rank: int, pid: int) -> Story:
    """Return the story for a reader who has just read the report of the job's last failure.

    The report contains the traceback and the path of the error file, so this story omits both.

    Args:
        story: the story of a job that failed.
        rank: global rank of the worker that the report names as the root cause.
        pid: process id of that worker.
    """
    if not story.failures:
        return story
    *earlier, last = story.failures
    is_known_better = last.timer is not None or last.cause == "node"
    if (last.rank, last.pid) != (rank, pid) or is_known_better:
        return story
    how = describe_failure({"exit_code": last.exit_code, "signal": last.signal})
    if last.cause == "exception" and last.signal:  # the agent stopped it after its exception
        how = "raised its exception"
    last = replace(last, what=f"{how} (reported above)", error_file=None)
    return replace(story, failures=(*earlier, last))


def _summary(story: Story) -> list[str]:
    """Return the lines about the whole job, for the end of the story."""
    lines = [clean(line) for line in story.helpers]
    if len(story.servers) > 1:
        names = {address: f"host {name}" for name, address in story.addresses}
        first, *later = (clean(names.get(server, server)) for server in story.servers)
        lines.append(f"the rendezvous was served by {first}, then by {', '.join(later)}")
    if story.losses is not None:
        lines.append(_lost(story.losses, story.duration_s))
    if story.events_lost:
        lines.append(f"{count(story.events_lost, 'event')} could not be written to the log")
    return lines


def _lost(losses: Losses, of: float | None) -> str:
    parts = [
        ("detecting", losses.detecting_s),
        ("pausing before restarts", losses.pausing_s),
        ("stopping", losses.stopping_s),
        ("starting", losses.starting_s),
        ("searching for the other hosts", losses.searching_s),
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
        named = _HOST.sub(lambda match: _with_address(match, unnamed), text)
        first, *more = _wrap(named, width - len(begin))
        found += [begin + first, *(" " * len(begin) + line for line in more)]
    return found


_HOST = re.compile(r"\bhost ([^\s:;,()]++)( \(([^,)]*))?")
"""A host, and the first item of what follows in brackets."""


def _with_address(named: re.Match[str], unnamed: dict[str, str]) -> str:
    address, (name, brackets, item) = "", named.groups()
    address = unnamed.pop(name, "")
    if address in ("", item):
        return named[0]
    return f"host {name} ({clean(address)}" + (f", {item}" if brackets else ")")


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


def _headline(story: Story, *, is_running: bool) -> str:
    about = [clean(story.script)] if story.script else []
    if story.workers:
        on = f" on {_sizes(story.nodes, 'node')}" if story.nodes else ""
        about.append(_sizes(story.workers, "worker") + on)
    id = story.run_id or "?"
    named = "" if id == NO_ID and about else f" {clean(id)}"
    if about:
        named += f" ({', '.join(about)})"
    return f"regrow: job{named} {_outcome(story, is_running=is_running)}"


def _sizes(sizes: tuple[int, ...], noun: str) -> str:
    low, high = min(sizes), max(sizes)
    return count(high, noun) if low == high else f"{low} to {count(high, noun)}"


def _outcome(story: Story, *, is_running: bool) -> str:
    passed = duration(story.duration_s) if story.duration_s is not None else ""
    after = f" after {passed}" if passed else ""
    changes = story.membership_changes
    counts = [
        count(number, noun)
        for number, noun in (
            (max(story.restarts - changes, 0), "restart"),
            (sum(not each.replaced for each in story.in_place), "in-process restart"),
            (sum(map(_replaces, (*story.in_place, *story.cut_short))), "replacement"),
            (changes, "membership change"),
        )
        if number
    ]
    *most, last = counts or [""]
    restarts = f" with {' and '.join(filter(None, (', '.join(most), last)))}" if counts else ""
    reason = f": {clean(story.reason)}" if story.reason else ""
    code = f" (exit code {story.exit_code})" if story.exit_code else ""
    if story.state is None and is_running:
        return f"is running{restarts}"
    if story.state is None:
        step = f", at step {story.last_step} or later" if story.last_step is not None else ""
        last = f"last record {passed} after its start{step}; " if passed else ""
        return (
            f"is UNFINISHED{restarts}: {last}"
            "the agent's end is not recorded: it was killed, still runs, or its disk was full"
        )
    if story.state == "SIGNALED":
        by = story.asked_by or story.signal or "a signal"
        step = f" at step {story.last_step}" if story.last_step is not None else ""
        return f"was stopped by {clean(by)}{after}{restarts}{step}"
    if story.state == "ERROR":
        return f"ended with an ERROR{code}{after}{restarts}{reason}"
    if story.state == "SUCCEEDED" or story.failures:
        reason = ""  # the lines below report it, or there is no reason
    is_stop = story.state == "STOPPED" and story.common_step is not None
    step = f" at step {story.common_step}" if is_stop else ""
    return f"{clean(story.state)}{code}{after}{restarts}{step}{reason}"


def _replaces(restart: InProcessRestart) -> bool:
    return bool(restart.replaced)


def _wrap(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip())
    is_one_word = indent == 4 and " " not in line[21:]  # a path, after its label
    if len(line) <= width or is_one_word:
        return [line]
    import textwrap

    # Further rows are aligned with the value; sentences get a deeper indent than their first line.
    further = " " * (21 if indent == 4 else indent + 4)
    if indent > 4:
        further = " " * indent
    rows = textwrap.wrap(
        _BEFORE_UNIT.sub("\xa0", line),
        max(width, len(further) + 20),
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace("\xa0", " ") for row in rows]


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h)\b)")
"""The space between a number and its unit of time, where no row ends."""
