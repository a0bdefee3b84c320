"""Command `regrow top [RUNS ...]`: show a running job in the terminal."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec


def main(arguments: Sequence[str]) -> None:
    """Show the newest job until it is over, or until Ctrl-C.

    Args:
        arguments: the arguments after `regrow top`.

    Raises:
        SystemExit: code 2 after it printed a mistake; code 1 if the reader of stdout closed it.
    """
    parser = ArgumentParser(
        prog="regrow top",
        description="Show the newest job of some log directories in the terminal: its nodes, its"
        " restarts, and the step, the pace and the state of each rank.",
    )
    parser.add_argument(
        "runs",
        metavar="RUNS",
        nargs="*",
        default=["."],
        help="directories given as --log-dir, or directories of single runs; default: the current"
        " directory",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the job once and exit; the default if stdout is not a terminal",
    )
    args = parser.parse_args(arguments)
    if find_spec("rich") is None:
        parser.exit(2, "regrow top: rich is missing: pip install 'regrow[top]'\n")
    from rich.console import Console

    from regrow.views import Library
    from regrow.views.top import show

    library = Library(args.runs)
    if not library.jobs():
        parser.exit(2, f"regrow top: no job in {', '.join(args.runs)}: give the --log-dir of one\n")
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else int(os.environ.get("COLUMNS") or 120)
    try:
        show(library, Console(width=width), once=args.once or not is_terminal)
        sys.stdout.flush()
    except BrokenPipeError:  # the interpreter flushes stdout again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
