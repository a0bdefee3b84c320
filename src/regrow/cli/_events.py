"""`regrow events LOGDIR`: the story of a job again, from the events in its log directory."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Print the story.

    Args:
        arguments: of the command line, without `events`.

    Raises:
        SystemExit: code 2, if there is no such log; the reason has been printed.
    """
    parser = ArgumentParser(
        prog="regrow events",
        description="Tell what happened in a job: what failed first, when it was noticed, how long"
        " the restart took, and what work was lost.",
    )
    parser.add_argument(
        "log_dir",
        metavar="LOGDIR",
        help="the job's log directory, the directory given as --log-dir (its newest job is told),"
        " or an events.jsonl",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args(arguments)
    from regrow.events import print_story

    try:
        code = print_story(args.log_dir, as_json=args.json, out=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has had enough. The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code:
        sys.exit(code)
