"""Explanations of what ended an attempt: a failed worker, a lost host, a change of membership."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from regrow.events import Failure, PlannedRestart
from regrow.events.evidence import integer, real, restarts_left, stopped_with, text
from regrow.explain import ladder, long_settings
from regrow.explain.explanation import Cost, Explanation, Fact, Phase
from regrow.explain.findings import DECIDING, begin_of, event_of, evidence_of, title_of
from regrow.explain.peers import what_peers_did
from regrow.explain.scene import Scene
from regrow.explain.words import count, seconds
from regrow.ledger import SURVIVED, LostTime

_SHOWN_S = 0.0005
_LATER_S = 0.5
_MOST_HOSTS = 8
_NO_FAILURE = Fact("failure", "none: no worker failed, and no host was lost")


def explain_failure(scene: Scene, failure: Failure, number: int | None) -> Explanation:
    """Explain the failure that ended an attempt; `number` is that of the story."""
    event = event_of(scene, failure)
    begin = begin_of(failure)
    exited = real(event, "exited_monotonic")
    lost = _lost_time(scene, failure, begin)
    timeline = tuple(_timeline(scene, failure, begin, lost.redone_s, exited))
    rung = _rung(scene, failure)
    is_silent = begin != failure.at_s and not failure.has_left
    return Explanation(
        story_number=number,
        attempt=failure.attempt,
        title=title_of(scene, failure),
        cause=failure.cause,
        is_planned=failure.has_left,
        rung=rung,
        outcome=_outcome(scene, failure, rung),
        rank=failure.rank,
        host=failure.host,
        pid=failure.pid,
        at_s=begin,
        begun=_reported(failure),
        noticed_s=failure.at_s if is_silent else _much_later(exited, begin),
        injected=text(event, "injected"),
        evidence=tuple(evidence_of(scene, failure, event, begin)),
        peers=what_peers_did(scene, failure, begin),
        action=tuple(_action(scene, failure)),
        refusals=ladder.refusals(scene, failure, event, rung),
        timeline=timeline,
        cost=_cost(scene, failure, timeline, lost),
        long=long_settings.of_failure(scene, failure, timeline),
    )


def explain_change(scene: Scene, change: PlannedRestart) -> Explanation:
    """Explain a restart without a failure: hosts joined, or left with notice."""
    lost = _lost_time(scene, change, change.at_s)
    timeline = tuple(_timeline(scene, change, change.at_s, lost.redone_s))
    return Explanation(
        attempt=change.attempt,
        title=f"{_joined(change)} joined" if change.joined else change.reason,
        cause="membership",
        is_planned=True,
        rung=4,
        outcome=_went_on(change),
        at_s=change.at_s,
        evidence=(Fact("reason", _reason(change)) if change.joined else _NO_FAILURE,),
        action=(
            _workers_after(scene, change),
            "it spent no restart of --max-restarts",
        ),
        refusals=ladder.OF_A_CHANGE,
        timeline=timeline,
        cost=_cost(scene, change, timeline, lost),
        long=long_settings.of_change(scene, change, timeline),
    )


def _reported(failure: Failure) -> str:
    """Return the words for the time of a failure on another host, without the log of that host."""
    if not failure.elsewhere or failure.is_host_lost or failure.silent_s:
        return ""
    return f"reported to {f'host {failure.notified}' if failure.notified else 'this host'} at"


def _much_later(at: float | None, begin: float | None) -> float | None:
    """Return a time if it is so much later that the page has to show both."""
    return None if at is None or begin is None or at - begin < _LATER_S else at


# --- what regrow did


def _rung(scene: Scene, failure: Failure) -> int | None:
    if failure.restarted_attempt is None:
        return 5 if scene.requeued_after_s is not None else None
    return 4 if failure.is_host_lost or failure.lost_nodes else 3


def _went_on(cost: Failure | PlannedRestart) -> str:
    if cost.first_step is not None and cost.first_step.attempt == cost.restarted_attempt:
        return (
            f"training went on with step {cost.first_step.step} in attempt {cost.restarted_attempt}"
        )
    again = "went on" if cost.kept_workers else "were started again"
    return f"the workers {again}, in attempt {cost.restarted_attempt}"


def _outcome(scene: Scene, failure: Failure, rung: int | None) -> str:
    story = scene.story
    if failure.restarted_attempt is not None:
        return _went_on(failure)
    if scene.requeued_after_s is not None:
        return f"the job ended; it was started again {seconds(scene.requeued_after_s)} later"
    if story.state is None:
        return "unknown: the log ends here"
    code = f" with exit code {story.exit_code}" if story.exit_code is not None else ""
    return f"the job ended{code}: {ladder.why_not_restarted(scene)}"


def _action(scene: Scene, failure: Failure) -> Iterator[str]:
    if failure.restarted_attempt is None:
        yield (
            f"{_stopped(scene, failure.attempt)}, and ended the job"
            if scene.story.state
            else "unknown: the log ends before"
        )
        return
    yield _workers_after(scene, failure)
    server = scene.new_server(failure.attempt, failure.restarted_attempt)
    if server is not None:
        yield f"host {server.host} took over the server of the rendezvous"
    if failure.joined:
        yield f"joined: {_joined(failure)}"
    step = failure.first_step
    if step is not None and step.attempt != failure.restarted_attempt:
        yield f"attempt {failure.restarted_attempt} failed too; attempt {step.attempt} made steps"
    if failure.cause == "node":
        yield "it spent no restart of --max-restarts"
    elif (left := failure.restarts_left) is not None:
        most = scene.story.max_restarts
        of = f" of --max-restarts {most}" if most is not None else ""
        yield f"it spent one restart{of}; {left or 'none'} left"


def _workers_after(scene: Scene, ended: Failure | PlannedRestart) -> str:
    """Return how the workers of the next attempt began."""
    workers, kept = ended.restarted_workers, ended.kept_workers
    before = scene.world_size(ended.attempt)
    changed = f" (before: {before})" if before and workers and before != workers else ""
    if kept:
        new = (workers or kept) - kept
        started = ""
        if new > 0 and kept + new <= scene.workers:
            started = f", and {count(new, 'new one')} {'was' if new == 1 else 'were'} started"
        return f"{count(kept, 'worker')} went on in the same processes{started}{changed}"
    forked = ended.forked_workers
    how = f", {forked} of them forked from the template of --preload" if forked else ""
    new_ones = count(workers, "worker") if workers else "the workers"
    again = " again" if not workers or not before or workers <= before else ""
    return f"{_stopped(scene, ended.attempt)}, and started {new_ones}{again}{changed}{how}"


def _stopped(scene: Scene, attempt: int) -> str:
    if _have_ended(scene, attempt):
        return "found that all workers had ended"
    return "stopped the workers that still ran"


def _have_ended(scene: Scene, attempt: int) -> bool:
    """Return whether all workers had ended by themselves."""
    failed = scene.named("worker.failed", attempt)
    ended = {integer(event, "rank") for event in failed if stopped_with(event) is None}
    return len(ended) >= (scene.world_size(attempt) or math.inf)


# --- when, and what it cost


def _timeline(
    scene: Scene,
    ended: Failure | PlannedRestart,
    begin: float | None,
    redone_s: float | None,
    exited: float | None = None,
) -> Iterator[Phase]:
    """Yield the phases; times that are not known merge a phase with the next one."""
    if begin is None or ended.at_s is None:
        return
    number, following = ended.attempt, ended.restarted_attempt
    at = ended.at_s
    detected = getattr(ended, "detected_after_s", None)
    pause = ended.backoff_s
    restarting = scene.last_time("job.restarting", number)
    first = None
    if ended.first_step is not None and ended.first_step.attempt == following:
        first = ended.startup_s
    marks: list[tuple[str, float | None, str]] = []
    if begin < at:
        marks += _until_known(scene, ended, at)
    if exited is not None:
        marks.append(("ending", exited, "the failed process ended"))
    acted = None if detected is None else at + detected
    marks.append(("reaction", acted, "until the agent acted on it"))
    kept = ended.kept_workers
    stopping = "the workers left their round" if kept else "until all workers had ended"
    if not kept and _have_ended(scene, number):
        stopping = "until the agent had ended the attempt"
    marks.append(("stopping", scene.last_time("attempt.ended", number), stopping))
    if following is not None:
        if pause is not None and restarting is not None:
            marks.append(("pause", restarting + pause, "a pause after short attempts"))
        met = scene.last_time("rendezvous.completed", following)
        marks.append(("rendezvous", met, "the next round was formed"))
        started = scene.last_time("attempt.started", following)
        begun = "workers went on, or were started" if kept else "new processes were started"
        marks.append(("processes", started, begun))
        all_kept = kept and kept == ended.restarted_workers
        loading = "loading" if all_kept else "imports, loading"
        is_paced = first is not None and first != ended.first_step_after_s
        loading += ", up to the first step" if is_paced else ", the first step"
        first = None if first is None else at + first
        marks.append(("startup", first, loading))
        redo = ended.work_lost_s if redone_s is None else redone_s
        if first is not None and redo and ended.work_lost:
            again = f"{count(ended.work_lost, 'step')} done again"
            marks.append(("redoing", first + redo, again))
    elif scene.story.state is not None:
        marks.append(("ending job", scene.ends_s, "until the end of the agent"))
        if scene.requeued_after_s is not None:
            later = scene.ends_s + scene.requeued_after_s
            marks.append(("scheduler", later, "until the next run of the job"))
    now = begin
    for name, until, meaning in marks:
        if until is not None and until - now >= _SHOWN_S:
            yield Phase(name, now - begin, until - begin, meaning)
            now = until


def _until_known(
    scene: Scene, ended: Failure | PlannedRestart, at: float
) -> Iterator[tuple[str, float, str]]:
    if not isinstance(ended, Failure) or not ended.is_host_lost:
        yield "silent", at, "no sign of life; regrow waited"
    elif ended.has_left:
        if (decided := real(scene.first("stop.failed", ended.attempt), "monotonic")) is not None:
            yield "deciding", decided, DECIDING
        yield "notification", at, "until the other hosts knew"
    else:
        server = scene.new_server(ended.attempt, ended.restarted_attempt)
        if server is not None and server.at < at:
            yield "takeover", server.at, "until another server took over"
        broke = ended.what.endswith("its connection broke")
        waited = "waited for the host to connect again"
        yield "silent", at, waited if broke else "no new step; the loss was not known yet"


def _lost_time(scene: Scene, ended: Failure | PlannedRestart, begin: float | None) -> LostTime:
    number, following = ended.attempt, ended.restarted_attempt
    inside, inside_later = (
        attempt is not None and any(scene.named(name, attempt) for name in SURVIVED)
        for attempt in (number, following)
    )
    return scene.lost_time(
        number,
        following,
        begin,
        unfinished=not inside,
        most_redone_s=ended.work_lost_s or 0.0 if inside_later else math.inf,
    )


def _cost(
    scene: Scene, ended: Failure | PlannedRestart, timeline: Sequence[Phase], lost: LostTime
) -> Cost:
    following = ended.restarted_attempt
    went_on = ended.first_step is not None or following is None
    spends = isinstance(ended, Failure) and ended.cause != "node" and following is not None
    return Cost(
        seconds=timeline[-1].end_s if timeline else None,
        steps=ended.work_lost,
        redone_s=_redone_s(scene, ended, timeline),
        worker_seconds=lost.total,
        before_s=lost.before_s,
        workers=lost.workers,
        all_workers=lost.all_workers,
        which=_which(scene, ended) if lost.workers == lost.all_workers else "",
        buckets=lost.seconds,
        restarts=1 if spends else 0,
        restarts_left=restarts_left(
            scene.named("job.restarting", ended.attempt), charged=bool(spends)
        ),
        why_unknown="" if went_on else _why_unknown(scene),
    )


def _redone_s(
    scene: Scene, ended: Failure | PlannedRestart, timeline: Sequence[Phase]
) -> float | None:
    """Return the seconds in which the lost steps were done again; None if they are not recorded.

    0: the next attempt made only its first step, whose time is part of the startup.
    """
    redoing = next((phase.length_s for phase in timeline if phase.name == "redoing"), None)
    if redoing is not None or ended.work_lost_s is not None or ended.restarted_attempt is None:
        return redoing if redoing is not None else ended.work_lost_s
    return 0.0 if scene.accounts(ended.restarted_attempt) else None


def _which(scene: Scene, ended: Failure | PlannedRestart) -> str:
    before, after = (scene.world_size(n) for n in (ended.attempt, ended.restarted_attempt))
    return "" if None in (before, after) or before == after else ", each while it was in the job"


def _why_unknown(scene: Scene) -> str:
    if not scene.story.reports_steps:
        return "the script does not call regrow.step"
    return "no later step is recorded"


def _joined(cost: Failure | PlannedRestart) -> str:
    """Return the hosts that joined."""
    more = len(cost.joined) - _MOST_HOSTS
    hosts = ", ".join(f"host {host}" for host in cost.joined[:_MOST_HOSTS])
    return f"{hosts} and {more} more" if more > 0 else hosts


def _reason(change: PlannedRestart) -> str:
    """Return why hosts joined, or what else ended the round that they joined."""
    return (
        f"{_joined(change)} asked to join" if change.reason.endswith(" to join") else change.reason
    )
