"""Print the story of a job from its log: the output of `regrow events`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, TextIO

from regrow.events.log import read_events
from regrow.events.story_types import story

if TYPE_CHECKING:
    import os


def print_story(path: str | os.PathLike[str], *, as_json: bool, out: TextIO) -> int:
    """Print the story of the job with the log at `path`; warnings go to stderr.

    Args:
        path: the event log, a run's log directory, or the directory above several runs.
        as_json: print one JSON object instead of text.
        out: the stream to print to.

    Returns:
        the exit code: 0, or 2 if there is no log or no event in it.
    """
    remarks: list[str] = []
    try:
        derived = story(read_events(path, remarks.append))
    except OSError as error:
        reason = f"{path}: {error.strerror}" if error.strerror else str(error)
        print(f"regrow: {reason}", file=sys.stderr)
        return 2
    for remark in remarks:
        print(f"regrow: {remark}", file=sys.stderr)
    if not derived.events:
        print(f"regrow: {path}: no event in the log", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(derived.to_json(), indent=2), file=out)
    else:
        print(derived.render(), file=out)
    return 0
