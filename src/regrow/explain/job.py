"""The explanations of a job, from its logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from regrow.events.evidence import Record
from regrow.explain.endings import explain_end, explain_server_end
from regrow.explain.explanation import Explanation
from regrow.explain.failures import explain_change, explain_failure
from regrow.explain.in_process import explain_in_process
from regrow.explain.replacements import explain_cut_short
from regrow.explain.scene import Scene, scenes_of
from regrow.ledger import build_ledgers, jobs_of, read_logs, runs_of


def explain(logs: Mapping[str, Iterable[Record]]) -> dict[str | None, list[Explanation]]:
    """Explain the failures of all jobs whose events are in these logs.

    In-process restarts, changes of membership, the end of a store server and a stop by a signal are
    explained too. An explanation never raises for what an event holds.

    Args:
        logs: the events of each log, in their order, by a name of the log.

    Returns:
        The explanations of each job by its id, numbered from 1 in order of time. The job that began
        last is the last. Of several jobs with the same id, the last one is given.
    """
    known = {name: list(events) for name, events in logs.items()}
    jobs = jobs_of([run for log, events in known.items() for run in runs_of(log, events)])
    found: dict[str | None, list[Explanation]] = {}
    for job, ledger in zip(jobs, build_ledgers(known), strict=True):
        scenes = scenes_of(job, ledger.spans)
        each = [(scene, explanation) for scene in scenes for explanation in _explained(scene)]
        found.pop(ledger.run_id, None)
        found[ledger.run_id] = [_of_job(scene, one, n) for n, (scene, one) in enumerate(each, 1)]
    return found


def read_explanations(
    paths: Sequence[str], report: Callable[[str], None]
) -> dict[str | None, list[Explanation]]:
    """Explain the failures of all jobs in log directories; see `explain`.

    Args:
        paths: logs, directories of runs, or directories above them, of one host or several.
        report: receives one line for each broken line of a log.

    Raises:
        OSError: a path has no log, or a log cannot be read.
    """
    return explain(read_logs(paths, report))


def _of_job(scene: Scene, explanation: Explanation, number: int) -> Explanation:
    return replace(
        explanation,
        number=number,
        run_id=scene.story.run_id,
        script=scene.story.script,
        run=scene.number,
        time=scene.wall(explanation.at_s),
    )


def _explained(scene: Scene) -> list[Explanation]:
    story = scene.story
    failures, lost = story.numbered, None
    last = failures[-1][1] if failures and story.state == "ERROR" else None
    if last is not None and last.cause == "node" and last.restarted_attempt is None:
        failures, lost = failures[:-1], last  # the error is what became of this loss
    found = [
        *(explain_failure(scene, failure, number) for number, failure in failures),
        *(explain_change(scene, change) for change in story.moves),
        *explain_in_process(scene),
        *explain_cut_short(scene),
        *(explain_server_end(scene, end) for end in story.server_ends),
        *explain_end(scene, lost),
    ]
    return sorted(found, key=lambda each: scene.ends_s if each.at_s is None else each.at_s)
