"""Pauses between tries, as pure figures."""

from __future__ import annotations

import random
import threading

import pytest

from regrow.utils import Backoff, poll_until


def test_each_pause_is_longer_than_the_last_up_to_the_limit() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_pause_ends_with_the_time_that_is_left() -> None:
    backoff = Backoff(1.0, 8.0, factor=4.0)
    assert [backoff.next(left) for left in (0.5, 3.0, -1.0)] == [0.5, 3.0, 0.0]


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(0.1, 1.0)
    backoff.next()
    backoff.next()
    backoff.reset()
    assert backoff.next() == 0.1


@pytest.mark.parametrize(("failures", "pause"), [(0, 0.0), (1, 1.0), (3, 4.0), (10**9, 30.0)])
def test_the_pause_after_any_number_of_failures(failures: int, pause: float) -> None:
    assert Backoff(1.0, 30.0).pause(failures) == pause


def test_jitter_shortens_a_pause_by_its_share_at_most() -> None:
    drawn = [Backoff(1.0, 1.0, jitter=0.5, source=random.Random(n)).next() for n in range(100)]
    assert min(drawn) >= 0.5
    assert max(drawn) <= 1.0
    assert len(set(drawn)) > 90


def test_jitter_has_a_source_of_its_own_by_default() -> None:
    assert 0.5 <= Backoff(1.0, 1.0, jitter=0.5).next() <= 1.0


def test_polling_ends_when_the_condition_holds() -> None:
    answers = iter([False, False, True])
    assert poll_until(lambda: next(answers), Backoff(0.001, 0.001), 60.0, threading.Event())


def test_polling_asks_once_where_there_is_no_time() -> None:
    answers = iter([False])
    assert not poll_until(lambda: next(answers), Backoff(60.0, 60.0), 0.0, threading.Event())


def test_an_interruption_ends_polling() -> None:
    interrupted = threading.Event()

    def ready() -> bool:
        interrupted.set()
        return False

    assert not poll_until(ready, Backoff(60.0, 60.0), 3600.0, interrupted)
