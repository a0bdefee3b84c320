"""Messages of a rank's own thread to the monitor of its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from helpers.processes import wait_until
from regrow.inprocess.watchdog.monitor_client import LIMITED, UNCHECKED, HardWatch, RankDeadline
from regrow.inprocess.watchdog.rank_progress import RankProgress, SoftWatch


class Outside:
    """A monitor that receives each message while it runs."""

    def __init__(self) -> None:
        self.changes = 0
        self.received: list[RankDeadline] = []
        self.starts: Callable[[], object] = lambda: None
        """What happens while a monitor is being started, once."""
        self.is_there = True

    def change(self, until: float, iteration: int) -> None:
        self.changes += 1
        self.send(RankDeadline(self.changes, until, iteration))

    def send(self, deadline: RankDeadline) -> None:
        if self.is_there:
            self.received.append(deadline)

    def reconnect(self, deadline: RankDeadline) -> None:
        if not self.is_there:
            self.starts()
            self.is_there = True

    def close(self) -> None: ...

    @property
    def knows(self) -> RankDeadline:
        """The message that counts."""
        latest = max(deadline.change for deadline in self.received)
        return next(each for each in reversed(self.received) if each.change == latest)


def watching(
    outside: Outside, reported: list[int], soft: float, check: Callable[[], None] = lambda: None
) -> SoftWatch:
    return SoftWatch(
        RankProgress(soft, 90.0),
        0.02,
        lambda iteration, _: reported.append(iteration),
        check,
        cast("HardWatch", outside),
    )


def test_a_monitor_checks_an_iteration_until_the_rank_has_reported_it() -> None:
    outside, reported = Outside(), list[int]()
    watch = watching(outside, reported, 0.2)
    watch.begin(4)
    assert outside.knows.iteration == 4
    with watch.suspended():
        assert outside.knows.until == float("inf")
    watch.ping()  # and never again
    wait_until(lambda: reported == [4], "it reports itself")
    wait_until(lambda: outside.knows.iteration == UNCHECKED, "and the monitor knows")
    assert outside.knows.until < float("inf")
    watch.begin(5)
    assert outside.knows.iteration == 5
    watch.recover()  # from a fault of another rank
    assert outside.knows.iteration == UNCHECKED
    assert outside.knows.until < float("inf")
    watch.close()


def test_a_monitor_knows_that_a_rank_at_rest_runs() -> None:
    outside = Outside()
    watch = watching(outside, [], 60.0)
    first = outside.knows.until
    assert first < float("inf")
    wait_until(lambda: outside.knows.until > first, "its thread shows that the process runs")
    assert outside.knows.iteration == UNCHECKED
    watch.close()


def test_a_monitor_ends_a_rank_that_makes_progress_and_does_not_return_in_time() -> None:
    outside = Outside()
    watch = watching(outside, [], 60.0)
    watch.recover(within=5.0)
    until = outside.knows.until
    assert outside.knows.iteration == LIMITED
    count = len(outside.received)
    wait_until(lambda: len(outside.received) > count + 3, "its thread looks at its progress")
    assert outside.knows.until == until
    watch.close()


def test_a_monitor_ends_a_rank_whose_abort_hangs_while_its_function_makes_progress() -> None:
    outside = Outside()
    watch = watching(outside, [], 60.0)
    watch.begin(0)
    with watch.suspended(), watch.aborting():
        wait_until(lambda: outside.knows.iteration == LIMITED, "the monitor knows of the limit")
        until = outside.knows.until
        assert until < float("inf")
        count = len(outside.received)
        wait_until(lambda: len(outside.received) > count + 3, "the rank makes progress")
        assert outside.knows.until == until
    wait_until(lambda: outside.knows.iteration == 0, "the monitor knows that the abort is over")
    wait_until(lambda: outside.knows.until > until, "the rank may continue")
    watch.close()


def test_a_change_during_the_start_of_a_monitor_reaches_it() -> None:
    outside = Outside()
    watch = watching(outside, [], 60.0)
    outside.starts = watch.rest
    outside.is_there = False
    watch.begin(0)
    wait_until(lambda: outside.is_there and bool(outside.received), "a monitor is started")
    wait_until(lambda: outside.knows.iteration == UNCHECKED, "it knows that the rank is at rest")
    watch.close()


def test_a_periodic_check_that_raises_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported: list[int] = []

    def check() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    watch = watching(Outside(), reported, 0.2, check)
    watch.begin(4)
    watch.ping()  # and never again
    wait_until(lambda: reported == [4], "it reports the soft time-out")
    watch.close()
    assert caplog.text.count("is not repeated") == 1
