"""Until when workers may run that nobody vouches for any more: the guardian's side of a lease.

A node on several hosts may run its workers only as long as the others count on it. The agent passes
on until when that is, again and again; when the time is over without a renewal, the guardian kills
the workers by itself, whatever became of the agent, and starts none until there is a renewal.

Pure: what is over and when to look again, by the clock of the caller. All times are nanoseconds of
the host's monotonic clock, which agent and guardian share; a renewal that was sent before a pause
therefore means what it meant when it was sent.
"""

from __future__ import annotations


class Deadman:
    """The time until which the workers may run."""

    __slots__ = ("_acted", "_until")

    def __init__(self) -> None:
        self._until: int | None = None
        self._acted = False  # on its being over

    def renew(self, until: int | None) -> None:
        """The workers may run until then; None: for ever."""
        self._until = until
        self._acted = False

    def over(self, now: int) -> bool:
        """Whether no worker may run."""
        return self._until is not None and now >= self._until

    def lapses(self, now: int) -> bool:
        """Whether the workers are to be killed: true once each time that a lease is over."""
        if self._acted or not self.over(now):
            return False
        self._acted = True
        return True

    def next(self) -> int | None:
        """When to look again, if nothing happens before; None: there is no need to."""
        return None if self._acted else self._until
