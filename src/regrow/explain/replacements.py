"""Processes that took the places of workers that had ended, and explanations of those too late."""

from __future__ import annotations

from collections.abc import Iterator

from regrow._accounts import PENDING
from regrow.events import Expiry, InProcessRestart, Replacement
from regrow.events.evidence import (
    Record,
    integer,
    real,
    signal_name,
    text,
)
from regrow.explain import ladder
from regrow.explain.explanation import Cost, Explanation, Fact, Phase
from regrow.explain.findings import ended_for, what_hung_did
from regrow.explain.scene import Scene
from regrow.explain.words import FROM_OUTSIDE, relative, worker

WAITED = "the ranks waited for the new process"


def explain_cut_short(scene: Scene) -> Iterator[Explanation]:
    """Yield an explanation of each end of a worker whose place no process took in time.

    Its attempt ended while the other ranks waited for the new process, so no restart followed.
    """
    for restart in scene.story.cut_short:
        ends = (
            event
            for event in scene.named("worker.vacated", restart.attempt)
            if integer(event, "rank") == restart.rank and integer(event, "pid") == restart.pid
        )
        yield _cut_short(scene, restart, next(ends, {}))


def _cut_short(scene: Scene, restart: InProcessRestart, ended: Record) -> Explanation:
    attempt, begin, timer = restart.attempt, restart.at_s or 0.0, restart.timer
    (new,), ((_, waited),) = restart.replaced, restart.phases
    did = restart.did if timer is None else what_hung_did(timer)
    size = scene.world_size(attempt)
    step, log_file = integer(ended, "last_step"), scene.log_file(new.rank, attempt)
    facts = [*facts_of_end(ended, timer)]
    facts += [Fact("last step", last_step_before(ended, begin))] if step is not None else []
    facts += [Fact("log file", log_file)] if log_file else []
    left = new.restarts_left
    rest = "" if left is None else f"; {left or 'none'} left"
    return Explanation(
        attempt=attempt,
        title=f"{worker(new.rank, restart.host, restart.pid)} {did}",
        cause=restart.cause,
        rung=None,
        outcome="rung 2 (one new process) was tried, but the attempt failed before the new"
        " process had joined the other ranks: see the next failure",
        rank=new.rank,
        host=restart.host,
        pid=restart.pid,
        at_s=begin,
        injected=text(ended, "injected"),
        evidence=tuple(facts),
        action=(how_replaced(new), f"it spent 1 restart of --max-restarts{rest}"),
        refusals=(ladder.process_ended(new.rank),),
        timeline=(Phase("barrier", 0.0, waited, WAITED),),
        cost=Cost(
            seconds=waited,
            steps=0,
            redone_s=0.0,
            worker_seconds=None if size is None else waited * size,
            workers=size,
            all_workers=size,
            has_unfinished_steps=step is None,
            restarts=1,
            restarts_left=left,
        ),
    )


def last_step_before(ended: Record, begin: float | None, what: str = "the failure") -> str:
    """Return the last step of a process that ended, and how long that was before `what`."""
    account = ended.get("account")
    is_step = isinstance(account, dict) and account.get("open") == PENDING
    at = real(account, "since_monotonic") if isinstance(account, dict) and is_step else None
    when = relative(at, begin, what)
    return ", ".join(filter(None, [f"step {integer(ended, 'last_step')}", when]))


def facts_of_end(ended: Record, timer: Expiry | None) -> Iterator[Fact]:
    """Yield how a process ended, and where its signal came from, or may have come from.

    Args:
        ended: the event of its end.
        timer: the timer that made regrow end it.
    """
    name = signal_name({"exit_code": integer(ended, "exitcode")})
    if timer is not None:
        yield Fact("where it was", timer.stood)
        yield ended_for(timer, name or "a signal")
        if timer.stacks:
            yield Fact("all stacks", timer.stacks)
        return
    yield Fact("exit", f"killed by {name}" if name else f"exit code {integer(ended, 'exitcode')}")
    if name in FROM_OUTSIDE:
        yield Fact("sent by", FROM_OUTSIDE[name])


_SOURCES = {
    "exec": "a cold start",
    "template": "a fork of the template (--preload)",
}


def how_replaced(each: Replacement) -> str:
    """Return how a new process was started for a rank, in one line."""
    if each.pid is None:
        return f"rank {each.rank} got a new process: {each.origin or 'on another host'}"
    end = f"the end of pid {each.ended_pid}"
    after = f", {relative(each.started_after_s, 0.0, end)}" if each.started_after_s else ""
    if each.source == "standby":
        stood_by = f"pid {each.pid}, a standby process (--standby)"
        return f"{stood_by}, took the place of rank {each.rank}{after}"
    how = _SOURCES.get(each.source, each.source)
    return f"rank {each.rank} got a new process, pid {each.pid}, by {how}{after}"
