"""The meaning of a full set of beats, and the interfaces by which workers exchange them.

In every exchange each worker sends a `Beat`, and `merge` decides what a full set of beats means.
With a store, the server calls `merge`, and sends all workers one result of a few bytes. With an
all-reduce, each worker calls `merge`. Both ways have the same result.

A full set can mean the following:

- A worker leaves. Then all workers stop, and nothing is wrong.
- A worker is new among workers with earlier beats. Each process draws a random number, its
  *incarnation*, so the others detect a new process in an old place. The new worker itself knows no
  earlier incarnations. It detects the fault by the flag `joined`, which no worker has set in a
  first exchange.
- A worker shows another token, because it remains from another run. The right token is the token of
  most joined workers. So if rank 0 is from another run, the other ranks are not out of step. If
  fewer workers have joined than not, the joined workers remain from another run.

**Stalls.** A worker with a stopped training still sends beats, from a thread of its own. In
training with collectives, all other workers also stop, at most a step later. So a rank is stalled
for as many beats as its step stays the same and another rank has a higher step. If no rank is
ahead, only beats with a change of another rank's step count. Ranks without steps never stall.

An `Exchange` is the smallest operation that every framework has: a sum over all workers. It shows
only whether all workers took part. The store's server is connected to every worker. So it can name
the missing worker, and it detects the end of a process before an exchange is due. The heartbeat
therefore uses a `Meeting` internally: a session with the store (`store_exchange`), or a vector of
beats that any `Exchange` sums up (`vector_exchange`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, NamedTuple, Protocol, runtime_checkable

from msgspec import Meta, Struct

from regrow.heartbeat.failure import NO_RANKS, Kind, Ranks

NO_STEP: Final = -1
"""The step of a worker that has reported no steps."""
PHASE_BYTES: Final = 24
"""Maximum length of a phase name, in bytes of UTF-8; longer names are cut."""


Rank = Annotated[int, Meta(ge=0, lt=1_000_000)]
Incarnation = Annotated[int, Meta(ge=1, le=2**62)]
"""Random number that identifies the heartbeat of one process."""


class Beat(NamedTuple):
    """The report of one worker to the others; decoding checks its fields."""

    rank: Rank
    token: Annotated[int, Meta(ge=0, le=65535)]
    """The token of the group; in the first exchange, 0 on all ranks but rank 0."""
    incarnation: Incarnation
    joined: bool
    """Whether the worker has taken part in a successful exchange."""
    step: Annotated[int, Meta(ge=NO_STEP, le=2**53)] = NO_STEP
    """The last step of `heartbeat.step`, or `NO_STEP`."""
    phase: Annotated[str, Meta(max_length=64)] = ""
    """The last phase of `heartbeat.step`, at most `PHASE_BYTES` long; empty: none."""
    leaving: bool = False
    """Whether this is the worker's last beat."""
    final: bool = False
    """Whether the worker gives up if this exchange fails.

    Then the server sends the reason to all other workers. Otherwise, they would report the end of
    the first worker that gives up as the cause.
    """

    def progress(self, age: float) -> WorkerProgress:
        """Return the progress of this worker; `age` is the seconds since this beat."""
        step = None if self.step == NO_STEP else self.step
        return WorkerProgress(self.rank, step, self.phase or None, age)


class StalledSteps(NamedTuple):
    """The ranks whose steps have stayed the same for the most beats."""

    beats: int
    """The number of these beats, at least 1."""
    ranks: Ranks
    step: int
    """The step of the first of these ranks."""
    phase: str
    """The phase of the first of these ranks."""
    highest: int
    """The highest step of all workers."""


class Agreed(NamedTuple):
    """All workers are present and in step."""

    token: int
    stalled: StalledSteps | None = None
    """None: no rank is stalled."""
    age: float = 0.0
    """Seconds since the set was full; above 0 for a worker that gets the answer late."""


