"""`regrow token FILE`: make the secret that the hosts of a job share."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Make the file.

    Args:
        arguments: of the command line, without `token`.

    Raises:
        SystemExit: code 2, if there is one already; the reason has been printed.
        OSError: it cannot be made.
    """
    parser = ArgumentParser(
        prog="regrow token",
        description="Make a secret for jobs on several hosts, in a new file that only you can read."
        " Every host of a job gets the same: regrow run --rdzv-token-file FILE ...",
    )
    parser.add_argument("file", metavar="FILE", help="the file to make; one that exists is kept")
    path = parser.parse_args(arguments).file
    from regrow.cli._console import say
    from regrow.store._own_secret import make_token_file

    try:
        make_token_file(path)
    except FileExistsError:
        say(sys.stderr, f"regrow token: {path} exists, and is kept: use it, or name another file")
        sys.exit(2)
