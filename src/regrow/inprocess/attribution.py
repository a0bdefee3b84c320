"""Records of interruptions: which rank interrupted an iteration, and how. Ranks exchange them."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Interruption", "InterruptionRecord", "format_interruption_records"]

_SHOWN = 8  # ranks in a list, so that a job with thousands of ranks does not fill the screen


class Interruption(enum.Enum):
    """Reason why an iteration ended early.

    Attributes:
        EXCEPTION: the function, or a plug-in before it, raised an `Exception`.
        BASE_EXCEPTION: the function, or a plug-in before it, raised another `BaseException`; the
            rank is terminated.
        SOFT_TIMEOUT: no progress for `soft_timeout`.
        HARD_TIMEOUT: no progress for `hard_timeout`; the process is killed.
        TERMINATED: the process ended.
        UNRESPONSIVE: the rank sent nothing for too long; its connection was dropped.
        MONITOR_PROCESS_EXCEPTION: the process that monitors the rank failed. This is never
            recorded: a monitor that ends is started again, and no rank restarts.
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
    """Interruption of one rank.

    Attributes:
        rank: the rank at fault, as numbered in the iteration that ended.
        interruption: what happened on that rank.
    """

    rank: int
    interruption: Interruption

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """Parse a record from the text that `str` or `repr` wrote.

        Args:
            string: the text.

        Raises:
            ValueError: the text has another form, or names an interruption that does not exist.
        """
        found = re.search(r"rank=(\d+).*Interruption\.(\w+)", string)
        if found is None or found[2] not in Interruption.__members__:
            raise ValueError(
                f"{string!r} is not a record of an interruption; a record looks like "
                f"{cls(0, Interruption.EXCEPTION)}"
            )
        return cls(int(found[1]), Interruption[found[2]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Format records as one line: kinds in the order of their first record, each with its ranks."""
    ranks_of: dict[Interruption, set[int]] = {}
    for record in records:
        ranks_of.setdefault(record.interruption, set()).add(record.rank)
    return ", ".join(
        f"{kind} on {'rank' if len(ranks) == 1 else 'ranks'} {list_ranks(ranks)}"
        for kind, ranks in ranks_of.items()
    )


def list_ranks(ranks: Iterable[int]) -> str:
    """Return a list of ranks, ascending; the first few, and the number of the others."""
    shown = sorted(ranks)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(map(str, shown[:_SHOWN])) + more
