"""The command `regrow events`: a log's story, for people or machines."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ._log import read_events
from ._story import story

__all__ = ["print_story"]


def print_story(path: str | os.PathLike[str], *, as_json: bool, out: TextIO) -> int:
    """Print the story of the job whose log is at `path`; remarks go to stderr.

    Args:
        path: the log of events, a run's log directory, or the directory above several runs.
        as_json: print one JSON object instead of text.
        out: where to print.

    Returns:
        the exit code: 0, or 2 where there is no log or no event in it.
    """
    remarks: list[str] = []
    try:
        told = story(read_events(path, remarks.append))
    except OSError as error:
        reason = f"{path}: {error.strerror}" if error.strerror else str(error)
        print(f"regrow: {reason}", file=sys.stderr)
        return 2
    for remark in remarks:
        print(f"regrow: {remark}", file=sys.stderr)
    if not told.events:
        print(f"regrow: {path}: no event in the log", file=sys.stderr)
        return 2
    if as_json:
        import json

        print(json.dumps(told.to_json(), indent=2), file=out)
    else:
        print(told.render(), file=out)
    return 0
