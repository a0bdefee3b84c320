"""Command `regrow token FILE`: create the secret that the hosts of a job share."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Create the file with the secret.

    Args:
        arguments: the arguments after `regrow token`.

    Raises:
        SystemExit: code 2 after it printed that the file exists already.
        OSError: the file cannot be created.
    """
    parser = ArgumentParser(
        prog="regrow token",
        description="Create a secret for jobs on several hosts, in a new file that only you can"
        " read. Give every host of a job the same file: regrow run --rdzv-token-file FILE ...",
    )
    parser.add_argument("file", metavar="FILE", help="the file to create; an existing file is kept")
    path = parser.parse_args(arguments).file
    from regrow.cli.screen.console import say
    from regrow.store import make_token_file

    try:
        make_token_file(path)
    except FileExistsError:
        say(sys.stderr, f"regrow token: {path} exists and is kept: use it, or give another file")
        sys.exit(2)
