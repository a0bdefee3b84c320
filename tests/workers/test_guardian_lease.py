"""A lease that is over: the workers die by their guardian's hand, whatever became of the agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import Heard, alive, wait_until

from regrow.workers import Guardian, _procfs
from regrow.workers._deadman import Deadman
from regrow.workers._guardian_client import Command
from regrow.workers._guardian_events import Exited, Gone, GuardianLost, Lapsed, Started

#: Two more generations, one a daemon in a session of its own.
FAMILY = "sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &)"
FAR = 1000.0


class Leased:
    """A guardian, and what it tells of leases."""

    def __init__(self) -> None:
        self.lapses: list[Lapsed] = []
        self.guardian = Guardian(on_lapse=self.lapses.append)

    def run(self, *argv: str) -> tuple[Started, Heard]:
        heard = Heard()
        self.guardian.spawn(Command(argv, dict(os.environ)), heard)
        return heard.next(Started), heard

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
    started, heard = leased.run("sh", "-c", FAMILY + "; trap '' TERM; wait")
    token = _procfs.mark(started.pid)
    assert token is not None
    wait_until(lambda: len(_procfs.family((), (token,))) == 5, "the family")
    leased.guardian.renew(monotonic())
    ended = heard.next(Exited)
    assert (ended.code, ended.stopping) == (-signal.SIGKILL, False)
    heard.next(Gone)
    assert _procfs.family((), (token,)) == []
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
    heard = Heard()
    leased.guardian.spawn(Command(("sleep", "1000"), dict(os.environ)), heard)
    assert heard.next(Exited).code == -signal.SIGKILL
    heard.next(Gone)
    leased.guardian.renew(None)
    assert leased.run("true")[1].next(Exited).code == 0


def test_a_guardian_that_takes_over_knows_the_lease(leased: Leased) -> None:
    _, heard = leased.run("sleep", "1000")
    os.kill(leased.pid(), signal.SIGKILL)
    heard.next(GuardianLost)
    leased.guardian.renew(monotonic())
    late = Heard()
    leased.guardian.spawn(Command(("sleep", "1000"), dict(os.environ)), late)
    assert late.next(Exited).code == -signal.SIGKILL


def test_a_host_that_was_paused_starts_nobody_before_it_has_looked_at_the_lease(
    leased: Leased,
) -> None:
    started, heard = leased.run("sleep", "1000")
    end = monotonic() + 0.2
    leased.guardian.renew(end)
    os.kill(leased.pid(), signal.SIGSTOP)
    late = Heard()
    leased.guardian.spawn(Command(("sleep", "1000"), dict(os.environ)), late)
    _past(end)
    os.kill(leased.pid(), signal.SIGCONT)
    assert heard.next(Exited).code == -signal.SIGKILL
    assert late.next(Exited).code == -signal.SIGKILL
    assert not alive(started.pid)


def test_a_renewal_that_lay_there_while_the_guardian_was_held_counts(leased: Leased) -> None:
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
        "sh", ["sh", "-c", FAMILY + "; wait"], {**os.environ, _procfs.MARK: mark}, setsid=True
    )
    heard = Heard()
    leased.guardian.adopt(pid, mark, heard)
    wait_until(lambda: len(_procfs.family((), (mark.encode(),))) == 5, "the family")
    leased.guardian.renew(monotonic())
    heard.next(Exited)
    os.waitpid(pid, 0)
    heard.next(Gone)
    assert _procfs.family((), (mark.encode(),)) == []


# --- the pure part

TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(-3, 5)), min_size=1, max_size=30
)


@given(TURNS)
def test_a_lease_is_over_exactly_from_its_end_and_acted_on_once(
    turns: list[tuple[int, int | None]],
) -> None:
    deadman, now, until, acted = Deadman(), 10, None, False
    for passed, renewal in turns:
        now += passed
        if renewal is not None:
            until, acted = now + renewal, False
            deadman.renew(until)
        over = until is not None and now >= until
        assert deadman.over(now) is over
        assert deadman.lapses(now) is (over and not acted)
        acted = acted or over
        # Whoever sleeps until then, and no longer, misses no end of a lease.
        assert deadman.next() == (None if acted else until)
