"""Beats as one vector that any exchange can sum up.

Each worker has `WORDS` places in the vector, fills in its own, and leaves those of all others zero.
The sum of all vectors then holds what everybody said, and each worker makes the same of it
(`_merge`). What a sum cannot do is say who did not take part: an exchange of which one is missing
fails, and names nobody unless its error does (`MissingRanks`).

A place that is not of one worker shows: the highest part of its first word counts who filled it in.
None did if the exchange was among other workers than it should be, two if a worker was started
twice under one rank. And a worker finds its own words in the sum as it gave them, or the exchange
loses digits; so no word is above 2**53, and all survive in double precision, too.

**An exchange is called in a thread of its own**, since the beat has to go on when it does not come
back. A function that a user gave may forget about its time-out; a store may be asked whose host is
gone, over a connection that nobody times. The heartbeat then counts a failure after the other, and
ends with words; otherwise only the kernel's timers would end it, in silence, and not even these
where the user says what to do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from regrow.heartbeat._exchange import AllReduce, Exchange, Progress
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._merge import (
    NO_STEP,
    PHASE_BYTES,
    Beat,
    Broken,
    Failed,
    Memory,
    Outcome,
    merge,
)

__all__ = ["WORDS", "MissingRanks", "VectorMeeting", "beats_of", "vector_of"]

_PHASE_WORD: Final = 6
"""Bytes of a phase's name in a word."""
_HEAD: Final = 4
"""Words of a worker before the name of its phase."""
WORDS: Final = _HEAD + PHASE_BYTES // _PHASE_WORD
"""Words of a worker: head, incarnation (two), step, phase."""
_ONE: Final = 1 << 32
"""In a head: one worker filled this in. Below it are the token and these."""
_JOINED: Final = 1 << 16
_LEAVING: Final = 1 << 17
_TOLD: Final = 1 << 18
"""It told a step; else the word for that is 0."""
_HALF: Final = 31
"""Bits of an incarnation in the second of its words."""

_RESERVE_SHARE: Final = 0.1
_RESERVE_S: Final = 0.2
"""An exchange is given so much less than the time that there is, at most the second of the two, so
that what it says itself of its time-out comes first."""


