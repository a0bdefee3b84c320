"""Explanations of ends without a failed worker: a signal, a lost rendezvous, a lost server."""

from __future__ import annotations

from collections.abc import Iterator

from regrow.events import Failure, ServerEnd
from regrow.events.evidence import Record, integer, real, text
from regrow.explain import long_settings
from regrow.explain.explanation import Cost, Explanation, Fact, Phase, Refusal
from regrow.explain.findings import DECIDING, begin_of, last_event_of, lease_over
from regrow.explain.peers import last_step_of, what_peers_did, what_ranks_did
from regrow.explain.scene import Scene
from regrow.explain.words import FROM_OUTSIDE, many_ranks, relative, seconds
from regrow.utils import name_hosts

_SHOWN_S = 0.0005
_CAUSES = {"SIGNALED": "stop", "STOPPED": "stop", "ERROR": "node"}
_LEASE_OVER = "the lease was over"
_LOST_INFRASTRUCTURE = 75  # the exit code after which a scheduler may start the job again


def explain_end(scene: Scene, lost: Failure | None) -> Iterator[Explanation]:
    """Yield the explanation of a run that a signal or an error ended; none for other ends.

    Args:
        scene: the run.
        lost: the loss of the other nodes that led to the error, if there is one.
    """
    story = scene.story
    if story.state not in ("SIGNALED", "STOPPED", "ERROR"):
        return
    finished = scene.named("job.finished")[-1]
    ended = real(finished, "monotonic") or scene.ends_s
    attempt = max(
        (integer(e, "attempt") or 0 for e in scene.named("attempt.started")), default=None
    )
    stopping = scene.first("job.stopping", attempt) or scene.first("stop.requested", attempt)
    asked = scene.stop_asked(attempt)
    at = min([ended, *(at for at in (real(stopping, "monotonic"), asked) if at is not None)])
    if lost is not None and lost.at_s is not None:
        at = begin_of(lost) or 0.0
    timeline = tuple(_timeline(scene, attempt, at, ended, None if lost is None else lost.at_s))
    spent = scene.lost_time(attempt or 0, None, at, unfinished=False)
    code = story.exit_code
    again = scene.requeued_after_s
    who = "the job" if lost is None else f"the agent of host {text(finished, 'host') or '?'}"
    outcome = f"{who} ended with exit code {code}" if code is not None else f"{who} ended"
    if again is not None:
        outcome += f"; the job was started again {seconds(again)} later"
    elif code == _LOST_INFRASTRUCTURE:
        outcome += " (the job may be started again)"
    yield Explanation(
        story_number=None if lost is None else story.numbered[-1][0],
        attempt=attempt,
        title=_title(scene, stopping),
        cause=_CAUSES.get(story.state, "unknown"),
        rung=None if again is None else 5,
        outcome=outcome,
        host=text(finished, "host"),
        at_s=at,
        noticed_s=None if lost is None else lost.at_s,
        noticed="" if lost is None or lost.is_host_lost else "its lease was over",
        evidence=tuple(_evidence(scene, stopping, attempt, lost)),
        peers=what_ranks_did(scene, attempt, at)
        if lost is None
        else what_peers_did(scene, lost, lost.at_s),
        action=tuple(_action(scene, stopping, attempt)),
        refusals=_refusals(scene),
        timeline=timeline,
        cost=Cost(
            seconds=timeline[-1].end_s if timeline else 0.0,
            steps=None,
            redone_s=None,
            worker_seconds=spent.total,
            workers=spent.workers,
            all_workers=spent.all_workers,
            buckets=spent.seconds,
            restarts=0,
            restarts_left=integer(finished, "restarts_left"),
        ),
        long=long_settings.of_stop(scene, attempt, timeline),
    )


def _timeline(
    scene: Scene, attempt: int | None, at: float, ended: float, lost_at: float | None
) -> Iterator[Phase]:
    marks = [
        ("deciding", _decided(scene, attempt), DECIDING),
        ("stopping", ended, _how(scene.story.state)),
    ]
    if lost_at is not None:
        marks = [
            ("silent", lost_at, "no new step; until the lease ended"),
            ("searching", ended, "the agent searched for the others"),
        ]
    now = at
    for name, until, meaning in marks:
        if until is not None and until - now >= _SHOWN_S:
            yield Phase(name, now - at, until - at, meaning)
            now = until
    if again := scene.requeued_after_s:
        yield Phase("scheduler", ended - at, ended - at + again, "until the next run of the job")


def _decided(scene: Scene, attempt: int | None) -> float | None:
    """Return when the agents agreed on the step at which all ranks stop, or that there is none."""
    found = scene.first("stop.failed", attempt) or scene.first("stop.decided", attempt)
    return real(found, "monotonic")


def _refusals(scene: Scene) -> tuple[Refusal, ...]:
    if scene.story.state != "ERROR" or not scene.named("rendezvous.lost"):
        return ()
    over = "a host without an answer from the rendezvous kills its workers"
    known = any((integer(e, "may_lose") or 0) > 0 for e in scene.named("rendezvous.servers"))
    needs = "" if known else "; that needs three hosts, or a witness (--rdzv-conf witness=DIR)"
    return (
        Refusal(1, over),
        Refusal(2, over),
        Refusal(3, "without a rendezvous no further round can be formed"),
        Refusal(4, f"no other host took over the rendezvous{needs}"),
    )


