"""Beats as one vector that any exchange can sum up.

Each worker has `WORDS` places in the vector. It fills in its own places, and leaves the places of
the other workers zero. So the sum of all vectors holds all beats, and each worker reaches the same
result from it (`merge`). A sum does not show which worker did not take part. An exchange without
one of the workers fails, and names no rank unless its error does (`MissingRanks`).

The highest part of the first word of a place counts the workers that filled it in. The count is 0
if the exchange ran among the wrong workers, and 2 if a worker was started twice under one rank.
Each worker also checks that the exchange returns its own words unchanged, because an exchange may
lose digits. No word is above 2**53, so double precision keeps all words exact.

An exchange runs in a thread of its own, because the heartbeat must continue when a call does not
return. A user's function may ignore its time-out. A store may wait for a lost host over a
connection without time-outs. With the thread, the heartbeat counts failures and ends with a report.
Without it, only the kernel's timers would end the process, with no report, and only if the user set
no `on_failure`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Final

from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import (
    NO_STEP,
    PHASE_BYTES,
    AllReduce,
    AllReduceExchange,
    Beat,
    Broken,
    ExchangeFailed,
    Memory,
    Outcome,
    WorkerProgress,
    merge,
)
from regrow.utils import describe, headline, is_a, start_thread

__all__ = ["WORDS", "MissingRanks", "VectorMeeting", "beats_of", "vector_of"]

_PHASE_WORD: Final = 6
"""Bytes of a phase's name in a word."""
_HEAD: Final = 4
"""Words of a worker before the name of its phase."""
WORDS: Final = _HEAD + PHASE_BYTES // _PHASE_WORD
"""Words of a worker: head, incarnation (two), step, phase."""
_ONE: Final = 1 << 32
"""The unit of the count in a head: one worker filled the place in.

The token and the flags below use the lower bits.
"""
_JOINED: Final = 1 << 16
_LEAVING: Final = 1 << 17
_HAS_STEP: Final = 1 << 18
_HALF: Final = 31
"""Bits of an incarnation in its second word."""

_RESERVE_SHARE: Final = 0.1
_RESERVE_S: Final = 0.2
"""The exchange gets less than the remaining time, so that its own time-out report comes first.

The difference is `_RESERVE_SHARE` of the remaining time, at most `_RESERVE_S`.
"""


