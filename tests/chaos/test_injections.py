"""Which failures count as injected."""

from __future__ import annotations

from regrow.chaos import Injections
from regrow.chaos.record import AFTER_S


def test_a_failure_of_the_rank_after_the_fault_is_injected() -> None:
    found = Injections()
    found.add("kill", {1}, 10.0, None, ends=True)
    assert found.cause(1, 10.01) == "kill"
    assert found.cause(1, 9.99) is None
    assert found.cause(2, 10.01) is None


def test_a_failure_long_after_the_end_of_the_fault_is_not() -> None:
    found = Injections()
    found.add("stop", {1}, 10.0, 5.0, ends=False)
    assert found.cause(1, 15 + AFTER_S) == "stop"
    assert found.cause(1, 15.1 + AFTER_S) is None


def test_a_fault_without_end_lasts_as_long_as_its_worker() -> None:
    found = Injections()
    found.add("hang", {1}, 10.0, None, ends=False)
    assert found.cause(1, 10_000.0) == "hang"
    found.new_workers(500.0)
    assert found.cause(1, 10_000.0) is None


def test_the_latest_fault_is_the_cause() -> None:
    found = Injections()
    found.add("hang", {1}, 10.0, None, ends=False)
    found.add("cut", {0, 1}, 20.0, 5.0, ends=False)
    assert found.cause(1, 21.0) == "cut"
