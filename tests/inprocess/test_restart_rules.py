"""Rules of a restart: cause, phases, pauses and progress, without a clock."""

from __future__ import annotations

import json
import math

import pytest
from regrow.inprocess.monitor_thread import RankShouldRestart

from regrow import _progress
from regrow.inprocess.call.restart import (
    Next,
    Pauses,
    Timeline,
    after,
    cause_of,
    may_be_replaced,
    report_exception,
    report_restart,
    root_cause,
)
from regrow.inprocess.exception import (
    BarrierTimeout,
    EvictedError,
    HealthCheckError,
    LinkLostError,
    ReplaceRank,
    RestartAbort,
)
from regrow.inprocess.group.group_messages import ORIGIN, Fault, Faults, Joined
from regrow.inprocess.state import State
from regrow.inprocess.watchdog.rank_progress import RankPhase, RankProgress


def faults(*kinds: str, now: float = 10.0) -> Faults:
    records = tuple(Fault(kind, rank, "", 9.0 + rank / 10) for rank, kind in enumerate(kinds))
    return Faults(0, records, now)


def test_a_rank_that_gives_up_first_is_not_the_cause_for_which_the_others_give_up() -> None:
    before = ValueError("the fault")
    gave_up = Fault("BASE_EXCEPTION", 0, "RestartAbort('no further restart') <- ...", 9.0)
    assert cause_of(gave_up, 2, 1, None, before) is before
    assert "RestartAbort" in str(cause_of(gave_up, 0, 1, None))  # no restart came before
    another = Fault("EXCEPTION", 0, "ValueError('another')", 9.0)
    assert "another" in str(cause_of(another, 2, 1, None, before))


@pytest.mark.parametrize(
    ("error", "interrupted", "received", "follows"),
    [
        (ValueError(), False, False, Next.REPORT),
        (ValueError(), False, True, Next.RESTART),
        (RankShouldRestart(), True, True, Next.RESTART),
        (RankShouldRestart(), True, False, Next.RESTART),
        (RankShouldRestart(), False, False, Next.REPORT),  # the function raised it
        (RankShouldRestart(), False, True, Next.RESTART),
        (SystemExit(), False, False, Next.LEAVE),
        (KeyboardInterrupt(), True, True, Next.LEAVE),
    ],
)
def test_an_exception_before_the_rank_received_a_fault_is_its_own_fault(
    error: BaseException, interrupted: bool, received: bool, follows: Next
) -> None:
    assert after(error, interrupted=interrupted, received=received) is follows


@pytest.mark.parametrize(
    ("error", "replaced"),
    [
        (ReplaceRank("this GPU is slow"), True),
        (HealthCheckError("a broken GPU"), True),
        (SystemExit(1), True),
        (SystemExit(0), False),
        (KeyboardInterrupt(), False),
        (RestartAbort(), False),
        (EvictedError("its connection was lost"), True),  # the others wait for a replacement
        (LinkLostError("the store is gone"), False),
        (BarrierTimeout("rank 2 is missing"), False),
    ],
)
def test_which_ranks_another_process_may_continue(error: BaseException, replaced: bool) -> None:
    assert may_be_replaced(error) is replaced


def test_a_process_that_ended_is_the_cause_of_exceptions_that_came_before_its_report() -> None:
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
    timeline = Timeline(faults("EXCEPTION", "TERMINATED", now=9.5), received_at=100.0)
    timeline.reached("aborted", 100.25)
    timeline.reached("met", 101.0)
    assert timeline.seconds() == {"detected": 0.0, "notified": 0.5, "aborted": 0.75, "met": 1.5}


