"""Print the story of a job from its logs: the output of `regrow events`."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

from regrow.events.log import find_event_file, read_events
from regrow.events.runs import jobs_of, runs_of
from regrow.events.story_types import story

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.events.evidence import Record


def print_story(*paths: str | os.PathLike[str], as_json: bool, out: TextIO) -> int:
    """Print the story of each run of the job with these logs; warnings go to stderr.

    A job that a scheduler started again has several runs (`regrow.events.runs`).

    Args:
        paths: the logs of the job's hosts and runs. Each is an event log, a run's log directory, or
            the directory above several runs, of which the newest is taken.
        as_json: print a JSON object instead of text; a list of objects if there are several runs.
        out: the stream to print to.

    Returns:
        the exit code: 0, or 2 if a log is missing, empty, or of another job than the first.
    """
    logs: dict[str, list[Record]] = {}
    jobs: list[str | None] = []
    for path in paths:
        remarks: list[str] = []
        try:
            found: list[Record] = list(read_events(path, remarks.append))
            log = os.path.realpath(find_event_file(path).path)
        except OSError as error:
            reason = f"{path}: {error.strerror}" if error.strerror else str(error)
            print(f"regrow: {reason}", file=sys.stderr)
            return 2
        for remark in remarks:
            print(f"regrow: {remark}", file=sys.stderr)
        jobs.append(story(found).run_id)
        if not found:
            print(f"regrow: {path}: no event in the log", file=sys.stderr)
            return 2
        if jobs[-1] != jobs[0]:
            ids = f"job {jobs[-1]}, and {paths[0]} of job {jobs[0]}"
            print(f"regrow: {path} is of {ids}: give the logs of one job", file=sys.stderr)
            return 2
        logs[log] = found
    stories = [story(events) for events in _by_run(logs)]
    if as_json:
        shown = [each.to_json() for each in stories]
        print(json.dumps(shown if len(shown) > 1 else shown[0], indent=2), file=out)
    else:
        print("\n\n".join(each.render() for each in stories), file=out)
    return 0


def _by_run(logs: Mapping[str, list[Record]]) -> list[list[Record]]:
    """Return the events of all hosts for each run of a job, in the order of the runs.

    A log that lacks the start of its run is taken for one of the last run.
    """
    agents = [agent for log, events in logs.items() for agent in runs_of(log, events)]
    sessions = [session for job in jobs_of(agents) for session in job]
    session_of = {agent.log: i for i, session in enumerate(sessions) for agent in session.runs}
    found: list[list[Record]] = [[] for _ in range(max(len(sessions), 1))]
    for log, events in logs.items():
        found[session_of.get(log, -1)] += events
    return [events for events in found if events]
