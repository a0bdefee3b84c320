"""Where everything that the tests need was promised, one that is skipped has failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

ALL = "REGROW_TEST_ALL"
"""Environment variable; 1: the machine has all that any test needs."""
A_GPU: Final = "this machine has a GPU"
NO_GPU: Final = "this machine has no GPU"
"""Reasons of tests that are about another machine: one without a GPU, and one with."""


def unskip(report: pytest.TestReport, environ: Mapping[str, str]) -> None:
    """Make a failure of a report that says that something is missing, where that cannot be."""
    if not report.skipped or hasattr(report, "wasxfail") or environ.get(ALL) != "1":
        return
    # Of a skip: the file, the line and the reason.
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if reason.removeprefix("Skipped: ") in (A_GPU, NO_GPU):
        return
    report.outcome = "failed"
    report.longrepr = f"{ALL} is 1, so nothing may be skipped: {reason}"
