"""Beats as a vector that any exchange sums up, without sockets; the exchanges are functions."""

from __future__ import annotations

import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.unspeakable import UNSPEAKABLE
from regrow.heartbeat.failure import NO_RANKS, Ranks
from regrow.heartbeat.merge import (
    NO_STEP,
    Agreed,
    AllReduceExchange,
    Beat,
    Broken,
    ExchangeFailed,
    WorkerProgress,
    WorkersLeft,
    clip,
)
from regrow.heartbeat.vector_exchange import MissingRanks, VectorMeeting, beats_of, vector_of

TOKEN = 4711
LONG = 30.0  # seconds
SHORT = 0.05

beats = st.builds(
    Beat,
    rank=st.just(0),
    token=st.integers(0, 65535),
    incarnation=st.integers(1, 2**62),
    joined=st.booleans(),
    step=st.integers(NO_STEP, 2**53),
    phase=st.text(st.characters(exclude_characters="\0", codec="utf-8")).map(clip),
    leaving=st.booleans(),
    final=st.just(False),  # a vector leaves it out
)


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the meetings of a test at its end, because they have threads."""
    made: list[VectorMeeting] = []
    begin = VectorMeeting.__init__

    def begun(self: VectorMeeting, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        made.append(self)

    monkeypatch.setattr(VectorMeeting, "__init__", begun)
    yield
    for each in made:
        each.close()


def beats_of_ranks(size: int) -> list[Beat]:
    """A beat of each rank, all in step."""
    return [Beat(rank, TOKEN, rank + 1, True, step=rank) for rank in range(size)]


def total(vectors: Sequence[Sequence[int]]) -> list[int]:
    return [sum(place) for place in zip(*vectors, strict=True)]


def adding(others: Sequence[Beat], size: int) -> Callable[[Sequence[int], float], list[int]]:
    """Return an exchange of the caller with these workers."""
    theirs = [vector_of(beat, size) for beat in others]
    return lambda vector, timeout: total([vector, *theirs])


@given(st.lists(beats, min_size=1, max_size=5))
def test_the_sum_holds_the_beats_of_all_workers(crowd: list[Beat]) -> None:
    numbered = [beat._replace(rank=rank) for rank, beat in enumerate(crowd)]
    assert beats_of(total([vector_of(beat, len(numbered)) for beat in numbered])) == numbered


@given(beats)
@example(Beat(0, 65535, 2**62, True, 2**53))
def test_an_exchange_in_double_precision_loses_nothing(beat: Beat) -> None:
    doubles = [float(word) for word in vector_of(beat, 1)]
    assert beats_of([int(word) for word in doubles]) == [beat]


def test_a_plain_function_is_an_exchange() -> None:
    first, *others = beats_of_ranks(3)
    outcome = VectorMeeting(adding(others, 3), 3).beat(first, LONG)
    assert isinstance(outcome, Agreed)
    assert outcome.token == TOKEN


def test_a_new_process_shows_by_its_incarnation() -> None:
    first, second = beats_of_ranks(2)
    others = [second]
    meeting = VectorMeeting(lambda vector, timeout: adding(others, 2)(vector, timeout), 2)
    assert isinstance(meeting.beat(first, LONG), Agreed)
    others[0] = second._replace(incarnation=99)
    assert meeting.beat(first, LONG) == Broken("restarted", Ranks.of([1]))


def test_the_others_learn_that_a_worker_leaves() -> None:
    first, second = beats_of_ranks(2)
    meeting = VectorMeeting(adding([second._replace(leaving=True)], 2), 2)
    assert meeting.beat(first, LONG) == WorkersLeft(Ranks.of([1]))


def test_all_workers_detect_two_processes_of_one_rank() -> None:
    first, second, third = beats_of_ranks(3)
    others = [second, second._replace(incarnation=99), third]
    assert VectorMeeting(adding(others, 3), 3).beat(first, LONG) == Broken("twice", Ranks.of([1]))
    assert VectorMeeting(adding([first, second, third], 3), 3).beat(second, LONG) == Broken(
        "twice", Ranks.of([1])
    )


def test_an_exchange_without_some_workers_fails() -> None:
    first, second, _ = beats_of_ranks(3)
    outcome = VectorMeeting(adding([second], 3), 3).beat(first, LONG)
    assert outcome == ExchangeFailed("some workers did not take part", Ranks.of([2]))


def test_an_exchange_that_loses_digits_fails() -> None:
    (only,) = beats_of_ranks(1)
    lossy = VectorMeeting(lambda vector, timeout: [word % 2**32 for word in vector], 1)
    outcome = lossy.beat(only, LONG)
    assert isinstance(outcome, ExchangeFailed)
    head = TOKEN + 2**16 + 2**18  # joined, with a step
    assert f"returned {head} for {head + 2**32} at place 0" in outcome.why


def test_an_exchange_that_returns_too_few_numbers_fails() -> None:
    (only,) = beats_of_ranks(1)
    outcome = VectorMeeting(lambda vector, timeout: vector[1:], 1).beat(only, LONG)
    assert outcome == ExchangeFailed(
        "the exchange got 8 numbers and returned 7: it must return all"
    )


def test_the_error_of_an_exchange_names_its_missing_ranks() -> None:
    def fails(vector: Sequence[int], timeout: float) -> Sequence[int]:
        raise MissingRanks("no answer", [2, 1])

    def breaks(vector: Sequence[int], timeout: float) -> Sequence[int]:
        raise ZeroDivisionError("by zero")

    (only,) = beats_of_ranks(1)
    failed = VectorMeeting(fails, 1).beat(only, LONG)
    assert failed == ExchangeFailed("MissingRanks: no answer", Ranks.of([1, 2]))
    assert VectorMeeting(breaks, 1).beat(only, LONG) == ExchangeFailed(
        "ZeroDivisionError: by zero", NO_RANKS
    )


def test_a_failed_exchange_leaves_the_memory_unchanged() -> None:
    first, second = beats_of_ranks(2)
    failing = [True, True, False]

    def exchange(vector: Sequence[int], timeout: float) -> Sequence[int]:
        if failing.pop(0):
            raise TimeoutError("not in time")
        return adding([second], 2)(vector, timeout)

    meeting = VectorMeeting(exchange, 2)
    outcomes = [meeting.beat(first, LONG) for _ in range(3)]
    assert [type(outcome) for outcome in outcomes] == [ExchangeFailed, ExchangeFailed, Agreed]


def test_every_beat_fails_until_a_stuck_exchange_returns() -> None:
    (only,) = beats_of_ranks(1)
    back = threading.Event()
    calls = []

    def exchange(vector: Sequence[int], timeout: float) -> Sequence[int]:
        calls.append(timeout)
        if len(calls) == 1:
            back.wait(LONG)
        return vector

    meeting = VectorMeeting(exchange, 1)
    first, second = meeting.beat(only, SHORT), meeting.beat(only, SHORT)
    assert isinstance(first, ExchangeFailed)
    assert isinstance(second, ExchangeFailed)
    assert "has not returned within 0.05 s" in first.why
    assert "an earlier exchange has not returned yet" in second.why
    back.set()
    assert isinstance(meeting.beat(only, LONG), Agreed)
    assert len(calls) == 2
    assert calls[0] < SHORT, "the time-out report of the exchange comes first"


class Stuck:
    """An exchange that returns only after `may` is set."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.returned = False

    def __call__(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        self.may.wait(LONG)
        self.returned = True
        return vector


def test_close_does_not_wait_for_a_stuck_exchange() -> None:
    stuck = Stuck()
    meeting = VectorMeeting(stuck, 1)
    assert isinstance(meeting.beat(beats_of_ranks(1)[0], SHORT), ExchangeFailed)
    meeting.close()
    assert not stuck.returned
    stuck.may.set()


def test_close_does_not_wait_for_an_interrupted_exchange() -> None:
    stuck = Stuck()
    here = threading.current_thread()
    looks = []

    def clock() -> float:
        if threading.current_thread() is here:
            looks.append(here)
            if len(looks) == 2:
                raise KeyboardInterrupt
        return 0.0

    meeting = VectorMeeting(stuck, 1, clock)
    with pytest.raises(KeyboardInterrupt):
        meeting.beat(beats_of_ranks(1)[0], LONG)
    meeting.close()
    assert not stuck.returned
    stuck.may.set()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), CancelledError()])
