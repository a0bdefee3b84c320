"""The arguments that several benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(doc: str | None, runs: str = "of each way") -> argparse.ArgumentParser:
    """Return the parser of a benchmark that repeats its measurements and has bounds.

    Args:
        doc: docstring of the benchmark; its first line is shown.
        runs: what is repeated.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("-n", "--runs", type=int, default=5, help=runs)
    made.add_argument("--json", type=Path, help="write every single figure to this file")
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    return made
