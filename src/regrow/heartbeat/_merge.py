"""What a full set of beats means.

In every exchange each worker says the same few things of itself (`Beat`), and when all have spoken
somebody has to say what that amounts to. With a store it is the server, which tells everyone a
result of the same few bytes however many workers there are; with an all-reduce it is each worker
for itself. Both call `merge`, so both come to the same result.

A full set can still be wrong, and the reasons are told apart:

- Somebody leaves. Then all stop, and nothing is wrong.
- Somebody is new among workers that have been beating. A worker is known by its *incarnation*, a
  random number of its process, so a new process in an old place is seen whatever else it says. A
  worker that is new itself remembers nobody, and sees it by who has joined: in a first exchange
  nobody has.
- Somebody shows another token, since it is left over from another run. The one that most of those
  who joined show is taken to be right: if rank 0 is of another run, it is not all others that are
  out of step. Where more have not joined than have, these are the run, and who has is left over.

**Who stands still.** A worker whose training has stopped still beats, since that is done by a
thread of its own. In training by collectives all others stop as well, a step later at most, so
"others advance" is not to be seen for long. So a rank stands still for as many beats as its step is
the same and lower than somebody else's; or, if nobody is ahead of it, for as many as its step is
the same and somebody else's is not. Ranks that never told a step are not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from regrow.heartbeat._failure import NOBODY, Kind, Ranks

NO_STEP: Final = -1
"""The step of a worker that has not told one."""
PHASE_BYTES: Final = 24
"""The longest name of a phase, in bytes of UTF-8; what is longer is cut."""


class Beat(NamedTuple):
    """What one worker says of itself."""

    rank: int
    token: int
    """What all agreed on: 1 to 65535; rank 0 brings it to the first exchange, the others 0."""
    incarnation: int
    """Random, of this process's heartbeat: 1 to 2**62."""
    joined: bool
    """Whether it has been in an exchange that succeeded."""
    step: int = NO_STEP
    """The last step it told: 0 to 2**53, or `NO_STEP`."""
    phase: str = ""
    """What it said it is doing; empty if it did not. At most `PHASE_BYTES` long."""
    leaving: bool = False
    """It takes part for the last time."""
    final: bool = False
    """It gives up if this exchange fails. Whoever counts the beats may then tell all others why,
    who would otherwise hear that the one which gave up first is gone."""


class Standing(NamedTuple):
    """How far the workers are, of those that told a step."""

    lowest: int
    """The lowest step."""
    behind: Ranks
    """Who is there."""
    highest: int
    """The highest step."""
    ahead: Ranks
    """Who is there."""
    still: int = 0
    """For how many beats those who stand still the longest have done so; 0: nobody does."""
    stalled: Ranks = NOBODY
    """Who that is."""
    step: int = NO_STEP
    """At which step the first of these stands."""
    phase: str = ""
    """In which phase."""


class Agreed(NamedTuple):
    """All are there and in step."""

    token: int
    standing: Standing | None = None
    """How far they are; None if nobody told a step."""
    age: float = 0.0
    """Seconds since it was so; more than none for who was told late."""


class Left(NamedTuple):
    """Some have left, as they said; the beating is over, and nothing is wrong."""

    ranks: Ranks


class Broken(NamedTuple):
    """Not a set of workers that could go on together; final."""

    kind: Kind
    ranks: Ranks
    """Who is the reason."""
    detail: str = ""
    """What more there is to say, for people."""


class Failed(NamedTuple):
    """The exchange did not come about; the next one may."""

    why: str
    """For people."""
    missing: Ranks = NOBODY
    """Who was not there; nobody if that is not known."""


Outcome = Agreed | Left | Broken | Failed
"""How an exchange ended."""


class Trace(NamedTuple):
    """What is remembered of one rank from beat to beat."""

    incarnation: int
    step: int
    same: int = 0
    """For how many beats its step has been the same."""
    passed: int = 0
    """In how many of these the step of another rank was not."""


Memory = tuple[Trace, ...]
"""What is remembered of all ranks, by rank; empty before the first full set."""


def merge(memory: Memory, beats: Sequence[Beat]) -> tuple[Memory, Agreed | Left | Broken]:
    """Say what a full set of beats means.

    Args:
        memory: as returned by the last call, or empty.
        beats: one of each rank, by rank.

    Returns:
        What to remember, and what it means.
    """
    leaving = [beat.rank for beat in beats if beat.leaving]
    if leaving:
        return memory, Left(Ranks.of(leaving))
    token = _token(memory, beats)
    others = [beat.rank for beat in beats if beat.joined and beat.token != token]
    if others or not token:
        return memory, out_of_step(others, token)
    new = _new(memory, beats)
    if new:
        return memory, Broken("restarted", Ranks.of(new))
    traces = _follow(memory, beats)
    return traces, Agreed(token, _standing(traces, beats))


def out_of_step(ranks: Iterable[int], token: int) -> Broken:
    """Say of some ranks that they show another token than the others, who may have none yet."""
    return Broken("out of step", Ranks.of(ranks), f"the others show {token}" if token else "")


def clip(phase: str) -> str:
    """Return the name of a phase, no longer than it may be."""
    return phase.encode("utf-8", "replace")[:PHASE_BYTES].decode("utf-8", "ignore")


def _new(memory: Memory, beats: Sequence[Beat]) -> list[int]:
    """Who is new among workers that have been beating."""
    if memory:
        return [
            beat.rank
            for beat, trace in zip(beats, memory, strict=True)
            if beat.incarnation != trace.incarnation
        ]
    new = [beat.rank for beat in beats if not beat.joined]
    return new if len(new) < len(beats) else []


def _token(memory: Memory, beats: Sequence[Beat]) -> int:
    """The token that is right; 0 if there is none."""
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


def _standing(traces: Memory, beats: Sequence[Beat]) -> Standing | None:
    steps = {beat.rank: beat.step for beat in beats if beat.step != NO_STEP}
    if not steps:
        return None
    lowest, highest = min(steps.values()), max(steps.values())
    standing = Standing(
        lowest,
        Ranks.of(rank for rank, step in steps.items() if step == lowest),
        highest,
        Ranks.of(rank for rank, step in steps.items() if step == highest),
    )
    still = {
        rank: traces[rank].same if step < highest else traces[rank].passed
        for rank, step in steps.items()
    }
    longest = max(still.values())
    if not longest:
        return standing
    stalled = Ranks.of(rank for rank, beats_ in still.items() if beats_ == longest)
    first = beats[stalled.named[0]]
    return standing._replace(still=longest, stalled=stalled, step=first.step, phase=first.phase)
