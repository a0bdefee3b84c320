"""Command `regrow top [LOGDIR ...]`: show a running job in the terminal."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec
from io import TextIOWrapper

from regrow.cli.args.which_job import add_library, library_of
from regrow.cli.screen.output import to_reader


def main(arguments: Sequence[str]) -> None:
    """Show the newest job until it is over, or until Ctrl-C.

    Args:
        arguments: the arguments after `regrow top`.

    Raises:
        SystemExit: code 2 after it printed a mistake; code 1 if the reader of stdout closed it.
        RendezvousError: the job is not reached, or the token is missing or wrong.
    """
    parser = ArgumentParser(
        prog="regrow top",
        description="Show the newest job of some log directories in the terminal: its nodes, its"
        " restarts, and the step, the pace and the state of each rank.",
    )
    add_library(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the job once and exit; the default if stdout is not a terminal",
    )
    args = parser.parse_args(arguments)
    if find_spec("rich") is None:
        parser.exit(2, "regrow top: rich is missing: pip install rich\n")
    from rich.console import Console

    from regrow.views.top import show
    from regrow.workers.logs.specs import temporary_directory

    library = library_of(args, parser)
    if not library.jobs():
        runs = ", ".join(args.runs) or "."
        unnamed = f"{temporary_directory()}/torchelastic_*"
        hint = f"give the --log-dir of one, or {unnamed} for jobs without --log-dir"
        where = args.rdzv_endpoint or f"{runs}: {hint}"
        parser.exit(2, f"regrow top: no job in {where}\n")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name of the job may not be in its encoding
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else int(os.environ.get("COLUMNS") or 120)
    with to_reader():
        show(library, Console(width=width), once=args.once or not is_terminal)
