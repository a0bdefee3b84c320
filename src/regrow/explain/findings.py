"""What failed first in an attempt, since when, and the evidence for it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from regrow.events import Expiry, Failure, InProcessRestart
from regrow.events.evidence import (
    Record,
    integer,
    one_line,
    real,
    short_scope,
    stopped_with,
    text,
    without_answer,
)
from regrow.events.silences import without_heartbeat_s
from regrow.explain.explanation import Fact
from regrow.explain.peers import last_step_of, moment_of, noticed, phase_of
from regrow.explain.scene import Scene, agent_of
from regrow.explain.words import (
    FROM_OUTSIDE,
    count,
    many_ranks,
    not_given,
    relative,
    seconds,
    worker,
)
from regrow.utils import shortened

DECIDING = "the agents decided which ranks stop"
"""What happens from a request to stop at one step until the agents agree that it fails."""


def event_of(scene: Scene, failure: Failure) -> Record:
    """Return the event of the failed worker; an empty one if no worker failed first."""
    same = [
        event
        for event in scene.named("worker.failed", failure.attempt)
        if (integer(event, "rank"), text(event, "host"), integer(event, "pid"))
        == (failure.rank, failure.host, failure.pid)
    ]
    return same[0] if same and failure.pid is not None else {}


def title_of(scene: Scene, failure: Failure) -> str:
    """Return what failed first, in one line."""
    if failure.is_host_lost:
        return failure.what
    who = worker(failure.rank, failure.host, failure.pid)
    if failure.rank is None and failure.pid is None:
        who = f"host {failure.host}:" if failure.host else "the attempt:"
    if failure.timer is not None:
        gave_up = "; the wrapper gave up" if failure.gave_up is not None else ""
        return f"{who} {what_hung_did(failure.timer)}{gave_up}"
    return f"{who} {failure.what}"


def what_hung_did(timer: Expiry) -> str:
    """Return what a worker did whose timer expired, as a predicate."""
    did = f"was paused by {timer.paused_by}" if timer.paused_by else "hung"
    if timer.heartbeat:
        silent = (timer.after_s or 0.0) + (timer.over_s or 0.0)
        return f"{did}: no heartbeat for {seconds(silent)}"
    return f"{did}: it exceeded its timer {short_scope(timer.scope)!r} of {seconds(timer.after_s)}"


def ended_for(timer: Expiry, signal: str) -> Fact:
    """Return the end of a process by a signal that regrow sent, because its timer expired."""
    why = "it sent no heartbeat" if timer.heartbeat else "its timer expired"
    return Fact("exit", f"regrow ended it with {signal}, because {why}")


def evidence_of(
    scene: Scene, failure: Failure, event: Record, begin: float | None
) -> Iterator[Fact]:
    """Yield what shows the cause, the most important first.

    Args:
        scene: the run.
        failure: the failure.
        event: the event of the failed worker.
        begin: when it began.
    """
    timer = failure.timer
    since = moment_of(failure)
    if timer is not None:
        yield Fact("where it was", timer.stood)
    yield from of_suspension(scene, failure, event)
    if injected := text(event, "injected"):
        yield Fact("injected", f"by --chaos: {injected}")
    if timer is not None and failure.signal is not None:
        yield ended_for(timer, failure.signal)
    elif stopped := stopped_with(event):
        yield Fact("exit", f"regrow stopped it with {stopped}, after its exception")
    elif failure.signal is not None:
        yield Fact("exit", f"killed by {failure.signal}")
    elif failure.exit_code is not None:
        yield Fact("exit", f"exit code {failure.exit_code}")
    yield from _message(scene, event, failure)
    step, at = last_step_of(scene, failure.attempt, failure.rank)
    if step is not None:
        yield Fact("last step", f"step {step}, {relative(at, begin, since)}".rstrip(", "))
    elif failure.pid is not None and scene.story.reports_steps:
        unknown = not_given(failure.host)
        none = "none: the process failed before its first step"
        yield Fact("last step", unknown if failure.elsewhere else none)
    if phase := phase_of(scene, failure.attempt, failure.rank):
        yield Fact("was in", f"phase {phase}")
    if timer is not None and timer.stacks:
        yield Fact("all stacks", timer.stacks)
    yield from _of_predecessor(scene, event, begin)
    if failure.error_file:
        where = f" on host {failure.host}" if scene.has_several_hosts else ""
        yield Fact("error file", f"{failure.error_file}{where}")
    if log_file := scene.log_file(failure.rank, failure.attempt):
        yield Fact("log file", log_file)
    if failure.elsewhere and not failure.is_host_lost:
        told = "this log has only the report of the failure, and all times count from it"
        yield Fact("seen from", f"another host: {told}")
    if failure.noticed_late:
        yield Fact("noticed late", "the guardian of the workers was paused; the time is unknown")
    for node in failure.lost_nodes:
        yield Fact("also lost", f"host {node.host}: {node.why}")
    if failure.is_host_lost:
        yield from _of_node(scene, failure)
    again = _same_before(scene, failure)
    if again:
        yield Fact("seen before", f"the same failure ended attempt{again}")


def _message(scene: Scene, event: Record, failure: Failure) -> Iterator[Fact]:
    traceback = text(event, "traceback")
    if traceback is not None and failure.timer is not None:
        lines = traceback.splitlines()[1:]
        ends = [n for n, line in enumerate(lines) if line.startswith(("Stacks of", "Workers of"))]
        stack = lines[: min(ends, default=len(lines))]
        if stack:
            yield Fact("stack", "", shortened("\n".join(stack)))
    elif traceback is not None:
        shown = shortened(traceback)
        if failure.gave_up is not None:
            shown = tuple(line for line in shown if not _ENDED.match(line))
        yield Fact("traceback", "", shown)
    elif not (text(event, "message") or "<N/A>").startswith(("<N/A>", "Signal ", "exit")):
        yield Fact("message", one_line(text(event, "message") or ""))
    elif failure.cause == "node":
        yield from lease_over(scene, failure.attempt)
    elif failure.signal in FROM_OUTSIDE:
        yield Fact("sent by", FROM_OUTSIDE[failure.signal])
    elif failure.exit_code:
        where = "its output" if scene.log_file(failure.rank, failure.attempt) else "the output"
        yield Fact("exception", f"none is recorded, nor a known message of a crash: see {where}")


_ENDED = re.compile(r"iteration \d+ ended by ")
"""The start of a note that names a rank which only followed when a wrapper gave up."""


def of_suspension(
    scene: Scene, failure: Failure | InProcessRestart, event: Record
) -> Iterator[Fact]:
    """Yield which signal kept a failed process suspended, and where it may have come from."""
    stopped, timer = suspension_of(scene, failure), failure.timer
    if not stopped:
        return
    signal, at = text(stopped, "signal") or "?", real(stopped, "monotonic")
    when = [f"by {signal}", relative(at, failure.at_s, "it was given up")]
    if timer is not None and timer.heartbeat and failure.at_s is not None:
        last = None if timer.after_s is None else failure.at_s - timer.after_s
        when.append(relative(at, last, "its last heartbeat"))
    yield Fact("paused", ", ".join(filter(None, when)))
    if timer is not None and signal in FROM_OUTSIDE and not text(event, "injected"):
        yield Fact("sent by", FROM_OUTSIDE[signal])


def _of_predecessor(scene: Scene, event: Record, begin: float | None) -> Iterator[Fact]:
    """Yield how the process ended whose place the failed one had taken."""
    before = (integer(event, "incarnation") or 0) - 1
    for ended in scene.named("worker.vacated", integer(event, "attempt")):
        same = integer(ended, "rank") == integer(event, "rank")
        if before >= 0 and same and integer(ended, "incarnation") == before:
            when = relative(real(ended, "ended_monotonic"), begin)
            how = f"pid {integer(ended, 'pid')}, which ended {text(ended, 'how') or '?'} {when}"
            yield Fact("it replaced", f"{how}; that spent a restart, too")


def _of_node(scene: Scene, failure: Failure) -> Iterator[Fact]:
    agent = scene.lost_agent(failure.attempt)
    names = ("round.ended", "round.judged")
    overs = [event for name in names for event in scene.named(name, failure.attempt)]
    told = ", ".join(sorted({f"host {text(event, 'host') or '?'}" for event in overs}))
    yield Fact("reported by", f"the rendezvous, to {told}" if told else "unknown")
    server = scene.new_server(failure.attempt, failure.restarted_attempt)
    if server is not None and failure.at_s is not None and server.at < failure.at_s:
        silence = without_heartbeat_s(failure.what) or 0.0
        since = relative(failure.at_s - silence, server.at, "its takeover")
        counts = f"counts the {seconds(silence)} from {since}"
        yield Fact("counted", f"the new server on host {server.host} {counts}")
    what, has_left = noticed(scene, failure), failure.has_left
    if has_left and _SIGNALED.search(failure.what) is not None:
        yield Fact("sent by", "unknown: a person, a script or a scheduler")
    if not has_left:
        own = [event for event in scene.events if agent_of(event) == agent]
        yield from last_event_of(own, failure.at_s, what)
    if ranks := scene.ranks_of(agent, failure.attempt):
        yield Fact("left with it" if has_left else "lost with it", many_ranks(ranks))
    found = (last_step_of(scene, failure.attempt, rank) for rank in ranks)
    steps = [(step, at) for step, at in found if step is not None and at is not None]
    if steps:
        step, at = max(steps)
        yield Fact("last step", f"step {step}, {relative(at, failure.at_s, what)}")
    elif ranks and not has_left and scene.story.reports_steps:
        yield Fact("last step", "unknown: the log of the host ends before")
    for event in scene.of_agent(agent, "attempt.ended", failure.attempt):
        when = relative(real(event, "monotonic"), failure.at_s, what)
        yield Fact("its workers", f"had ended {when}")
    for event in scene.of_agent(agent, "job.finished"):
        if (code := integer(event, "exit_code")) is not None:
            yield Fact("exit", f"exit code {code} of its agent")
    yield from lease_over(scene, failure.attempt)


_SIGNALED = re.compile(r"\bits agent got SIG[A-Z0-9]+$")


def last_event_of(own: Sequence[Record], at: float | None, what: str) -> Iterator[Fact]:
    """Yield when a host wrote the last of its events before `at`, which is the time of `what`."""
    before = [event for event in own if at is None or _time(event) <= at]
    if before:
        ends = "" if len(own) > len(before) else "; the log ends there"
        when = relative(_time(before[-1]), at, what)
        yield Fact("last event", f"in the log of host {text(own[0], 'host')}: {when}{ends}")


def lease_over(scene: Scene, attempt: int) -> Iterator[Fact]:
    """Yield on which hosts the guardian killed the workers, because their lease had ended."""
    for event in scene.named("lease.over", attempt):
        host, workers = text(event, "host"), integer(event, "workers")
        ranks = scene.ranks_of(agent_of(event), attempt)
        killed = many_ranks(ranks) if len(ranks) == workers else count(workers, "worker")
        pids = [
            integer(e, "pid") for e in scene.of_agent(agent_of(event), "worker.failed", attempt)
        ]
        if len(ranks) == workers == len(pids) == 1:
            killed += f" (pid {pids[0]})"
        yield Fact("lease over", f"{without_answer(host)}, and its guardian killed {killed}")


def _same_before(scene: Scene, failure: Failure) -> str:
    same = list(map(str, scene.failed_before(failure.what, failure.attempt)))
    if not same:
        return ""
    return f" {same[0]}" if len(same) == 1 else f"s {', '.join(same)}"


def begin_of(failure: Failure) -> float | None:
    """Return when it began: the last sign of life of a worker that hung, or of a silent host.

    For a host that left with notice, when its agent got the signal.
    """
    return None if failure.at_s is None else failure.at_s - failure.silent_s


def suspension_of(scene: Scene, failure: Failure | InProcessRestart) -> Record:
    """Return the event of the signal that kept the failed process suspended; empty: none did."""
    own = [
        event
        for name in ("worker.suspended", "worker.resumed")
        for event in scene.named(name, failure.attempt)
        if (text(event, "host"), integer(event, "pid")) == (failure.host, failure.pid)
    ]
    before = [each for each in own if _time(each) <= (failure.at_s or math.inf)]
    last = max(before, key=_time, default={})
    return last if text(last, "name") == "regrow.worker.suspended" else {}


def _time(event: Record) -> float:
    return real(event, "monotonic") or 0.0
