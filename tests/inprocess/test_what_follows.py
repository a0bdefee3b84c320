"""Whose fault it is, when each phase was over, and whether there is progress: all without time."""

from __future__ import annotations

import pytest

from regrow.inprocess._link import Fault, Faults
from regrow.inprocess._pause import Pauses
from regrow.inprocess._progress import Progress
from regrow.inprocess._restart import Next, Timeline, after, root_cause
from regrow.inprocess._spared import RankShouldRestart


def faults(*kinds: str, now: float = 10.0) -> Faults:
    records = tuple(Fault(kind, rank, "", 9.0 + rank / 10) for rank, kind in enumerate(kinds))
    return Faults(0, records, now)


@pytest.mark.parametrize(
    ("error", "ended", "interrupted", "told", "follows"),
    [
        (None, False, False, False, Next.RETURN),
        (None, True, False, True, Next.RESTART),
        (ValueError(), False, False, False, Next.REPORT),
        (ValueError(), False, False, True, Next.RESTART),
        (RankShouldRestart(), False, True, True, Next.RESTART),
        (RankShouldRestart(), False, False, False, Next.LEAVE),  # of the user's own making
        (SystemExit(), False, False, False, Next.LEAVE),
        (KeyboardInterrupt(), False, True, True, Next.LEAVE),
    ],
)
def test_what_is_raised_before_a_fault_is_known_is_the_ranks_own(
    error: BaseException | None, ended: bool, interrupted: bool, told: bool, follows: Next
) -> None:
    assert after(error, ended=ended, interrupted=interrupted, told=told) is follows


def test_a_process_that_ended_is_the_cause_of_exceptions_that_came_before_its_news() -> None:
    cause = root_cause(faults("EXCEPTION", "EXCEPTION", "TERMINATED", "TERMINATED"))
    assert cause is not None
    assert (cause.kind, cause.rank) == ("TERMINATED", 2)


def test_what_a_process_had_failed_by_before_it_ended_is_the_cause() -> None:
    records = (
        Fault("EXCEPTION", 0, "", 9.0),
        Fault("SOFT_TIMEOUT", 1, "", 9.1),
        Fault("HARD_TIMEOUT", 1, "", 9.2),
    )
    assert root_cause(Faults(0, records, 10.0)) == records[1]


def test_the_first_fault_is_the_cause_where_no_process_ended() -> None:
    cause = root_cause(faults("EXCEPTION", "BASE_EXCEPTION"))
    assert cause is not None
    assert cause.rank == 0
    assert root_cause(faults()) is None


def test_phases_are_counted_from_the_first_fault() -> None:
    timeline = Timeline(faults("EXCEPTION", "TERMINATED", now=9.5), told_at=100.0)
    timeline.reached("aborted", 100.25)
    timeline.reached("met", 101.0)
    assert timeline.seconds() == {"detected": 0.0, "told": 0.5, "aborted": 0.75, "met": 1.5}


def test_that_a_fault_is_detected_takes_time_from_when_the_first_one_happened() -> None:
    exception = Fault("EXCEPTION", 0, "", 9.25, 0.125)
    death = Fault("TERMINATED", 1, "", 9.75, 0.75)  # the cause, which was recorded later
    timeline = Timeline(Faults(0, (exception, death), 9.5), told_at=100.0)
    timeline.reached("aborted", 100.5)
    assert timeline.seconds() == {"detected": 0.25, "told": 0.5, "aborted": 1.0}
    timeline.faults = Faults(0, (exception,), 9.5)
    assert timeline.seconds() == {"detected": 0.125, "told": 0.375, "aborted": 0.875}


def test_without_a_common_clock_they_are_counted_from_when_this_rank_knew() -> None:
    timeline = Timeline(Faults(0, (Fault("EXCEPTION", 0, "", 0.0),), 0.0), told_at=100.0)
    timeline.reached("aborted", 100.25)
    assert timeline.seconds() == {"detected": 0.0, "told": 0.0, "aborted": 0.25}


def waits(*times: float) -> list[float]:
    """What the restarts wait after faults at these times of the store's clock."""
    pauses = Pauses()
    return [
        pauses.after(Faults(0, (Fault("EXCEPTION", 0, "", at),), at + 1), told_at=0.0)
        for at in times
    ]


def test_restarts_wait_only_when_they_are_many_and_then_longer_and_longer_up_to_a_second() -> None:
    told = waits(*(5 + n / 100 for n in range(30)))
    assert told[:20] == [0.0] * 20
    assert told[20:] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]


def test_restarts_that_are_seconds_apart_never_wait() -> None:
    assert waits(*(3.0 * n for n in range(100))) == [0.0] * 100


def test_a_function_that_has_run_for_a_while_is_restarted_at_once_again() -> None:
    assert waits(*([1.0] * 25), 61.5)[-2:] == [0.16, 0.0]


def test_without_a_common_clock_restarts_are_counted_by_this_ranks_own() -> None:
    pauses = Pauses()
    fault = Faults(0, (Fault("EXCEPTION", 0, "", 0.0),), 0.0)
    assert [pauses.after(fault, told_at=3.0 * n) for n in range(100)] == [0.0] * 100
    assert pauses.after(Faults(0, (), 0.0), told_at=300.0) == 0.0


def test_automatic_progress_is_due_from_the_beginning_and_manual_from_the_first_ping() -> None:
    progress = Progress(allowed=10.0)
    assert progress.stale(1000.0) is None
    progress.begin(100.0)
    assert progress.due == 110.0
    progress.ran(108.0)
    assert (progress.due, progress.stale(117.9), progress.stale(118.0)) == (
        118.0,
        None,
        "automatic",
    )
    progress.ping(109.0)
    progress.ran(115.0)
    assert (progress.due, progress.stale(119.0)) == (119.0, "manual")
    progress.begin(120.0)
    assert (progress.due, progress.stale(129.9)) == (130.0, None)


def test_what_rests_or_has_asked_for_it_is_not_judged() -> None:
    progress = Progress(allowed=10.0)
    progress.begin(100.0)
    progress.ping(100.0)
    progress.suspend()
    progress.suspend()
    progress.resume(300.0)
    assert (progress.due, progress.stale(400.0)) == (None, None)
    progress.resume(400.0)
    assert (progress.due, progress.stale(409.9), progress.stale(410.0)) == (
        410.0,
        None,
        "automatic",
    )
    progress.rest()
    progress.ran(500.0)
    assert (progress.due, progress.stale(600.0)) == (None, None)


def test_the_hard_time_out_follows_the_soft_one_in_the_function_and_between_two_calls() -> None:
    def deadlines() -> tuple[float | None, float | None]:
        return progress.due, progress.ends

    progress = Progress(allowed=10.0, hard=15.0)
    assert deadlines() == (None, None)
    progress.begin(100.0)
    progress.ping(100.0)
    progress.ran(108.0)
    assert deadlines() == (110.0, 115.0)
    progress.suspend()
    assert deadlines() == (None, None)
    progress.recover(200.0)  # whoever the function was left by, nobody is spared now
    assert deadlines() == (210.0, 215.0)
    assert progress.stale(210.0) == "automatic"
    progress.ran(207.0)
    assert deadlines() == (217.0, 222.0)
    progress.rest()
    assert deadlines() == (None, None)
    progress.recover(300.0)
    progress.begin(301.0)
    assert deadlines() == (311.0, 316.0)