def test_a_base_exception_is_a_failed_exchange(error: BaseException) -> None:
    def exchange(vector: Sequence[int], timeout: float) -> Sequence[int]:
        raise error

    outcome = VectorMeeting(exchange, 1).beat(beats_of_ranks(1)[0], LONG)
    assert outcome == ExchangeFailed(f"RuntimeError: the exchange raised {error!r}")


def test_an_exchange_is_closed_in_the_thread_that_called_it() -> None:
    threads = []

    class Closing:
        def all_reduce(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
            threads.append(threading.current_thread())
            return vector

        def close(self) -> None:
            threads.append(threading.current_thread())

    exchange = Closing()
    assert isinstance(exchange, AllReduceExchange)
    meeting = VectorMeeting(exchange, 1)
    meeting.beat(beats_of_ranks(1)[0], LONG)
    meeting.close()
    called, closed = threads
    assert called is closed
    assert not called.is_alive()


def test_a_meeting_without_beats_closes_its_exchange() -> None:
    closed = []

    class Closing:
        def all_reduce(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
            return vector

        def close(self) -> None:
            closed.append(True)

    VectorMeeting(Closing(), 1).close()
    assert closed == [True]


def test_the_table_is_that_of_the_last_complete_beat() -> None:
    now = [100.0]
    first, second = beats_of_ranks(2)
    others = adding([second._replace(step=NO_STEP, phase="eval")], 2)
    meeting = VectorMeeting(others, 2, clock=lambda: now[0])
    assert meeting.table(LONG) == []
    meeting.beat(first, LONG)
    now[0] += 7
    assert meeting.table(LONG) == [
        WorkerProgress(0, 0, None, 7.0),
        WorkerProgress(1, None, "eval", 7.0),
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_gets_the_same_result(rank: int) -> None:
    all_beats = beats_of_ranks(3)
    others = [beat for beat in all_beats if beat.rank != rank]
    result = VectorMeeting(adding(others, 3), 3).beat(all_beats[rank], LONG)
    assert result == VectorMeeting(adding(all_beats[1:], 3), 3).beat(all_beats[0], LONG)


@pytest.mark.parametrize("kind", UNSPEAKABLE)
def test_an_exchange_may_raise_an_error_without_a_text(kind: type[Exception]) -> None:
    def exchange(vector: Sequence[int], timeout: float) -> Sequence[int]:
        raise kind

    (beat,) = beats_of_ranks(1)
    outcome = VectorMeeting(exchange, 1).beat(beat, LONG)
    assert isinstance(outcome, ExchangeFailed)
    assert kind.__name__ in outcome.why
