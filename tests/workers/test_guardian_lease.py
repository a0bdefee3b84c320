"""The guardian kills the workers when their lease expires."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from time import monotonic

import pytest

from helpers.processes import EventQueue, alive, wait_until
from regrow.workers import Guardian
from regrow.workers.guardian import procfs
from regrow.workers.guardian.client import WorkerSetup
from regrow.workers.guardian.events import Exited, Gone, GuardianLost, Lapsed, Started

#: Two more generations, one a daemon in a session of its own.
FAMILY = "sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &)"
FAR = 1000.0


class Leased:
    """A guardian, and its reports of expired leases."""

    def __init__(self) -> None:
        self.lapses: list[Lapsed] = []
        self.guardian = Guardian(on_lapse=self.lapses.append)

    def run(self, *argv: str) -> tuple[Started, EventQueue]:
        events = EventQueue()
        self.guardian.spawn(argv, WorkerSetup(os.environ, events))
        return events.next(Started), events

    def pid(self) -> int:
        pid = self.guardian.pid
        assert pid is not None
        return pid


@pytest.fixture
def leased() -> Iterator[Leased]:
    leased = Leased()
    yield leased
    assert leased.guardian.close(30)


def _past(deadline: float) -> None:
    wait_until(lambda: monotonic() > deadline, "the end of the lease")


def test_workers_and_all_that_they_started_end_with_the_lease(leased: Leased) -> None:
    started, events = leased.run("sh", "-c", FAMILY + "; trap '' TERM; wait")
    token = procfs.mark(started.pid)
    assert token is not None
    wait_until(lambda: len(procfs.family((), (token,))) == 5, "the family")
    leased.guardian.renew(monotonic())
    ended = events.next(Exited)
    assert (ended.code, ended.stopping) == (-signal.SIGKILL, False)
    events.next(Gone)
    assert procfs.family((), (token,)) == []
    (lapsed,) = leased.lapses
    assert (lapsed.killed, lapsed.monotonic <= ended.monotonic) == (1, True)


def test_a_lease_that_is_renewed_in_time_is_not_over(leased: Leased) -> None:
    started, _ = leased.run("sleep", "1000")
    end = monotonic() + 2.0
    leased.guardian.renew(end)
    leased.guardian.renew(end + FAR)
    _past(end)
    leased.run("true")[1].next(Gone)
    assert alive(started.pid)
    assert leased.lapses == []


def test_no_worker_starts_before_the_lease_is_renewed(leased: Leased) -> None:
    leased.guardian.start()
    leased.guardian.renew(monotonic())
    events = EventQueue()
    leased.guardian.spawn(["sleep", "1000"], WorkerSetup(os.environ, events))
    assert events.next(Exited).code == -signal.SIGKILL
    events.next(Gone)
    leased.guardian.renew(None)
    assert leased.run("true")[1].next(Exited).code == 0


def test_a_replaced_guardian_knows_the_lease(leased: Leased) -> None:
    _, events = leased.run("sleep", "1000")
    os.kill(leased.pid(), signal.SIGKILL)
    events.next(GuardianLost)
    leased.guardian.renew(monotonic())
    late = EventQueue()
    leased.guardian.spawn(["sleep", "1000"], WorkerSetup(os.environ, late))
    assert late.next(Exited).code == -signal.SIGKILL


def test_a_host_that_was_paused_checks_the_lease_before_it_starts_workers(
    leased: Leased,
) -> None:
    started, events = leased.run("sleep", "1000")
    end = monotonic() + 0.2
    leased.guardian.renew(end)
    os.kill(leased.pid(), signal.SIGSTOP)
    late = EventQueue()
    leased.guardian.spawn(["sleep", "1000"], WorkerSetup(os.environ, late))
    _past(end)
    os.kill(leased.pid(), signal.SIGCONT)
    assert events.next(Exited).code == -signal.SIGKILL
    assert late.next(Exited).code == -signal.SIGKILL
    assert not alive(started.pid)


def test_a_renewal_that_arrived_while_the_guardian_was_suspended_counts(leased: Leased) -> None:
    started, _ = leased.run("sleep", "1000")
    end = monotonic() + 2.0
    leased.guardian.renew(end)
    os.kill(leased.pid(), signal.SIGSTOP)
    leased.guardian.renew(end + FAR)
    _past(end)
    os.kill(leased.pid(), signal.SIGCONT)
    leased.run("true")[1].next(Gone)
    assert alive(started.pid)


def test_adopted_workers_end_with_the_lease_too(leased: Leased) -> None:
    mark = leased.guardian.mark()
    pid = os.posix_spawnp(
        "sh", ["sh", "-c", FAMILY + "; wait"], {**os.environ, procfs.MARK: mark}, setsid=True
    )
    events = EventQueue()
    leased.guardian.adopt(pid, mark, WorkerSetup(os.environ, events))
    wait_until(lambda: len(procfs.family((), (mark.encode(),))) == 5, "the family")
    leased.guardian.renew(monotonic())
    events.next(Exited)
    os.waitpid(pid, 0)
    events.next(Gone)
    assert procfs.family((), (mark.encode(),)) == []
