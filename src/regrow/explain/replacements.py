"""Processes that took the places of workers that had ended, and explanations of those too late."""

from __future__ import annotations

from collections.abc import Iterator

from regrow._accounts import PENDING
from regrow.events import Expiry, Replacement
from regrow.events.evidence import (
    Record,
    cause_of,
    describe_failure,
    expiry,
    integer,
    integers,
    real,
    signal_name,
    text,
)
from regrow.events.in_process import NEAR_S, TIMER_OF, by_fields, replacement, timer_of
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
    taken: dict[tuple[int | None, int], float] = {}  # the last restart with a new process
    for event in scene.named("inprocess.restarted"):
        for replaced in integers(event, "replaced"):
            taken[integer(event, "attempt"), replaced] = real(event, "monotonic") or 0.0
    failed = {failure.attempt: failure.at_s for failure in scene.story.failures}
    vacated: dict[tuple[int | None, ...], list[Record]] = {
        (integer(event, "attempt"), integer(event, "rank"), integer(event, "incarnation")): [event]
        for event in scene.named("worker.vacated")
    }
    for event in scene.named("worker.replaced"):
        attempt, rank = integer(event, "attempt"), integer(event, "rank")
        before = (integer(event, "incarnation") or 0) - 1
        if attempt is None or rank is None or (attempt, rank, before) not in vacated:
            continue
        (ended,) = vacated[attempt, rank, before]
        begin, over = real(ended, "ended_monotonic"), failed.get(attempt)
        waits = (real(event, "monotonic") or 0.0) > taken.get((attempt, rank), -1.0)
        # Not all restarts are in the logs of each host, but this one ended after the restart began.
        if waits and begin is not None and over is not None and begin <= over < begin + NEAR_S:
            yield _cut_short(scene, attempt, replacement(event, vacated), ended, begin, over)


def _cut_short(
    scene: Scene, attempt: int, new: Replacement, ended: Record, begin: float, over: float
) -> Explanation:
    host, pid, end = text(ended, "host"), integer(ended, "pid"), _as_a_failure(ended)
    expired = timer_of(ended, by_fields(TIMER_OF, scene.named("timer.expired", attempt)))
    timer = expiry(expired) if expired else None
    did = describe_failure(end) if timer is None else what_hung_did(scene, timer)
    size = scene.world_size(attempt)
    step, log_file = integer(ended, "last_step"), scene.log_file(new.rank, attempt)
    facts = [*facts_of_end(ended, timer)]
    facts += [Fact("last step", last_step_before(ended, begin))] if step is not None else []
    facts += [Fact("log file", log_file)] if log_file else []
    left = new.restarts_left
    rest = "" if left is None else f"; {left or 'none'} left"
    return Explanation(
        attempt=attempt,
        title=f"{worker(new.rank, host, pid)} {did}",
        cause=cause_of(end, timer),
        rung=None,
        outcome="rung 2 (one new process) was tried, but the attempt failed before the new"
        " process had joined the other ranks: see the next failure",
        rank=new.rank,
        host=host,
        pid=pid,
        at_s=begin,
        injected=text(ended, "injected"),
        evidence=tuple(facts),
        action=(how_replaced(new), f"it spent 1 restart of --max-restarts{rest}"),
        refusals=(ladder.process_ended(new.rank),),
        timeline=(Phase("barrier", 0.0, over - begin, WAITED),),
        cost=Cost(
            seconds=over - begin,
            steps=0,
            redone_s=0.0,
            worker_seconds=None if size is None else (over - begin) * size,
            workers=size,
            all_workers=size,
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
    name = signal_name(_as_a_failure(ended))
    if timer is not None:
        yield Fact("where it was", timer.stood)
        yield ended_for(timer, name or "a signal")
        if timer.stacks:
            yield Fact("all stacks", timer.stacks)
        return
    yield Fact("exit", f"killed by {name}" if name else f"exit code {integer(ended, 'exitcode')}")
    if name in FROM_OUTSIDE:
        yield Fact("sent by", FROM_OUTSIDE[name])


def _as_a_failure(ended: Record) -> Record:
    return {"exit_code": integer(ended, "exitcode")}


_SOURCES = {
    "exec": "a cold start",
    "template": "a fork of the template (--preload)",
    "standby": "a standby process (--standby)",
}


def how_replaced(each: Replacement) -> str:
    """Return how a new process was started for a rank, in one line."""
    if each.pid is None:
        return f"rank {each.rank} got a new process: {each.origin or 'on another host'}"
    how = _SOURCES.get(each.source, each.source)
    after = f", {relative(each.started_after_s, 0.0, 'the end')}" if each.started_after_s else ""
    return f"rank {each.rank} got a new process, pid {each.pid}, by {how}{after}"
