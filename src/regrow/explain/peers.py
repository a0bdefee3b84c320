"""What the other ranks were doing when a worker failed, from their last marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from regrow.events import Failure, InProcessRestart, OtherFailure
from regrow.events.evidence import EXITED_AFTER_EXCEPTION, Record, integer, integers, real, text
from regrow.explain.scene import Scene
from regrow.explain.words import count, many_ranks, relative, worker

_MOST_LINES = 8
_LONGEST = 300  # characters of a later failure
_MOST_CONSEQUENCES = 2


def noticed(scene: Scene, failure: Failure) -> str:
    """Return what the other hosts learned of a host that was lost or left, as a clause."""
    if not failure.has_left:
        return "the loss was noticed"
    host = scene.hosts.name(scene.lost_node(failure.attempt))
    return f"the notice of host {host} reached the other hosts"


def silence_of(failure: Failure | InProcessRestart) -> str:
    """Return the begin of the silence of a rank that hung, as a clause; else empty."""
    return f"rank {failure.rank} fell silent" if failure.timer is not None else ""


def moment_of(failure: Failure) -> str:
    """Return what the times before and after a failure count from, as a clause."""
    if failure.cause == "node" and not failure.is_host_lost:
        return "the lease was over"
    is_report = failure.elsewhere and not failure.is_host_lost
    return silence_of(failure) or ("the report" if is_report else "the failure")


class _Mark(NamedTuple):
    """The last that is known of a rank."""

    step: int | None
    phase: str
    at: float | None
    is_known: bool = True
    """Whether its host recorded the end of the attempt."""


def last_step_of(scene: Scene, attempt: int, rank: int | None) -> tuple[int | None, float | None]:
    """Return the last step of a rank in an attempt, and its time."""
    for event in scene.named("attempt.ended", attempt):
        if found := _by_rank(event, "last_steps").get(str(rank)):
            return integer(found, "last_step"), real(found, "last_monotonic")
    return None, None


def phase_of(scene: Scene, attempt: int, rank: int | None) -> str:
    """Return the phase of the script in which a rank was at the end of an attempt; or empty."""
    mark = None if rank is None else _marks(scene, attempt).get(rank)
    return "" if mark is None else mark.phase


def what_peers_did(scene: Scene, failure: Failure, begin: float | None) -> tuple[str, ...]:
    """Return one line for each group of ranks that did the same.

    Args:
        scene: the run.
        failure: the failure.
        begin: when it began.
    """
    own = failure.timer.compared if failure.timer is not None else ()
    places = places_of_others(failure.rank, failure.compared or own)
    lines = [*places, *_steps(scene, failure, begin)]
    return (*_first_lines(lines), *_consequences(failure))


def what_ranks_did(scene: Scene, attempt: int | None, at: float) -> tuple[str, ...]:
    """Return the last steps of all ranks before a stop, and which of them had stalled.

    Args:
        scene: the run.
        attempt: the attempt that was stopped; None if no attempt had started.
        at: when the stop began.
    """
    if attempt is None or scene.story.last_step is None:
        return ()
    marks, size = _marks(scene, attempt), scene.world_size(attempt)
    made = {mark.step for mark in marks.values()}
    if len(marks) == size and made == {scene.story.last_step}:
        return (f"all ranks had made step {scene.story.last_step}",)
    stalls = (each for each in scene.story.stalls if each.attempt == attempt)
    stalled = [
        f"{relative(each.at_s, at, 'the stop')}, regrow reported: {each.what}; it was {each.stood}"
        for each in stalls
        if each.rank in marks and (marks[each.rank].at or 0.0) < (each.at_s or 0.0)
    ]
    return _first_lines([*stalled, *_by_step(scene, attempt, set(), at, "the stop")])


def _first_lines(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], *([f"... {more} more lines"] if more > 0 else []))


def places_of_others(rank: int | None, compared: Iterable[str]) -> list[str]:
    """Return where the other ranks were when the timer of a rank expired."""
    others = (line for line in compared if not line.startswith(f"rank {rank} "))
    return [f"when it was given up: {line}" for line in others]


def _steps(scene: Scene, failure: Failure, begin: float | None) -> Iterator[str]:
    what = moment_of(failure)
    if failure.is_host_lost:
        begin, what = failure.at_s, noticed(scene, failure)
    left_out = set() if failure.rank is None else {failure.rank}
    if failure.is_host_lost:
        left_out |= scene.ranks_of(scene.lost_agent(failure.attempt), failure.attempt)
    return _by_step(scene, failure.attempt, left_out, begin, what)


def _by_step(
    scene: Scene, attempt: int, left_out: set[int], begin: float | None, what: str
) -> Iterator[str]:
    """Yield a line for each group of ranks with the same last step and phase."""
    marks = _marks(scene, attempt)
    elsewhere = (scene.world_size(attempt) or 0) - len(left_out | marks.keys())
    marks = {rank: mark for rank, mark in marks.items() if rank not in left_out}
    if elsewhere > 0:
        yield f"{count(elsewhere, 'rank')} on other hosts: unknown, their logs were not given"
    unknown = [rank for rank, mark in marks.items() if not mark.is_known]
    if unknown:
        started = scene.named("attempt.started", attempt)
        hosts = [text(e, "host") for e in started if {*integers(e, "ranks")} & {*unknown}]
        where = f" on host {hosts[0]}" if len(hosts) == 1 else ""
        logs = f"the log of host {hosts[0]} ends" if where else "the logs of their hosts end"
        yield f"{many_ranks(unknown)}{where}: unknown, {logs} before {what}"
    groups: dict[tuple[int | None, str], list[int]] = {}
    for rank, mark in marks.items():
        if not mark.is_known:
            continue
        groups.setdefault((mark.step, mark.phase), []).append(rank)
    for (step, phase), ranks in sorted(groups.items(), key=lambda each: min(each[1])):
        times = [at for rank in ranks if (at := marks[rank].at) is not None]
        last = max(times, default=None)
        did = "reported no step" if step is None else f"had made step {step}"
        if step is None and not scene.story.reports_steps:
            did = "reported no step: the script does not call regrow.step"
        when = relative(last, begin, what) if step is not None else ""
        of_them = "the last of them " if len(ranks) > 1 else ""
        when = f", {of_them}{when}" if when else ""
        inside = f", and {_verb(ranks)} in phase {phase}" if phase else ""
        yield f"{many_ranks(ranks)} {did}{when}{inside}"


def _verb(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _marks(scene: Scene, attempt: int) -> dict[int, _Mark]:
    """Return the last marks of all ranks of an attempt."""
    found: dict[str, _Mark] = {}
    ended = {text(event, "host") for event in scene.named("attempt.ended", attempt)}
    for started in scene.named("attempt.started", attempt):
        is_known = text(started, "host") in ended
        found |= {str(r): _Mark(None, "", None, is_known) for r in integers(started, "ranks")}
    for event in (*scene.named("worker.accounts", attempt), *scene.named("attempt.ended", attempt)):
        last_steps, accounts = _by_rank(event, "last_steps"), _by_rank(event, "accounts")
        for rank in found.keys() & (last_steps.keys() | accounts.keys()):
            steps, account = last_steps.get(rank, {}), accounts.get(rank, {})
            phase = (text(account, "open") or "").partition("phase:")[2]
            if steps:
                at = real(steps, "last_monotonic")
                found[rank] = _Mark(integer(steps, "last_step"), phase, at)
            elif account:
                step = integer(account, "highest_step") if account.get("counts") else None
                found[rank] = _Mark(step, phase, real(account, "since_monotonic"))
    return {int(rank): mark for rank, mark in found.items()}


def _by_rank(event: Record, key: str) -> dict[str, Record]:
    """Return the objects of a field that has one for each rank."""
    found = event.get(key)
    known = found.items() if isinstance(found, Mapping) else ()
    return {rank: each for rank, each in known if isinstance(each, Mapping)}


def _consequences(failure: Failure) -> Iterator[str]:
    """Yield the later failures of the attempt; those that follow from the first are marked."""
    own = [other for other in failure.others if not other.is_consequence]
    for other in own[:_MOST_CONSEQUENCES]:
        yield _failed(other)
    if len(own) > _MOST_CONSEQUENCES:
        yield f"{count(len(own) - _MOST_CONSEQUENCES, 'more worker')} failed too"
    follow = [other for other in failure.others if other.is_consequence]
    for other in follow[:1]:
        yield f"as a result, {_failed(other)}"
    ranks = [other.rank for other in follow[1:] if other.rank is not None]
    if ranks:
        yield f"{many_ranks(ranks)} failed in the same way"


def _failed(other: OtherFailure) -> str:
    what = other.what
    what = what if len(what) <= _LONGEST else f"{what[: _LONGEST - 3]}..."
    if (found := EXITED_AFTER_EXCEPTION.match(what)) is not None:
        what, exited = f"failed with {found[2]}", f", and exited with code {found[1]}"
    else:
        exited = ""
    later = "" if other.after_s is None else f", {relative(other.after_s, 0.0)}"
    if (stopped := other.stopped_with) is not None:
        later += f"; regrow then stopped it ({stopped})"
    return f"{worker(other.rank, other.host, other.pid)} {what}{later}{exited}"
