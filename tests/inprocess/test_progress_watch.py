"""What a rank's own thread has the monitor of its host know."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from processes import wait_until

from regrow.inprocess._deadlines import NOT_JUDGED, Word
from regrow.inprocess._hard_watch import HardWatch
from regrow.inprocess._progress_watch import SoftWatch


class Outside:
    """A monitor's side, which hears each word unless none is there."""

    def __init__(self) -> None:
        self.changes = 0
        self.heard: list[Word] = []
        self.starts: Callable[[], object] = lambda: None
        """What happens while a monitor is being started, once."""
        self.is_there = True

    def change(self, until: float | None, iteration: int = NOT_JUDGED) -> None:
        self.changes += 1
        self.say(self.changes, until, iteration)

    def say(self, change: int, until: float | None, iteration: int = NOT_JUDGED) -> None:
        if self.is_there:
            self.heard.append(Word(change, float("inf") if until is None else until, iteration))

    def keep(self, *_: object) -> None:
        if not self.is_there:
            self.starts()
            self.is_there = True

    def close(self) -> None: ...

    @property
    def knows(self) -> Word:
        """What counts."""
        latest = max(word.change for word in self.heard)
        return next(word for word in reversed(self.heard) if word.change == latest)


def watching(outside: Outside, told: list[int], soft: float) -> SoftWatch:
    return SoftWatch(
        soft,
        0.02,
        lambda iteration, _: told.append(iteration),
        outside=cast("HardWatch", outside),
        hard=90.0,
    )


def test_a_monitor_knows_what_is_judged_until_the_rank_has_reported_it_itself() -> None:
    outside, told = Outside(), list[int]()
    watch = watching(outside, told, 0.2)
    watch.begin(4)
    assert outside.knows.iteration == 4
    with watch.unjudged():
        assert outside.knows.until == float("inf")
    watch.ping()  # and never again
    wait_until(lambda: told == [4], "it reports itself")
    wait_until(lambda: outside.knows.iteration == NOT_JUDGED, "and says so")
    assert outside.knows.until < float("inf")
    watch.begin(5)
    assert outside.knows.iteration == 5
    watch.recover()  # from a fault of another rank
    assert outside.knows.iteration == NOT_JUDGED
    assert outside.knows.until < float("inf")
    watch.rest()
    assert outside.knows.until == float("inf")
    watch.close()


def test_what_is_said_while_a_monitor_is_started_reaches_it() -> None:
    outside = Outside()
    watch = watching(outside, [], 60.0)
    outside.starts = watch.rest
    outside.is_there = False
    watch.begin(0)
    wait_until(lambda: outside.is_there and bool(outside.heard), "a monitor is started")
    wait_until(lambda: outside.knows.until == float("inf"), "it knows that the rank is at rest")
    watch.close()
