"""How long the ranks wait before they call a function again that fails again and again.

One restart takes milliseconds, and a function that raises at once would be restarted for ever, as
fast as the store can tell of it: nobody could read the log, and no fault outside (a full disk, a
file that is not there yet) is given the time to pass. So what is free is bounded: `FREE` restarts
in `WINDOW`. Each further one waits, twice as long as the one before, up to `LONGEST`.

How often the function has failed is told by the times of the faults, of the store's clock where
ranks share one, so all ranks come to the same pause, and nobody has to be asked. Over a store of
c10d each goes by its own clock; the last one is waited for in any case.
"""

from __future__ import annotations

from typing import Final

from regrow.inprocess._link import Faults

FREE: Final = 20
"""Restarts within `WINDOW` that do not wait."""
WINDOW: Final = 60.0
"""Seconds."""
FIRST: Final = 0.01
"""Seconds that the first one waits which is not free."""
LONGEST: Final = 1.0
"""Seconds that a restart waits at most."""


class Pauses:
    """The pauses of one call of a wrapped function; knows no clock."""

    __slots__ = ("_failed_at", "_pause")

    def __init__(self) -> None:
        self._failed_at: tuple[float, ...] = ()
        self._pause = 0.0

    def after(self, faults: Faults, told_at: float) -> float:
        """Return how many seconds to wait before the next call of the function.

        Args:
            faults: what ended the iteration.
            told_at: when this rank knew of it, for ranks without a common clock; seconds.
        """
        at = faults.records[0].at if faults.records and faults.now else told_at
        recent = (*(before for before in self._failed_at if at - before < WINDOW), at)
        self._failed_at = recent[-FREE - 1 :]
        if len(recent) <= FREE:
            self._pause = 0.0
        else:
            self._pause = min(2 * self._pause or FIRST, LONGEST)
        return self._pause
