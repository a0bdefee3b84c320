"""Time from a fault until the job's world works again, and the table of these times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from helpers.hosts.jobs import World

#: The property of a test's report that holds the time.
RECOVERY = "recovery"
TITLE = "from the fault to the next world, in seconds"


class Fault:
    """The moment of a fault, and the time from there to a world that works again."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self._at_s = 0.0

    def now(self) -> None:
        """Mark the moment of the fault; call it just before the fault."""
        self._at_s = time.monotonic()

    def healed(self, world: World, *, reduces: bool = True) -> None:
        """Record the recovery time for the table; `reduces`: the workers do all-reduces."""
        reduced_s = world.reduced_s - self._at_s if reduces else None
        self._record(RECOVERY, (world.started_s - self._at_s, reduced_s))


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the time of every scenario, by name; empty where no scenario has recovered."""
    rows: dict[str, Any] = {
        report.nodeid.split("::")[-1].removeprefix("test_").replace("_", " "): times
        for report in reports
        for name, times in report.user_properties
        if name == RECOVERY and report.when == "call"
    }
    if not rows:
        return []
    width = max(map(len, rows))
    lines = [f"{'':{width}}  workers started  first all-reduce"]
    for name, (started_s, reduced_s) in sorted(rows.items()):
        reduced = "none" if reduced_s is None else f"{reduced_s:.2f}"
        lines.append(f"{name:{width}}  {started_s:15.2f}  {reduced:>16}")
    return lines
