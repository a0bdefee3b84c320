"""What is said when the workers do not beat together any more.

One exception for all of it, since whoever handles it does the same for each kind: the job cannot
go on as it is. What differs is what a person has to look for, and that is what the kinds tell
apart: a worker that is silent is looked for on its host, one that was started again in the logs of
its launcher, one of the wrong size in the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

Kind = Literal[
    "missing",
    "never started",
    "lost",
    "restarted",
    "twice",
    "out of step",
    "wrong world size",
    "stalled",
    "no exchange",
]
"""
- missing: nothing was heard of it, in as many exchanges in a row as are allowed to fail.
- never started: it did not come to the first exchange.
- lost: its process has ended, and had not said that it would.
- restarted: a new process came in its place while the others went on.
- twice: two processes say that they are this rank.
- out of step: it shows another token than the others, so it is of another run.
- wrong world size: it was started for another number of workers.
- stalled: it beats, but its training has stopped while that of others has not.
- no exchange: the exchange itself failed each time, and does not say who was missing.
"""

NAMED: Final = 8
"""How many ranks are named; of the others the number is told."""


class Ranks(NamedTuple):
    """Some of the ranks: the lowest by name, and how many there are."""

    named: tuple[int, ...]
    """At most `NAMED` of them, ascending."""
    total: int
    """Of how many it is said in all."""

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """Return those ranks."""
        everyone = sorted(ranks)
        return cls(tuple(everyone[:NAMED]), len(everyone))

    def __str__(self) -> str:
        names = ", ".join(map(str, self.named))
        more = self.total - len(self.named)
        return f"rank{'s' * (self.total != 1)} {names}{f' and {more} more' if more else ''}"


NOBODY: Final = Ranks((), 0)


class HeartbeatFailure(Exception):
    """The workers do not beat together any more; the text says who, since when and at which beat.

    Attributes:
        kind: what is wrong; see `Kind`.
        ranks: of whom it is said, at most 8 of them, ascending; empty if that is not known.
        count: of how many workers it is said.
        rank: of the worker that noticed.
        world_size: how many workers that one expects.
        beat: the number of the beat that failed; 0 is the first exchange, which begins it all.
        seconds: since the last beat in which all were there, or since the start before any was.
    """

    def __init__(
        self,
        kind: Kind,
        ranks: Ranks,
        message: str,
        *,
        rank: int,
        world_size: int,
        beat: int,
        seconds: float,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.ranks = ranks.named
        self.count = ranks.total
        self.rank = rank
        self.world_size = world_size
        self.beat = beat
        self.seconds = seconds


def failure_of(
    kind: Kind,
    ranks: Ranks,
    detail: str,
    *,
    rank: int,
    world_size: int,
    beat: int,
    seconds: float,
    failures: int,
) -> HeartbeatFailure:
    """Return the failure, with a text that says what is wrong and what to look at.

    Args:
        kind: what is wrong.
        ranks: of whom it is said.
        detail: what more there is to say; may be empty.
        rank: of the worker that noticed.
        world_size: how many workers that one expects.
        beat: the number of the beat that failed.
        seconds: since all were there, or since the start.
        failures: exchanges that failed in a row, this one included.
    """
    one = ranks.total == 1
    own = one and rank in ranks.named
    is_, was, s = ("is", "was", "s") if one else ("are", "were", "")
    more = f" ({detail})" if detail else ""
    ago = f"all were there {seconds:.3g} s ago"
    match kind:
        case "missing" if own:
            text = f"this process was missing, and the others have given it up; {ago}{more}"
        case "missing":
            text = f"{ranks} {is_} missing; {ago}, and {failures} exchanges in a row failed{more}"
        case "never started":
            text = f"{ranks} did not come within {seconds:.3g} s{more}"
        case "lost":
            text = f"the process{'' if one else 'es'} of {ranks} ended without a goodbye{more}"
        case "restarted" if not beat:
            text = (
                f"this process was started while the others were beating, in the place of one that "
                f"they know; start all workers together{more}"
            )
        case "restarted" if own:
            text = f"another process was started in the place of this one{more}; {ago}"
        case "restarted":
            text = f"{ranks} {was} started again behind the others' backs{more}; {ago}"
        case "twice":
            text = f"another process says that it is {ranks}; give each its own RANK{more}"
        case "out of step" if own:
            text = (
                f"this process, or another one of {ranks}, shows another token, and is of another "
                f"run{more}; {ago}"
            )
        case "out of step":
            text = f"{ranks} show{s} another token, and {is_} of another run{more}; {ago}"
        case "wrong world size":
            text = f"{ranks} expect{s} another number of workers{more}; give all one WORLD_SIZE"
        case "stalled":
            text = detail
        case "no exchange":
            text = f"no exchange has succeeded for {seconds:.3g} s{more}"
    return HeartbeatFailure(
        kind,
        ranks,
        f"heartbeat of rank {rank} of {world_size}, beat {beat}: {text}",
        rank=rank,
        world_size=world_size,
        beat=beat,
        seconds=seconds,
    )
