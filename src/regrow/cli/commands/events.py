"""Command `regrow events LOGDIR ...`: print a job's story from the events of its hosts."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Print the story of a job.

    Args:
        arguments: the arguments after `regrow events`.

    Raises:
        SystemExit: code 2 after it printed why there is no such log; code 1 if the reader of
            stdout closed it early.
    """
    parser = ArgumentParser(
        prog="regrow events",
        description="Print what happened in a job: what failed first, when it was detected, how"
        " long the restart took, and which work was lost.",
    )
    parser.add_argument(
        "log_dirs",
        nargs="+",
        metavar="LOGDIR",
        help="the job's log directory, the directory given as --log-dir (its newest job is"
        " printed), or an events.jsonl; several, of the hosts of one job, are merged",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args(arguments)
    from regrow.events import print_story

    try:
        code = print_story(*args.log_dirs, as_json=args.json, out=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. The interpreter flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code:
        sys.exit(code)
