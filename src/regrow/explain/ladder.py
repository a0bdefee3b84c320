"""Why no lower rung of the ladder recovered from a failure.

1: the same process calls its function again. 2: one new process takes a place. 3: all workers start
again. 4: other hosts. 5: the scheduler. The reasons follow from what the agent recorded of the
worker's in-process wrapper, of the budget, and of what became of the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from regrow.events import Failure, InProcessRestart
from regrow.events.evidence import Record, integer, text
from regrow.explain.explanation import Refusal
from regrow.explain.scene import Scene
from regrow.explain.words import not_given

_UNKNOWN = "unknown: the log of its host was not given, or an older release wrote it"
_WRAPPED = "function with regrow.inprocess.Wrapper"
_NO_WRAPPER = f"the worker was not in a {_WRAPPED}"


def refusals(
    scene: Scene, failure: Failure, event: Record, rung: int | None
) -> tuple[Refusal, ...]:
    """Return why an attempt had to end, or the job.

    Args:
        scene: the run.
        failure: the failure.
        event: the event of the failed worker; empty if there is none.
        rung: the rung that recovered from it; None if none did.
    """
    if failure.is_host_lost:
        gone = "has left" if failure.has_left else "is lost"
        found = [
            Refusal(1, f"the processes of a host that {gone} cannot be reached"),
            Refusal(2, "a new process takes a place on the same host only"),
            Refusal(3, f"a host that {gone} starts workers only after it has joined again"),
        ]
    elif failure.gave_up is not None:
        found = [
            Refusal(1, f"the wrapper gave up: {failure.gave_up}"),
            Refusal(2, "no process is replaced after the wrapper gave up"),
        ]
    else:
        found = [
            Refusal(1, _not_in_process(failure, event)),
            Refusal(2, _not_replaced(scene, failure, event)),
        ]
    if rung in (None, 5) and not failure.is_host_lost:
        found.append(Refusal(3, why_not_restarted(scene)))
    return tuple(each for each in found if each.reason)


def _not_in_process(failure: Failure, event: Record) -> str:
    if not event:
        return "the failure is not one of a function call"
    if failure.elsewhere and "wrapped" not in event:
        return not_given(failure.host)
    wrapped = event.get("wrapped")
    if wrapped is not None and text(event, "traceback") is None:
        ended = f"the process of rank {failure.rank} had ended"
        return ended if wrapped else f"{ended}, and was in no {_WRAPPED}"
    if failure.timer is not None and wrapped is not None:
        ended = f"regrow had to end the process of rank {failure.rank}"
        return ended if wrapped else f"{ended}; the process was in no {_WRAPPED}"
    if wrapped is False:
        return _NO_WRAPPER
    if wrapped is True and "RestartAbort" in (text(event, "traceback") or ""):
        return "the wrapper had given up (RestartAbort, see the traceback)"
    if wrapped is True:
        return "the wrapper calls again only after an exception in its function"
    return _UNKNOWN


def _not_replaced(scene: Scene, failure: Failure, event: Record) -> str:
    if not event:
        return "no single process had ended"
    if failure.elsewhere and "replaceable" not in event:
        return not_given(failure.host)
    if event.get("wrapped") is False:
        return "a process can be replaced only in a function with Wrapper(replace=True)"
    replaceable, before = event.get("replaceable"), integer(event, "incarnation") or 0
    if before:
        return "the process had replaced another one, and failed before its first regrow.step"
    if replaceable is False:
        return "the wrapper has no replace=True, or the process was about to leave the function"
    if replaceable is None:
        return _UNKNOWN
    if scene.story.max_restarts == 0:
        return "no restart is allowed (--max-restarts 0)"
    return next(_reasons(scene, integer(event, "attempt"), {integer(event, "rank")}), "") or (
        "no restart of --max-restarts was left"
    )


def why_not_restarted(scene: Scene) -> str:
    """Return why the job ended, and its workers were not started again; empty if it is unknown."""
    story = scene.story
    if story.state is None:
        return ""
    if story.state == "FAILED" and story.restarts_left and story.closed:
        return f"the rendezvous was closed by {story.closed}"
    if story.state != "FAILED":
        return (story.reason or "the job was stopped").strip()
    if story.max_restarts == 0:
        return "no restart is allowed (--max-restarts 0)"
    if not story.restarts_left:
        return f"--max-restarts {story.max_restarts} was spent"
    return story.reason or "the reason is not recorded"


OF_A_CHANGE = tuple(
    Refusal(rung, "this rung does not change the hosts of a job") for rung in (1, 2, 3)
)
"""Why no lower rung could take in a host that joined, or do without one that left."""


def refusals_in_process(restart: InProcessRestart) -> tuple[Refusal, ...]:
    """Return why an in-process restart replaced a process."""
    if restart.replaced:
        return (process_ended(restart.replaced[0].rank),)
    return ()


def process_ended(rank: int) -> Refusal:
    """Return why the process of a rank could not call its function again."""
    return Refusal(1, f"the process of rank {rank} had ended")


def why_not_replaced(scene: Scene, restart: InProcessRestart) -> str:
    """Return why no new process took the place of a rank that was lost."""
    reasons = dict.fromkeys(_reasons(scene, restart.attempt, set(restart.lost)))
    return "; ".join(reasons) or "the wrapper has no replace=True"


def _reasons(scene: Scene, attempt: int | None, ranks: set[int | None]) -> Iterator[str]:
    for event in scene.named("worker.not_replaced", attempt):
        if integer(event, "rank") in ranks:
            yield text(event, "reason") or "unknown"