@pytest.mark.parametrize("letter", ["\u00e9", "\N{GRINNING FACE}", "\0"])
def test_the_event_of_a_restart_fits_into_a_message_to_the_agent(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(_progress, "send_event", lambda name, **fields: sent.append(fields))
    cause = Fault("TERMINATED", 10**6, letter * 1000, 9.0)
    timeline = Timeline(Faults(10**6, (cause,), 9.5), received_at=100.0)
    for phase in ("aborted", "finalized", "checked", "met", "called"):
        timeline.reached(phase, 200.123456)
    timeline.lost = tuple(range(10**6, 10**6 + 100))
    timeline.joined = tuple(Joined(rank, rank, "x" * ORIGIN) for rank in timeline.lost)
    report_restart(timeline, State(rank=0, world_size=10**6, iteration=10**6))
    (fields,) = sent
    line = _progress.event_line("regrow.inprocess.restarted", fields)
    assert len(line) < _progress.LONGEST
    assert json.loads(line)["fields"] == fields
    assert fields["replaced"] == list(range(10**6, 10**6 + 16))
    assert fields["origins"] == ["x" * ORIGIN] * 8


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The fields of the events that this process sends to an agent, which it seems to have."""
    found: list[dict[str, object]] = []
    monkeypatch.setattr(_progress, "send_event", lambda name, **fields: found.append(fields))
    monkeypatch.setattr(_progress, "has_agent", lambda: True)
    return found


def raised(text: str) -> ValueError:
    """Return an exception that has been raised."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any text
        raise ValueError(text)
    return caught.value


@pytest.mark.parametrize("letter", ["\u00e9", "\N{GRINNING FACE}", "\0", '"', "x\n"])
def test_the_event_of_an_exception_fits_into_a_message_and_keeps_the_end_of_its_traceback(
    letter: str, sent: list[dict[str, object]]
) -> None:
    report_exception(10**6, 10**6, raised(letter * 5000), None)
    (fields,) = sent
    line = _progress.event_line("regrow.inprocess.raised", fields)
    assert len(line) <= _progress.LONGEST
    assert (fields["iteration"], fields["rank"]) == (10**6, 10**6)
    if letter == "\u00e9":
        assert "ValueError: \u00e9\u00e9" in str(fields["traceback"])


def test_the_same_traceback_is_sent_once(sent: list[dict[str, object]]) -> None:
    error, before = raised("bad"), None
    for iteration in range(3):
        before = report_exception(iteration, 1, error, before)
    report_exception(3, 1, raised("another"), before)
    kept = [isinstance(fields["traceback"], str) for fields in sent]
    assert kept == [True, False, False, True]


def test_without_an_agent_no_traceback_is_made(
    sent: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "has_agent", lambda: False)
    assert report_exception(0, 1, raised("bad"), None) is None
    assert sent == []


def test_half_of_a_surrogate_pair_passes_in_an_event() -> None:
    line = _progress.event_line("x", {"message": "\ud800"})
    assert json.loads(line)["fields"]["message"] == "\ud800"


def test_that_a_fault_is_detected_takes_time_from_when_the_first_one_happened() -> None:
    exception = Fault("EXCEPTION", 0, "", 9.25, 0.125)
    death = Fault("TERMINATED", 1, "", 9.75, 0.75)  # the cause, which was recorded later
    timeline = Timeline(Faults(0, (exception, death), 9.5), received_at=100.0)
    timeline.reached("aborted", 100.5)
    assert timeline.seconds() == {"detected": 0.25, "notified": 0.5, "aborted": 1.0}
    timeline.faults = Faults(0, (exception,), 9.5)
    assert timeline.seconds() == {"detected": 0.125, "notified": 0.375, "aborted": 0.875}


def waits(*times: float) -> list[float]:
    """Return the pauses of restarts after faults at these times of the store's clock."""
    pauses = Pauses()
    return [pauses.after(Faults(0, (Fault("EXCEPTION", 0, "", at),), at + 1)) for at in times]


def test_restarts_wait_only_when_they_are_many_and_then_longer_and_longer_up_to_a_second() -> None:
    durations = waits(*(5 + n / 100 for n in range(30)))
    assert durations[:20] == [0.0] * 20
    assert durations[20:] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]


def test_restarts_that_are_seconds_apart_never_wait() -> None:
    assert waits(*(3.0 * n for n in range(100))) == [0.0] * 100


def test_a_function_that_has_run_for_a_while_is_restarted_at_once_again() -> None:
    assert waits(*([1.0] * 25), 61.5)[-2:] == [0.16, 0.0]


