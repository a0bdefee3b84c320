"""A journal in a list: the part of `regrow.store.server.journal.Journal` that a service uses."""

from __future__ import annotations

from collections.abc import Iterable


class Records:
    """Keeps the records of a service, also for the services that replace it.

    Args:
        often: how many records may follow a snapshot before the next one is due.
    """

    def __init__(self, often: int = 10) -> None:
        self.records: list[bytes] = []
        self.fails: OSError | None = None
        """Error that every write raises from now on."""
        self._often = often
        self._since = 0

    def begin(self, snapshot: Iterable[bytes]) -> None:
        """Replace all records by a snapshot; see `Journal.begin`."""
        records = list(snapshot)
        self._check()
        self.records, self._since = records, 0

    def append(self, record: bytes) -> bool:
        """Add a record; see `Journal.append`."""
        self._check()
        self.records.append(record)
        self._since += 1
        return self._since > self._often

    def discard(self) -> None:
        """Delete all records; see `Journal.discard`."""
        self.records = []

    def _check(self) -> None:
        if self.fails is not None:
            raise self.fails
