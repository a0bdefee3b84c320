"""The failure of a heartbeat, its kinds, and the texts that workers report.

There is one exception, because a handler does the same for each kind: the job cannot continue as it
is. The kind shows where an operator must look. A missing worker: its host. A restarted worker: the
logs of its launcher. A wrong world size: the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from regrow.heartbeat.beats import HeartbeatPlan
    from regrow.heartbeat.merge import StalledSteps

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
"""The kinds of a failure:

- missing: the worker missed the allowed number of exchanges in a row.
- never started: the worker did not join the first exchange.
- lost: the process of the worker has ended without leaving.
- restarted: a new process took the place of the worker while the others continued.
- twice: two processes have this rank.
- out of step: the worker shows another token than the others, so it belongs to another run.
- wrong world size: the worker was started for another number of workers.
- stalled: the worker sends beats, but its training has stopped while the training of others
  continues.
- no exchange: the exchange itself failed each time, and names no missing ranks.
"""

NAMED: Final = 8
"""Maximum number of ranks that a text names; it counts the others."""


class Ranks(NamedTuple):
    """A set of ranks: the lowest ranks by name, and the number of all ranks."""

    named: tuple[int, ...]
    """At most `NAMED` ranks of the set, ascending."""
    total: int
    """The number of ranks in the set."""

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """Create a set from these ranks."""
        ordered = sorted(ranks)
        return cls(tuple(ordered[:NAMED]), len(ordered))

    def __str__(self) -> str:
        names = ", ".join(map(str, self.named))
        more = self.total - len(self.named)
        return f"rank{'s' * (self.total != 1)} {names}{f' and {more} more' if more else ''}"


NO_RANKS: Final = Ranks((), 0)
NEVER_TOGETHER: Final = "all workers arrived, but never at the same time"


class HeartbeatFailure(Exception):
    """The heartbeat of the workers has failed; the text has the ranks, the time and the beat.

    Args:
        kind, ranks, rank, world_size, beat, seconds: see the attributes.
        detail: more to report; may be empty.
        failures: number of consecutive failed exchanges, including this one.

    Attributes:
        kind: what is wrong; see `Kind`.
        ranks: the ranks at fault, at most 8, ascending; empty: the ranks are not known.
        count: number of ranks at fault.
        rank: rank of the worker that detected the failure.
        world_size: number of workers that this worker expects.
        beat: number of the failed beat; 0 is the first exchange.
        seconds: time since the last complete beat, or since the start if there was none.
    """

    def __init__(
        self,
        kind: Kind,
        ranks: Ranks,
        detail: str,
        *,
        rank: int,
        world_size: int,
        beat: int,
        seconds: float,
        failures: int = 1,
    ) -> None:
        self.kind: Kind = kind
        self.ranks = ranks.named
        self.count = ranks.total
        self.rank = rank
        self.world_size = world_size
        self.beat = beat
        self.seconds = seconds
        text = self._text(ranks, detail, failures)
        super().__init__(f"heartbeat of rank {rank} of {world_size}, beat {beat}: {text}")

    def _text(self, ranks: Ranks, detail: str, failures: int) -> str:
        """What is wrong, and what to do next."""
        one = ranks.total == 1
        own = one and self.rank in ranks.named
        is_, was, s = ("is", "was", "s") if one else ("are", "were", "")
        more = f" ({detail})" if detail else ""
        ago = f"all workers were present {round(self.seconds, 2):g} s ago"
        match self.kind:
            case "missing" if own:
                return f"this process was missing, so the other workers gave it up{more}; {ago}"
            case "missing":
                failed = f"{failures} exchange{'s' * (failures != 1)} in a row failed"
                return f"{ranks} {is_} missing: {failed}{more}; {ago}"
            case "never started":
                return f"{ranks} did not arrive within {round(self.seconds, 2):g} s{more}"
            case "lost":
                process = "process" if one else "processes"
                return f"the {process} of {ranks} ended without leaving the heartbeat{more}"
            case "restarted" if not self.beat:
                return (
                    f"this process replaces an earlier process, but the other workers had already "
                    f"started their heartbeats{more}; start all workers together"
                )
            case "restarted" if own:
                return f"another process started in place of this one{more}; {ago}"
            case "restarted":
                return f"{ranks} {was} restarted while the other workers continued{more}; {ago}"
            case "twice":
                return f"another process also has {ranks}{more}; give each process its own RANK"
            case "out of step" if own:
                return (
                    f"this process, or another process with {ranks}, shows another token, so it "
                    f"belongs to another run{more}; {ago}"
                )
            case "out of step":
                they = "it belongs" if one else "they belong"
                return f"{ranks} show{s} another token, so {they} to another run{more}; {ago}"
            case "wrong world size":
                return (
                    f"{ranks} expect{s} another number of workers{more}; start all workers with "
                    f"the same WORLD_SIZE"
                )
            case "stalled":
                return detail
            case "no exchange":
                return f"no exchange has succeeded for {round(self.seconds, 2):g} s{more}"


def bound_text(plan: HeartbeatPlan) -> str:
    """The first log line of a heartbeat: its time bound."""
    return (
        f"heartbeat of {plan.size} workers every {plan.period:g} s: all workers detect a missing "
        f"worker within {plan.bound:g} s ({plan.failures} exchanges of at most {plan.timeout:g} s)."
        f" If the exchange is a store, they detect the end of a process within 1 s"
    )


def stall_text(stalled: StalledSteps) -> str:
    """The text about stalled ranks."""
    s = "s" * (stalled.ranks.total == 1)
    phase = f" in phase {stalled.phase!r}" if stalled.phase else ""
    return (
        f"{stalled.ranks} send{s} heartbeats, but stay{s} at step {stalled.step}{phase} for "
        f"{stalled.beats} beats; the highest step is {stalled.highest}"
    )


def not_begun(plan: HeartbeatPlan, missing: Ranks, seconds: float) -> str:
    """The text about ranks that are missing from the first exchange, with advice.

    Args:
        plan: settings of the waiting worker.
        missing: the ranks that have not arrived.
        seconds: time for which the worker has waited.
    """
    return (
        f"heartbeat: {missing} of {plan.size} {'has' if missing.total == 1 else 'have'} not started"
        f" heartbeats, {round(seconds, 2):g} s after rank {plan.rank}. No missing worker is "
        f"detected until all have started. A worker starts its heartbeat when it imports regrow: "
        f"import regrow in all workers, or limit this wait by regrow.heartbeat.start with a "
        f"start_timeout"
    )


def reports_loudly(plan: HeartbeatPlan, missing: Ranks) -> bool:
    """Whether this worker logs missing ranks as a warning; only one does, because all know them."""
    first = next((rank for rank in range(plan.size) if rank not in missing.named), plan.rank)
    return plan.rank == first or missing.total > len(missing.named)