class WorkersLeft(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """Some workers have left; the heartbeat has ended, and nothing is wrong."""

    ranks: Ranks


class Broken(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """The workers cannot continue as one group; final."""

    kind: Kind
    ranks: Ranks
    """The ranks at fault."""
    detail: str = ""
    """More detail for the report."""


class ExchangeFailed(NamedTuple):
    """The exchange failed; the next one may succeed."""

    why: str
    """The reason, for logs."""
    missing: Ranks = NO_RANKS
    """The missing ranks; empty: the missing ranks are not known."""


Outcome = Agreed | WorkersLeft | Broken | ExchangeFailed
"""The result of an exchange."""


@runtime_checkable
class AllReduceExchange(Protocol):
    """A sum over all workers, through any connection between them."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        """Return the sums of the vectors of all workers, element by element.

        One thread calls this method, in all workers at about the same time. Some workers may not
        call it at all. It must work again after a failure.

        Args:
            vector: this worker's numbers; the same length in all workers. Each number, and each
                sum, fits into 64 bits with a sign.
            timeout: seconds within which the method must return or raise; varies from call to call.

        Raises:
            Exception: of any type, if the sums are not complete in that time.
        """
        ...


Exchange = AllReduceExchange
"""Public name of `AllReduceExchange`."""
AllReduce = Callable[[Sequence[int], float], Sequence[int]]
"""A plain function is also an `Exchange`: the heartbeat calls it with the vector and the time-out.
"""


class WorkerProgress(NamedTuple):
    """The progress of a worker."""

    rank: int
    step: int | None
    """The worker's last step; None: it has reported none."""
    phase: str | None
    """The worker's last phase; None: it has reported none."""
    age: float
    """Seconds since the worker's last beat."""


Progress = WorkerProgress
"""Public name of `WorkerProgress`."""


class Meeting(Protocol):
    """Connects one worker to all others."""

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """Send the beat of this worker, and return the result of the exchange.

        A `leaving` beat may return before the other workers have arrived.

        Args:
            beat: the beat of this worker.
            timeout: seconds within which the method must return.

        Raises:
            Exception: the exchange failed; this has the same effect as `ExchangeFailed`.
        """
        ...

    def leave(self, beat: Beat) -> None:
        """End a beat that is in progress, if possible; called in another thread.

        Args:
            beat: the `leaving` beat of this worker.
        """
        ...

    def listen(self, notify: Callable[[Outcome], None]) -> None:
        """From now on, report the end of the heartbeat between two beats.

        Args:
            notify: called with `WorkersLeft` or `Broken`, at most once, from another thread.
        """
        ...

    def table(self, timeout: float) -> list[WorkerProgress]:
        """Return the progress of each worker that has sent a beat, by rank; safe in any thread.

        Args:
            timeout: seconds within which the method must return.
        """
        ...

    def close(self) -> None:
        """Close all resources; there are no calls after this one."""
        ...


class Trace(NamedTuple):
    """The data that `merge` keeps for one rank from beat to beat."""

    incarnation: int
    step: int
    same: int = 0
    """Number of beats for which the rank's step has been the same."""
    passed: int = 0
    """Number of these beats in which the step of another rank changed."""


Memory = tuple[Trace, ...]
"""The traces of all ranks, by rank; empty before the first full set."""


def merge(memory: Memory, beats: Sequence[Beat]) -> tuple[Memory, Agreed | WorkersLeft | Broken]:
    """Decide what a full set of beats means.

    Args:
        memory: as returned by the last call, or empty.
        beats: one beat of each rank, by rank.

    Returns:
        The memory for the next call, and the meaning.
    """
    leaving = [beat.rank for beat in beats if beat.leaving]
    if leaving:
        return memory, WorkersLeft(Ranks.of(leaving))
    token = _token(memory, beats)
    others = [beat.rank for beat in beats if beat.joined and beat.token != token]
    if others or not token:
        return memory, out_of_step(others, token)
    new = _new(memory, beats)
    if new:
        return memory, Broken("restarted", Ranks.of(new))
    traces = _follow(memory, beats)
    return traces, Agreed(token, _stalled(traces, beats))


def out_of_step(ranks: Iterable[int], token: int) -> Broken:
    """The end of a group in which `ranks` show a wrong token; token 0: there is no right token."""
    return Broken("out of step", Ranks.of(ranks), f"the others show {token}" if token else "")


def clip(phase: str) -> str:
    """Cut the name of a phase to `PHASE_BYTES`."""
    return phase.encode("utf-8", "replace")[:PHASE_BYTES].decode("utf-8", "ignore")


def _new(memory: Memory, beats: Sequence[Beat]) -> list[int]:
    """The ranks that are new among workers with earlier beats."""
    if memory:
        return [
            beat.rank
            for beat, trace in zip(beats, memory, strict=True)
            if beat.incarnation != trace.incarnation
        ]
    new = [beat.rank for beat in beats if not beat.joined]
    return new if len(new) < len(beats) else []


def _token(memory: Memory, beats: Sequence[Beat]) -> int:
    """The right token; 0: there is no right token."""
    voters = [
        beat
        for place, beat in enumerate(beats)
        if not memory or beat.incarnation == memory[place].incarnation
    ]
    votes = Counter(beat.token for beat in voters if beat.joined)
    if votes and (memory or 2 * votes.total() >= len(voters)):
        return votes.most_common(1)[0][0]
    return 0 if beats[0].joined else beats[0].token


def _follow(memory: Memory, beats: Sequence[Beat]) -> Memory:
    if not memory:
        return tuple(Trace(beat.incarnation, beat.step) for beat in beats)
    moved = sum(beat.step != trace.step for beat, trace in zip(beats, memory, strict=True)) > 0
    return tuple(
        trace._replace(same=trace.same + 1, passed=trace.passed + moved)
        if beat.step == trace.step
        else Trace(beat.incarnation, beat.step)
        for beat, trace in zip(beats, memory, strict=True)
    )


def _stalled(traces: Memory, beats: Sequence[Beat]) -> StalledSteps | None:
    highest = max(beat.step for beat in beats)
    counts = {
        beat.rank: trace.same if beat.step < highest else trace.passed
        for beat, trace in zip(beats, traces, strict=True)
        if beat.step != NO_STEP
    }
    longest = max(counts.values(), default=0)
    if not longest:
        return None
    ranks = Ranks.of(rank for rank, count in counts.items() if count == longest)
    first = beats[ranks.named[0]]
    return StalledSteps(longest, ranks, first.step, first.phase, highest)
