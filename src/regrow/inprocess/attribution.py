"""Who interrupted an iteration, and how: the records by which ranks tell each other."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Interruption", "InterruptionRecord", "format_interruption_records"]

_SHOWN = 8  # ranks named for each kind; a job of thousands must not fill a screen


class Interruption(enum.Enum):
    """Why an iteration ended early.

    Attributes:
        EXCEPTION: the function, or a plug-in before it, raised an `Exception`.
        BASE_EXCEPTION: it raised another `BaseException`; the rank is terminated.
        SOFT_TIMEOUT: no progress for `soft_timeout`.
        HARD_TIMEOUT: no progress for `hard_timeout`; the process is killed.
        TERMINATED: the process ended.
        UNRESPONSIVE: nothing was heard of the rank for `heartbeat_timeout`.
        MONITOR_PROCESS_EXCEPTION: what watches the rank from outside failed. It is never recorded:
            a monitor that has ended is started again, and nothing restarts.
    """

    EXCEPTION = enum.auto()
    BASE_EXCEPTION = enum.auto()
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    TERMINATED = enum.auto()
    UNRESPONSIVE = enum.auto()
    MONITOR_PROCESS_EXCEPTION = enum.auto()


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank's interruption.

    Attributes:
        rank: the rank at fault, as numbered in the iteration that ended.
        interruption: what happened there.
    """

    rank: int
    interruption: Interruption

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """The record that `str` or `repr` wrote.

        Raises:
            ValueError: it is no such text, or names an interruption that does not exist.
        """
        found = re.search(r"rank=(\d+).*Interruption\.(\w+)", string)
        if found is None or found[2] not in Interruption.__members__:
            raise ValueError(
                f"{string!r} is no record of an interruption; one looks like "
                f"{cls(0, Interruption.EXCEPTION)}"
            )
        return cls(int(found[1]), Interruption[found[2]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Say it in one line: each kind in the order it came first, with the ranks it happened on."""
    ranks_of: dict[Interruption, set[int]] = {}
    for record in records:
        ranks_of.setdefault(record.interruption, set()).add(record.rank)
    return ", ".join(f"{kind} on {_ranks(ranks)}" for kind, ranks in ranks_of.items())


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_SHOWN]))
    more = len(ranks) - _SHOWN
    named = f"{shown} and {more} more" if more > 0 else shown
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