def test_automatic_progress_is_due_from_the_beginning_and_manual_from_the_first_ping() -> None:
    progress = RankProgress(allowed=10.0)
    assert progress.stale(1000.0) is None
    progress.enter(RankPhase.FUNCTION, 100.0)
    assert progress.due == 110.0
    progress.automatic_at = 108.0
    assert (progress.due, progress.stale(117.9), progress.stale(118.0)) == (
        118.0,
        None,
        "automatic",
    )
    progress.manual_at = 109.0
    progress.automatic_at = 115.0
    assert (progress.due, progress.stale(119.0)) == (119.0, "manual")
    progress.enter(RankPhase.FUNCTION, 120.0)
    assert (progress.due, progress.stale(129.9)) == (130.0, None)


def test_a_rank_at_rest_or_in_a_suspended_section_is_not_checked() -> None:
    progress = RankProgress(allowed=10.0)
    progress.enter(RankPhase.FUNCTION, 100.0)
    progress.manual_at = 100.0
    progress.suspended += 1
    progress.suspended += 1
    progress.resume(300.0)
    assert (progress.due, progress.stale(400.0)) == (math.inf, None)
    progress.resume(400.0)
    assert (progress.due, progress.stale(409.9), progress.stale(410.0)) == (
        410.0,
        None,
        "automatic",
    )
    progress.enter(RankPhase.RESTING, 500.0)
    assert (progress.due, progress.stale(600.0)) == (math.inf, None)


@pytest.mark.parametrize("phase", RankPhase)
def test_no_time_out_applies_to_a_rank_that_the_agent_stops(phase: RankPhase) -> None:
    progress = RankProgress(allowed=10.0, hard=15.0)
    progress.enter(phase, 100.0, within=14.0)
    progress.abort_limit, progress.stopping = 110.0, True
    assert (progress.due, progress.ends, progress.limited) == (math.inf, math.inf, False)


def test_the_hard_time_out_follows_the_soft_one_in_the_function_and_between_two_calls() -> None:
    def deadlines() -> tuple[float, float]:
        return progress.due, progress.ends

    progress = RankProgress(allowed=10.0, hard=15.0)
    assert deadlines() == (math.inf, math.inf)
    progress.enter(RankPhase.FUNCTION, 100.0)
    progress.manual_at = 100.0
    progress.automatic_at = 108.0
    assert deadlines() == (110.0, 115.0)
    progress.suspended += 1
    assert deadlines() == (math.inf, math.inf)
    progress.enter(RankPhase.RECOVERING, 200.0)  # the suspension ends with the function
    assert deadlines() == (210.0, 215.0)
    assert progress.stale(210.0) == "automatic"
    progress.automatic_at = 207.0
    assert deadlines() == (217.0, 222.0)
    progress.enter(RankPhase.RESTING, 230.0)  # the process only has to run
    assert deadlines() == (math.inf, 245.0)
    progress.automatic_at = 240.0
    assert deadlines() == (math.inf, 255.0)
    progress.enter(RankPhase.RECOVERING, 300.0, within=14.0)
    assert (deadlines(), progress.limited) == ((310.0, 314.0), True)
    progress.enter(RankPhase.RECOVERING, 300.0)
    assert (deadlines(), progress.limited) == ((310.0, 315.0), False)
    progress.enter(RankPhase.FUNCTION, 301.0)
    assert deadlines() == (311.0, 316.0)
    progress.abort_limit, progress.automatic_at = 318.0, 304.0
    assert (deadlines(), progress.limited) == ((314.0, 318.0), True)
    progress.automatic_at = 302.0
    assert (deadlines(), progress.limited) == ((312.0, 317.0), False)
    progress.suspended += 1
    assert (deadlines(), progress.limited) == ((math.inf, 318.0), True)
    progress.abort_limit = math.inf
    assert (deadlines(), progress.limited) == ((math.inf, math.inf), False)
    progress.phase = RankPhase.ENDED
    assert deadlines() == (math.inf, math.inf)
