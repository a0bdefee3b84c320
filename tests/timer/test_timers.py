"""The timers as data, compared with a model that checks every timer each time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer.rules import SPARE, Timers

_AT = st.one_of(st.integers(0, 20).map(float), st.sampled_from([-math.inf, math.inf]))
_WORKER = st.integers(1, 3)
_SCOPE = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arm"), _WORKER, _SCOPE, _AT),
        st.tuples(st.just("release"), _WORKER, _SCOPE, st.just(0.0)),
        st.tuples(st.just("clear"), _WORKER, st.just(""), st.just(0.0)),
    ),
    max_size=60,
)


class Model:
    """A model of `Timers` without a heap."""

    def __init__(self) -> None:
        self.armed: dict[tuple[int, str], tuple[float, int, str]] = {}
        self.serial = 0

    def apply(self, what: str, worker: int, scope: str, at: float) -> None:
        if what == "arm":
            self.serial += 1
            self.armed[worker, scope] = (at, self.serial, f"{worker}{scope}")
        elif what == "release":
            self.armed.pop((worker, scope), None)
        else:
            self.armed = {key: timer for key, timer in self.armed.items() if key[0] != worker}

    def due(self, now: float) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for (worker, _), timer in sorted(self.armed.items(), key=lambda item: item[1]):
            if timer[0] <= now:
                found.setdefault(worker, []).append(timer[2])
        return found


def apply(timers: Timers[int, str], what: str, worker: int, scope: str, at: float) -> None:
    if what == "arm":
        timers.arm(worker, scope, at, f"{worker}{scope}")
    elif what == "release":
        timers.release(worker, scope)
    else:
        timers.clear(worker)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.booleans())
def test_timers_behave_like_a_model_without_a_heap(
    steps: list[tuple[str, int, str, float]], asked_between: bool
) -> None:
    timers: Timers[int, str] = Timers()
    model = Model()
    for index, step in enumerate(steps, 1):
        apply(timers, *step)
        model.apply(*step)
        if asked_between or index == len(steps):  # the call tidies up the heap
            earliest = min((at for at, _, _ in model.armed.values()), default=None)
            for now in (5.0, 20.0, math.inf):
                due, expected = timers.due(now), model.due(now)
                assert (due, list(due)) == (expected, list(expected))
            assert timers.next() == earliest
            assert len(timers) == len(model.armed)
            assert {pid for pid in (1, 2, 3) if timers.count(pid)} == {w for w, _ in model.armed}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2000), st.booleans())
def test_the_heap_is_at_most_twice_as_long_as_the_timers(
    live: int, requests: int, released: bool
) -> None:
    timers: Timers[int, int] = Timers()
    for number in range(live):
        timers.arm(number, "kept", 1.0, number)
    for number in range(requests):
        timers.arm(0, f"scope {number % 7}", 2.0 + number, number)
        if released:
            timers.release(0, f"scope {number % 7}")
        assert timers.size <= 2 * len(timers) + SPARE


def test_a_heap_shrinks_when_all_are_released_or_cleared() -> None:
    timers: Timers[int, int] = Timers()
    for number in range(1000):
        timers.arm(number % 2, f"{number}", 1.0, number)
    for number in range(0, 1000, 2):
        timers.release(0, f"{number}")
    timers.clear(1)
    assert (len(timers), timers.next()) == (0, None)
    assert timers.size <= SPARE


def test_due_disarms_no_timer() -> None:
    timers: Timers[str, str] = Timers()
    timers.arm("worker", "scope", 1.0, "request")
    assert timers.due(1.0) == timers.due(1.0) == {"worker": ["request"]}
    assert timers.due(0.999) == {}


def test_equal_deadlines_are_in_the_order_of_arming() -> None:
    timers: Timers[str, str] = Timers()
    for worker in "cab":
        timers.arm(worker, "scope", 1.0, worker)
    assert list(timers.due(1.0)) == ["c", "a", "b"]


def test_workers_of_any_kind_share_a_deadline() -> None:
    timers: Timers[object, int] = Timers()  # workers that have no order among each other
    timers.arm(1, "scope", 1.0, 1)
    timers.arm("one", "scope", 1.0, 2)
    timers.arm((1, None), "scope", 1.0, 3)
    assert timers.due(1.0) == {1: [1], "one": [2], (1, None): [3]}


def test_a_deadline_that_is_not_a_number_is_refused() -> None:
    timers: Timers[int, None] = Timers()
    with pytest.raises(ValueError, match="'step' of worker 7 is not a number: nan"):
        timers.arm(7, "step", math.nan, None)
    assert (len(timers), timers.next()) == (0, None)
