"""Command `regrow events LOGDIR ...`: print a job's story from the events of its hosts."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from regrow.cli.screen.output import to_reader


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
        help="the directory given as --log-dir (its newest job is printed), the directory of one"
        " run in it, or an events.jsonl; of several hosts or runs, give those of each",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args(arguments)
    from regrow.events import print_story

    with to_reader():
        code = print_story(*args.log_dirs, as_json=args.json, out=sys.stdout)
    if code:
        sys.exit(code)
