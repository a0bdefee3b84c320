"""Print the story of a job from its log: the output of `regrow events`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, TextIO

from regrow.events.log import read_events
from regrow.events.story_types import story

if TYPE_CHECKING:
    import os

    from regrow.events.evidence import Record


def print_story(*paths: str | os.PathLike[str], as_json: bool, out: TextIO) -> int:
    """Print the story of the job with these logs; warnings go to stderr.

    Args:
        paths: the logs of the job's hosts. Each is an event log, a run's log directory, or the
            directory above several runs.
        as_json: print one JSON object instead of text.
        out: the stream to print to.

    Returns:
        the exit code: 0, or 2 if a log is missing, empty, or of another job than the first.
    """
    events: list[Record] = []
    jobs: list[str | None] = []
    for path in paths:
        remarks: list[str] = []
        try:
            found = list(read_events(path, remarks.append))
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
        events += found
    derived = story(events)
    if as_json:
        print(json.dumps(derived.to_json(), indent=2), file=out)
    else:
        print(derived.render(), file=out)
    return 0
