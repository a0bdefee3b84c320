"""What the commands print about a job: a text on stdout, remarks and mistakes on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def to_reader() -> Iterator[None]:
    """Context manager: print to stdout in the block.

    Raises:
        SystemExit: code 1 if the reader of stdout, such as `head`, closed it early.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def warn(text: str) -> None:
    """Print a remark on stderr."""
    print(f"regrow: {text}", file=sys.stderr)


def refuse(text: str) -> NoReturn:
    """Print a mistake of the caller on stderr, and end with code 2."""
    warn(text)
    sys.exit(2)