def _how(state: str | None) -> str:
    return "all ranks ended at one step" if state == "STOPPED" else "until all workers had ended"


def _title(scene: Scene, stopping: Record) -> str:
    story = scene.story
    if story.state == "SIGNALED" and story.asked_by:
        return f"{story.asked_by} asked the job to stop"
    if story.state == "SIGNALED":
        return f"the agent on host {text(stopping, 'host') or '?'} got {story.signal or 'a signal'}"
    if story.state == "STOPPED":
        return story.reason or "all ranks stopped at the same step"
    if lost := scene.first("rendezvous.lost"):
        hosts = sorted({text(event, "host") or "?" for event in scene.named("rendezvous.lost")})
        server = _server_host(scene)
        why = f": {text(lost, 'why')}" if server is None else f" (host {server} served it)"
        return f"{name_hosts(hosts, len(hosts))} could not reach the rendezvous any more{why}"
    return f"an error ended the job: {story.reason}"


def _server_host(scene: Scene) -> str | None:
    """Return the host that served the rendezvous last; None if that is not known."""
    return scene.host_at(scene.story.servers[-1]) if scene.story.servers else None


def _evidence(
    scene: Scene, stopping: Record, attempt: int | None, lost: Failure | None
) -> Iterator[Fact]:
    story = scene.story
    if lost is not None:
        if lost.is_host_lost:
            yield Fact("first", lost.what)
        yield from lease_over(scene, lost.attempt)
        if (host := _server_host(scene)) is not None:
            own = [event for event in scene.events if text(event, "host") == host]
            yield from last_event_of(own, lost.at_s, _LEASE_OVER)
        step, at = last_step_of(scene, lost.attempt, lost.rank)
        if step is not None:
            when = relative(at, lost.at_s, _LEASE_OVER)
            yield Fact("last step", f"rank {lost.rank}: step {step}, {when}".rstrip(", "))
    if story.signal and not story.asked_by:
        yield Fact("signal", f"{story.signal} to the agent, for example by a scheduler or a person")
    if why := story.asked_by or text(stopping, "why"):
        host = text(stopping, "host") or "?"
        is_here = why in FROM_OUTSIDE or why == "SIGUSR1"
        yield Fact("asked by", f"{why} to the agent on host {host}" if is_here else why)
    if story.reason and story.state == "ERROR":
        yield Fact("error", story.reason)
    if reason := text(scene.first("stop.failed", attempt), "reason"):
        yield Fact("no common step", reason)
    if story.exit_code is not None:
        yield Fact("exit", f"exit code {story.exit_code} of the agent")


def _action(scene: Scene, stopping: Record, attempt: int | None) -> Iterator[str]:
    if (decided := scene.first("stop.decided", attempt)) and scene.story.state == "STOPPED":
        yield f"all ranks stopped at call {integer(decided, 'call')} of regrow.should_stop()"
    elif scene.story.state == "SIGNALED":
        yield f"sent {scene.story.signal} to the workers, and waited for them to end"
    elif scene.named("lease.over", attempt):
        host = f"host {text(scene.first('lease.over', attempt), 'host') or '?'}"
        yield f"the guardian of {host} killed its workers when the lease of {host} was over"
        yield f"the agent of {host} searched for the other hosts, and ended"
    else:
        yield "stopped the workers, and ended the job"
    whole, grace = real(scene.settings, "shutdown_timeout"), scene.final_grace(attempt)
    if scene.story.state == "SIGNALED" and whole is not None and grace is not None:
        limit = f"--shutdown-timeout ({whole:g} s)"
        if seconds(grace) != seconds(whole):
            limit = f"{seconds(grace)} (less than --shutdown-timeout, {whole:g} s)"
        killed, _ = scene.overdue(attempt)
        if killed:
            yield f"killed {many_ranks(killed)} after {limit}"
        else:
            yield f"after {limit} it would have killed them"


def explain_server_end(scene: Scene, end: ServerEnd) -> Explanation:
    """Explain the end of the store server's process."""
    after = end.restarted_after_s
    where = f" on host {end.host}" if end.host else ""
    timeline = () if after is None else (Phase("server", 0.0, after, "another server started"),)
    ended = [
        each
        for each in scene.named("attempt.ended")
        if end.at_s is not None
        and 0 <= (real(each, "monotonic") or 0.0) - end.at_s < (after or 0.0)
    ]
    lost = scene.first("rendezvous.lost")
    return Explanation(
        attempt=None,
        title=f"the store server{where} (pid {end.pid}) {end.how}",
        cause="server",
        rung=None,
        outcome="no other server took over" if after is None else "the workers ran on",
        host=end.host,
        pid=end.pid,
        at_s=end.at_s,
        evidence=(
            Fact("exit", end.how.removeprefix("was ")),
            *(Fact("sent by", by) for name, by in FROM_OUTSIDE.items() if end.how.endswith(name)),
            *([Fact("no other server", end.reason)] if end.reason else []),
            *([Fact("as a result", text(lost, "why") or "?")] if lost and after is None else []),
        ),
        peers=() if ended else ("the workers need this server only to form a round",),
        action=()
        if after is None
        else (f"its agent started another server after {seconds(after)}", "it spent no restart"),
        timeline=timeline,
        cost=Cost(
            seconds=None if after is None else 0.0,
            steps=None if after is None else 0,
            redone_s=None if after is None else 0.0,
            worker_seconds=None if after is None else 0.0,
            restarts=0,
        ),
    )