class MissingRanks(RuntimeError):
    """An exchange failed because of ranks that it can name.

    Args:
        text: what happened.
        missing: the ranks that did not take part.
    """

    def __init__(self, text: str, missing: Iterable[int]) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class VectorMeeting:
    """The `Meeting` of workers that can only sum up vectors.

    Args:
        exchange: sums up the vectors; if it has a method `close`, that method is called at the end.
        world_size: number of workers.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        exchange: AllReduceExchange | AllReduce,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._size = world_size
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: Future[Sequence[int]] | None = None
        """The last call of the exchange, unless it has returned."""
        self._memory: Memory = ()
        self._last: tuple[float, tuple[Beat, ...]] = (0.0, ())
        """The time of the last full set, and its beats."""

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """See `Meeting.beat`."""
        given = vector_of(beat, self._size)
        try:
            sums = [int(each) for each in self._call(given, timeout)]
        except Exception as error:  # noqa: BLE001 - any exchange may fail in its own way
            return ExchangeFailed(headline(error), Ranks.of(getattr(error, "missing", ())))
        fault = _fault(given, sums, beat.rank)
        if fault is not None:
            return fault
        beats = tuple(beats_of(sums))
        self._last = self._clock(), beats
        self._memory, outcome = merge(self._memory, beats)
        return outcome

    def leave(self, beat: Beat) -> None:
        """See `Meeting.leave`: a sum ends only with all workers."""

    def listen(self, notify: Callable[[Outcome], None]) -> None:
        """See `Meeting.listen`: nothing arrives between two exchanges."""

    def table(self, timeout: float) -> list[WorkerProgress]:
        """See `Meeting.table`: as of the last exchange in which all workers took part."""
        at, beats = self._last
        age = self._clock() - at
        return [beat.progress(age) for beat in beats]

    def close(self) -> None:
        """See `Meeting.close`: closes the exchange after its last call, without waiting for it."""
        last = getattr(self._exchange, "close", lambda: None)
        if self._thread is None:
            last()
            return
        self._jobs.put(last)
        self._jobs.put(None)
        if self._pending is None:
            self._thread.join()

    def _call(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        """Call the exchange in its thread and return the sums.

        Raises:
            TimeoutError: this call, or an earlier one, has not returned in time.
            Exception: an error of the exchange.
        """
        deadline = self._clock() + timeout
        if self._pending is not None and not wait([self._pending], timeout).done:
            raise TimeoutError("an earlier exchange has not returned yet")
        if self._thread is None:
            self._thread = start_thread(self._run, "regrow-exchange")
        call = self._pending = Future[Sequence[int]]()
        self._jobs.put(lambda: self._answer(call, vector, deadline))
        if not wait([call], max(0.0, deadline - self._clock())).done:
            raise TimeoutError(f"the exchange has not returned within {timeout:g} s")
        self._pending = None
        error = call.exception()
        if error is None:
            return call.result()
        if is_a(error, Exception):
            raise error  # `result` does not raise an exception that is false
        # Otherwise it ends the caller's thread, but not the process.
        raise RuntimeError(f"the exchange raised {describe(error)}") from error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _answer(self, call: Future[Sequence[int]], vector: Sequence[int], deadline: float) -> None:
        exchange = self._exchange
        all_reduce = exchange.all_reduce if isinstance(exchange, AllReduceExchange) else exchange
        left = max(0.0, deadline - self._clock())
        left -= min(_RESERVE_S, _RESERVE_SHARE * left)
        try:
            call.set_result(all_reduce(vector, left))
        except BaseException as error:  # noqa: BLE001 - raised again in `_call`
            call.set_exception(error)


def vector_of(beat: Beat, world_size: int) -> list[int]:
    """Convert one worker's beat to a vector; leaves `final` out."""
    has_step = beat.step != NO_STEP
    head = _ONE | beat.token | _JOINED * beat.joined | _LEAVING * beat.leaving
    head |= _HAS_STEP * has_step
    high, low = divmod(beat.incarnation, 1 << _HALF)
    phase = beat.phase.encode().ljust(PHASE_BYTES, b"\0")
    words = [head, high, low, beat.step if has_step else 0]
    words += [
        int.from_bytes(phase[at : at + _PHASE_WORD]) for at in range(0, PHASE_BYTES, _PHASE_WORD)
    ]
    vector = [0] * (WORDS * world_size)
    vector[beat.rank * WORDS : (beat.rank + 1) * WORDS] = words
    return vector


def beats_of(sums: Sequence[int]) -> list[Beat]:
    """Convert sums to the beats of all workers, by rank."""
    return [_beat(at // WORDS, sums[at : at + WORDS]) for at in range(0, len(sums), WORDS)]


def _beat(rank: int, words: Sequence[int]) -> Beat:
    head, high, low, step, *phase = words
    name = b"".join(word.to_bytes(_PHASE_WORD) for word in phase)
    return Beat(
        rank,
        head & 0xFFFF,
        high << _HALF | low,
        bool(head & _JOINED),
        step if head & _HAS_STEP else NO_STEP,
        name.rstrip(b"\0").decode("utf-8", "replace"),
        bool(head & _LEAVING),
    )


def _fault(given: Sequence[int], sums: Sequence[int], rank: int) -> Outcome | None:
    """Return why the sums are not one beat of each worker; None: the sums are valid."""
    if len(sums) != len(given):
        return ExchangeFailed(
            f"the exchange got {len(given)} numbers and returned {len(sums)}: it must return all"
        )
    filled = [head // _ONE for head in sums[::WORDS]]
    twice = [place for place, count in enumerate(filled) if count > 1]
    if twice:
        return Broken("twice", Ranks.of(twice))
    mine = slice(rank * WORDS, (rank + 1) * WORDS)
    for place, (ours, theirs) in enumerate(zip(given[mine], sums[mine], strict=True)):
        if ours != theirs:
            return ExchangeFailed(
                f"the exchange returned {theirs} for {ours} at place {rank * WORDS + place}, where "
                f"all other workers give 0: it must return the exact sums of 64-bit integers"
            )
    absent = [place for place, count in enumerate(filled) if count != 1]
    if absent:
        return ExchangeFailed("some workers did not take part", Ranks.of(absent))
    return None
