"""Decisions of the guardian, without processes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.workers.guardian.records import LeaseTimer, WorkerRecord, WorkerRecords

PATIENCE = 50
GRACE = 30


def _records(*pids: int) -> WorkerRecords:
    """Workers 1, 2, ... with these pids, each with the mark /agent/<number>/."""
    records = WorkerRecords(PATIENCE)
    for number, pid in enumerate(pids, 1):
        record = WorkerRecord(number, b"/agent/%d/" % number, GRACE)
        record.pid = pid
        records.add(record)
    return records


def _worker() -> WorkerRecord:
    return WorkerRecord(1, b"/agent/1/", GRACE)


# --- the lease

TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(-3, 5)), min_size=1, max_size=30
)


@given(TURNS)
def test_a_lease_is_over_exactly_from_its_end_and_expires_once(
    turns: list[tuple[int, int | None]],
) -> None:
    timer, now, until, expired = LeaseTimer(), 10, None, False
    for passed, renewal in turns:
        now += passed
        if renewal is not None:
            expired = expired and until == now + renewal  # a repeated end is no renewal
            until = now + renewal
            timer.renew(until)
        over = until is not None and now >= until
        assert timer.is_over(now) is over
        assert timer.expire(now) is (over and not expired)
        expired = expired or over
        # A sleep until then, and no longer, misses no end of a lease.
        assert timer.next_check() == (None if expired else until)


def test_when_the_lease_is_over_all_workers_are_due() -> None:
    records = _records(100, 200)
    records.by_number[1].stop(signal.SIGTERM, 1000, now=5)
    records.end_lease(now=10)
    to_kill, to_give_up = records.due(now=10)
    assert ([record.number for record in to_kill], to_give_up) == ([1, 2], [])


def test_a_worker_that_is_being_killed_keeps_its_kill_timeout_when_the_lease_is_over() -> None:
    records = _records(100)
    records.by_number[1].stop(signal.SIGTERM, 0, now=5)
    records.due(now=5)
    records.end_lease(now=40)
    assert records.next_check() == 5 + PATIENCE


# --- stops and graces


@pytest.mark.parametrize(
    ("stops", "deadline"),
    [
        ([(0, 30)], 30),
        ([(0, 30), (10, 5)], 15),  # shorter
        ([(0, 30), (10, 50)], 50),  # longer, counted from the first
        ([(0, 30), (10, 25)], 30),  # a later end than the first's, but no longer grace
        ([(0, 30), (31, 50)], 30),  # it is over
    ],
)
def test_the_grace_of_a_stop(stops: list[tuple[int, int]], deadline: int) -> None:
    record = _worker()
    for now, grace in stops:
        # Time zero stands for "not stopped yet".
        assert record.stop(signal.SIGTERM, grace, now=now + 1)
    assert record.deadline == deadline + 1


def test_a_stop_without_a_signal_changes_the_grace_only() -> None:
    record = _worker()
    assert not record.stop(0, 30, now=1)
    assert (record.deadline, record.stopped) == (31, False)


def test_a_worker_that_ended_before_the_stop_ended_by_itself() -> None:
    record = _worker()
    record.end(now=1)
    assert not record.stop(signal.SIGTERM, 5, now=2)
    assert (record.deadline, record.stopped) == (7, False)


def test_orphans_have_their_own_grace_or_the_rest_of_the_stops() -> None:
    alone, stopped = _worker(), _worker()
    alone.end(now=1)
    stopped.stop(signal.SIGTERM, 5, now=1)
    stopped.end(now=3)
    assert (alone.deadline, stopped.deadline) == (1 + GRACE, 6)


def test_a_worker_is_killed_once_after_its_grace_and_abandoned_after_the_kill_timeout() -> None:
    records = _records(100)
    (record,) = records.by_number.values()
    assert records.next_check() is None
    record.stop(signal.SIGTERM, 10, now=1)
    assert records.next_check() == 11
    assert records.due(now=10) == ([], [])
    assert records.due(now=11) == ([record], [])
    assert records.next_check() == 11 + PATIENCE
    assert records.due(now=12) == ([], [])
    assert records.due(now=11 + PATIENCE) == ([], [record])


# --- orphans


def test_an_orphan_gets_one_sigterm_and_is_killed_after_the_grace() -> None:
    record = _worker()
    assert record.orphan_signals(7) == (signal.SIGTERM, signal.SIGCONT)
    assert record.orphan_signals(7) == ()
    record.killing = True
    assert record.orphan_signals(7) == (signal.SIGKILL,)
    assert record.orphan_signals(8) == (signal.SIGKILL,)
    assert record.orphans == {7, 8}


def test_an_orphan_belongs_to_the_worker_of_its_mark_or_its_session() -> None:
    records = _records(100, 200)
    for record in records.by_number.values():
        records.reaped(record.pid, 0)
        record.end(now=1)
    identities = {7: (b"/agent/1/", 7), 8: (None, 200), 9: (b"/agent/2/job/3/", 9)}
    found = records.orphans_of_ended(identities, identities.__getitem__)
    assert found == {1: [7], 2: [8, 9]}


def test_a_process_of_a_running_worker_is_left_alone() -> None:
    records = _records(100, 200)
    records.reaped(100, 0)
    records.by_number[1].end(now=1)
    assert records.orphans_of_ended([7, 200], lambda pid: (b"/agent/2/", pid)) == {}


def test_an_orphan_without_mark_or_session_belongs_to_the_last_worker() -> None:
    records = _records(100, 200)
    records.reaped(100, 0)
    records.by_number[1].end(now=1)
    assert records.orphans_of_ended([7], lambda _: (None, 7)) == {}
    records.reaped(200, 0)
    records.by_number[2].end(now=2)
    assert records.orphans_of_ended([7], lambda _: (None, 7)) == {2: [7]}


def test_an_orphan_is_looked_up_once_until_it_is_reaped() -> None:
    records, asked = _records(100), []

    def look_up(pid: int) -> tuple[bytes | None, int | None]:
        asked.append(pid)
        return b"/agent/1/", None

    records.reaped(100, 0)
    records.by_number[1].end(now=1)
    for _ in range(2):
        records.orphans_of_ended([7], look_up)
    assert asked == [7]
    records.reaped(7, 0)  # the number may be another process's now
    records.orphans_of_ended([7], look_up)
    assert asked == [7, 7]


def test_processes_that_have_not_ended_are_counted_when_a_worker_is_given_up() -> None:
    records = _records(100)
    record = records.by_number[1]
    record.end(now=1)
    records.reaped(100, 0)
    records.orphans_of_ended([7, 8], lambda _: (b"/agent/1/", None))
    for pid in (7, 8):
        record.orphan_signals(pid)
    records.reaped(7, 9)
    assert records.stuck(record) == 1
