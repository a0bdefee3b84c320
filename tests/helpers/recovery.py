"""How long a job takes from a fault to a world that works again, and the table of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    from host_jobs import World

#: The property of a test's report under which it is found.
RECOVERY = "recovery"
TITLE = "from the fault to the next world, in seconds"


class Fault:
    """The moment of a fault, and how long it took from there to a world that works again."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self._at_s = 0.0

    def now(self) -> None:
        """The fault is injected next."""
        self._at_s = time.monotonic()

    def healed(self, world: World, *, reduces: bool = True) -> None:
        """Note how long it took, for the table; `reduces`: the workers do all-reduces."""
        reduced_s = world.reduced_s - self._at_s if reduces else None
        self._record(RECOVERY, (world.started_s - self._at_s, reduced_s))


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """What every scenario took, by name; nothing where none has healed."""
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