class MissingRanks(RuntimeError):
    """An exchange failed, and knows whose absence was the reason.

    Args:
        text: what happened.
        missing: the ranks that did not take part.
    """

    def __init__(self, text: str, missing: Iterable[int]) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class VectorMeeting:
    """The `Meeting` of workers that can do no more than sum up vectors.

    Args:
        exchange: sums up; if it has a method `close`, that is called at the end.
        world_size: number of workers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        exchange: Exchange | AllReduce,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._size = world_size
        self._clock = clock
        self._aside = _Aside(
            exchange.all_reduce if isinstance(exchange, Exchange) else exchange, clock
        )
        self._memory: Memory = ()
        self._last: tuple[float, tuple[Beat, ...]] = (0.0, ())
        """When the last full set came, and what it was."""

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """See `Meeting.beat`."""
        given = vector_of(beat, self._size)
        try:
            sums = [int(each) for each in self._aside.call(given, timeout)]
        except Exception as error:  # noqa: BLE001 - whatever it was, there was no exchange
            missing = getattr(error, "missing", ())
            return Failed(f"{type(error).__name__}: {error}", Ranks.of(missing))
        wrong = _wrong(given, sums, beat.rank)
        if wrong is not None:
            return wrong
        beats = tuple(beats_of(sums))
        self._last = self._clock(), beats
        self._memory, outcome = merge(self._memory, beats)
        return outcome

    def leave(self, beat: Beat) -> None:
        """See `Meeting.leave`: a sum takes all of them, and ends when it ends."""

    def listen(self, tell: Callable[[Outcome], None]) -> None:
        """See `Meeting.listen`: nothing becomes known between two exchanges."""

    def table(self, timeout: float) -> list[Progress]:
        """See `Meeting.table`: as of the last beat in which all were there."""
        at, beats = self._last
        age = self._clock() - at
        return [
            Progress(b.rank, None if b.step == NO_STEP else b.step, b.phase or None, age)
            for b in beats
        ]

    def close(self) -> None:
        """See `Meeting.close`."""
        self._aside.close(getattr(self._exchange, "close", None))


def vector_of(beat: Beat, world_size: int) -> list[int]:
    """Return the vector in which one worker says its beat, all of it but `final`."""
    told = beat.step != NO_STEP
    head = _ONE | beat.token | _JOINED * beat.joined | _LEAVING * beat.leaving | _TOLD * told
    high, low = divmod(beat.incarnation, 1 << _HALF)
    phase = beat.phase.encode().ljust(PHASE_BYTES, b"\0")
    words = [head, high, low, beat.step if told else 0]
    words += [
        int.from_bytes(phase[at : at + _PHASE_WORD]) for at in range(0, PHASE_BYTES, _PHASE_WORD)
    ]
    vector = [0] * (WORDS * world_size)
    vector[beat.rank * WORDS : (beat.rank + 1) * WORDS] = words
    return vector


def beats_of(sums: Sequence[int]) -> list[Beat]:
    """Return what all workers said, by rank; each place is one worker's."""
    return [_beat(at // WORDS, sums[at : at + WORDS]) for at in range(0, len(sums), WORDS)]


def _beat(rank: int, words: Sequence[int]) -> Beat:
    head, high, low, step, *phase = words
    name = b"".join(word.to_bytes(_PHASE_WORD) for word in phase)
    return Beat(
        rank,
        head & 0xFFFF,
        high << _HALF | low,
        bool(head & _JOINED),
        step if head & _TOLD else NO_STEP,
        name.rstrip(b"\0").decode("utf-8", "replace"),
        bool(head & _LEAVING),
    )


def _wrong(given: Sequence[int], sums: Sequence[int], rank: int) -> Outcome | None:
    """What speaks against it that the sums are those of one beat of each worker."""
    if len(sums) != len(given):
        return Failed(f"the exchange was given {len(given)} numbers and returned {len(sums)}")
    filled = [head // _ONE for head in sums[::WORDS]]
    twice = [place for place, count in enumerate(filled) if count > 1]
    if twice:
        return Broken("twice", Ranks.of(twice))
    mine = slice(rank * WORDS, (rank + 1) * WORDS)
    for place, (ours, theirs) in enumerate(zip(given[mine], sums[mine], strict=True)):
        if ours != theirs:
            return Failed(
                f"the exchange made {theirs} of {ours} at place {rank * WORDS + place}, which is "
                f"zero in all other workers: it must return the exact sums of 64-bit integers"
            )
    absent = [place for place, count in enumerate(filled) if count != 1]
    if absent:
        return Failed("the exchange was without some of the workers", Ranks.of(absent))
    return None


class _Call(NamedTuple):
    vector: Sequence[int]
    deadline: float
    done: threading.Event
    answer: list[Sequence[int] | BaseException]
    """Empty until it is done."""


class _Aside:
    """Calls an exchange in a thread, one call after the other."""

    def __init__(self, exchange: AllReduce, clock: Callable[[], float]) -> None:
        self._exchange = exchange
        self._clock = clock
        self._calls: queue.SimpleQueue[_Call | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: _Call | None = None
        """The last call, unless it has returned."""

    def call(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        """Return the sums.

        Raises:
            TimeoutError: the exchange has not returned in time, or that of an earlier call.
            Exception: what the exchange raised.
        """
        deadline = self._clock() + timeout
        if self._stuck is not None:
            late = self._clock() - self._stuck.deadline
            if not self._stuck.done.wait(timeout):
                raise TimeoutError(
                    f"an earlier exchange has not returned yet, {late + timeout:.1f} s after the "
                    f"end of its time"
                )
            self._stuck = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regrow-exchange", daemon=True)
            self._thread.start()
        call = self._stuck = _Call(vector, deadline, threading.Event(), [])
        self._calls.put(call)
        if not call.done.wait(max(0.0, deadline - self._clock())):
            raise TimeoutError(f"the exchange has not returned within its {timeout:g} s")
        self._stuck = None
        (answer,) = call.answer
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, BaseException):  # would end whoever asked, and not the process
            raise RuntimeError(f"the exchange raised {answer!r}") from answer
        return answer

    def close(self, last: Callable[[], object] | None) -> None:
        """End the thread when it has made its last call; not waited for if an exchange is stuck."""
        if self._thread is not None:
            self._calls.put(last)
            self._calls.put(None)
            if self._stuck is None:
                self._thread.join()
        elif last is not None:
            last()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not isinstance(call, _Call):
                call()
                continue
            left = max(0.0, call.deadline - self._clock())
            left -= min(_RESERVE_S, _RESERVE_SHARE * left)
            try:
                call.answer.append(self._exchange(call.vector, left))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever called
                call.answer.append(error)
            call.done.set()
