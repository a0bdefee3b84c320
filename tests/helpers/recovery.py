"""How long a job takes from a fault to a world that works again."""

from __future__ import annotations

import time
from collections.abc import Callable

from host_jobs import World

#: The property of a test's report under which it is found.
RECOVERY = "recovery"


class Fault:
    """The moment of a fault, and how long it took from there to a world that works again."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self._at_s = 0.0

    def now(self) -> None:
        """The fault is injected next."""
        self._at_s = time.monotonic()

    def healed(self, world: World) -> None:
        """Note how long it took, for the table."""
        times = world.started_s - self._at_s, world.reduced_s - self._at_s
        self._record(RECOVERY, times)
