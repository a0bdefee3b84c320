"""Report a skipped test as failed where REGROW_TEST_ALL promises all that tests need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

ALL = "REGROW_TEST_ALL"
"""Environment variable; 1: the machine has all that any test needs."""
A_GPU: Final = "this machine has a GPU"
NO_GPU: Final = "this machine has no GPU"
"""Skip reasons of tests for another machine: one without a GPU, and one with a GPU."""


def unskip(report: pytest.TestReport, environ: Mapping[str, str]) -> None:
    """Change a skipped test's report to failed, unless the skip is allowed."""
    if not report.skipped or hasattr(report, "wasxfail") or environ.get(ALL) != "1":
        return
    # A skip has a tuple: the file, the line and the reason.
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if reason.removeprefix("Skipped: ") in (A_GPU, NO_GPU):
        return
    report.outcome = "failed"
    report.longrepr = f"{ALL} is 1, so nothing may be skipped: {reason}"
