"""What a rank's link promises, over the store server and over a c10d store alike."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from storing import Background, ServerThread, eventually

from regrow.inprocess import _c10d_rules, _spared
from regrow.inprocess._c10d_keys import Keys
from regrow.inprocess._c10d_link import C10dLink
from regrow.inprocess._link import (
    BarrierOverflow,
    BarrierTimeout,
    CountedOutError,
    Fault,
    Link,
    LinkClosedError,
    LinkError,
    Timeouts,
)
from regrow.inprocess._service import InprocessService
from regrow.inprocess._service_link import ServiceLink
from regrow.store import MemoryStore, StoreConnectionError

PATIENT = Timeouts(barrier=30.0, completion=30.0, last_call=30.0, heartbeat=30.0)

Opens = Callable[..., Link]


@pytest.fixture(params=["service", "c10d"])
def opens(request: pytest.FixtureRequest) -> Iterator[Opens]:
    """Opens the link of a rank: `opens(rank, size, timeouts)`."""
    links: list[Link] = []
    server = ServerThread(services={"inprocess": InprocessService()})
    shared = MemoryStore()

    def open(rank: int, size: int, timeouts: Timeouts = PATIENT) -> Link:
        link: Link
        if request.param == "service":
            link = ServiceLink(
                lambda _: server.connect(session_grace=0.2), "group", rank, size, timeouts
            )
        else:
            link = C10dLink(lambda: shared, "group", rank, size, timeouts)
        links.append(link)
        return link

    yield open
    for link in links:
        link.close()
    server.stop()


def everyone(links: list[Link], call: Callable[[Link, int], Any]) -> list[Any]:
    """Make a call on each link at once; returns what each returned, or the LinkError it raised."""

    def one(link: Link, rank: int) -> Any:
        try:
            return call(link, rank)
        except LinkError as error:
            return error

    calls = [Background(one, link, rank) for rank, link in enumerate(links)]
    return [call.result() for call in calls]


def begun(opens: Opens, size: int, timeouts: Timeouts = PATIENT) -> list[Link]:
    """The links of ranks that run iteration 0."""
    links = [opens(rank, size, timeouts) for rank in range(size)]
    assert everyone(links, lambda link, _: link.join()) == [0] * size
    assert everyone(links, lambda link, rank: link.enter(0, rank, size)) == [None] * size
    return links


def healed(links: list[Link], iteration: int) -> list[Any]:
    """Have the ranks go from a fault to the next iteration."""
    everyone(links, lambda link, _: link.follow(iteration))
    everyone(links, lambda link, _: link.heard(iteration))
    return everyone(links, lambda link, _: link.ready(iteration))


def kinds(faults: Any) -> list[tuple[str, int, str]]:
    return [(fault.kind, fault.rank, fault.message) for fault in faults.records]


def test_a_call_without_faults_is_over_for_all_at_once(opens: Opens) -> None:
    links = begun(opens, 3)
    following = [Background(link.follow, 0) for link in links]
    first = Background(links[0].done, 0)
    links[0].completed(0)
    assert first.running()
    assert everyone(links[1:], lambda link, _: link.done(0)) == [None] * 2
    assert [call.result() for call in [first, *following]] == [None] * 4


def test_a_fault_is_told_to_all_and_all_meet_again(opens: Opens) -> None:
    links = begun(opens, 3)
    links[1].report(0, "EXCEPTION", "a mistake")
    told = everyone(links, lambda link, _: link.follow(0))
    assert [kinds(faults) for faults in told] == [[("EXCEPTION", 1, "a mistake")]] * 3
    everyone(links, lambda link, _: link.heard(0))
    met = everyone(links, lambda link, _: link.ready(0))
    assert [(m.iteration, m.terminated, m.lost) for m in met] == [(1, (), ())] * 3
    assert [kinds(m.faults) for m in met] == [[("EXCEPTION", 1, "a mistake")]] * 3
    assert everyone(links, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3


def test_a_soft_time_out_is_recorded_once_whoever_sees_it(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].overdue(1, 0, "seen by its monitor")
    links[2].overdue(1, 0, "seen by its monitor")
    links[1].report(0, "SOFT_TIMEOUT", "seen by itself")
    links[2].report(0, "SOFT_TIMEOUT", "another one")
    records = [("SOFT_TIMEOUT", 1, "seen by its monitor"), ("SOFT_TIMEOUT", 2, "another one")]
    met = healed(links, 0)
    assert [(m.lost, kinds(m.faults)) for m in met] == [((), records)] * 3
    assert everyone(links, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3
    links[0].overdue(1, 1, "and again")
    assert kinds(links[1].follow(1)) == [("SOFT_TIMEOUT", 1, "and again")]


def healed_three_times(shared: MemoryStore, size: int) -> list[Link]:
    """Links over a c10d store, so far that nothing is left there of iteration 0."""
    links: list[Link] = [C10dLink(lambda: shared, "group", r, size, PATIENT) for r in range(size)]
    everyone(links, lambda link, _: link.join())
    for iteration in range(3):
        everyone(links, lambda link, rank: link.enter(iteration, rank, size))  # noqa: B023
        links[0].report(iteration, "EXCEPTION", "a mistake")
        healed(links, iteration)
    return links


def test_what_is_told_too_late_of_a_rank_is_told_of_no_other_iteration_and_leaves_nothing() -> None:
    shared = MemoryStore()
    links = healed_three_times(shared, 2)
    links[0].overdue(1, 0, "it hung")
    assert not shared.check(["group/0/faults"])
    assert not shared.check(["group/0/end"])
    for link in links:
        link.close()


def test_an_end_that_is_told_of_an_iteration_long_over_is_one_in_that_which_runs() -> None:
    shared = MemoryStore()
    links = healed_three_times(shared, 3)
    everyone(links, lambda link, rank: link.enter(3, rank, 3))
    keys, fault = Keys(lambda: shared, "group/"), Fault("TERMINATED", 1, "it was killed", 0.0)
    assert _c10d_rules.end_rank(keys, 0, fault)
    met = healed([links[0], links[2]], 3)
    assert [(m.lost, kinds(m.faults)) for m in met] == [((1,), [tuple(fault)[:3]])] * 2
    assert not _c10d_rules.end_rank(keys, 0, fault)
    assert not _c10d_rules.accuse(keys, fault)
    assert not shared.check(["group/0/gone"])
    assert not shared.check(["group/0/end"])
    keys.close()
    for link in links:
        link.close()


def test_an_end_that_is_told_when_nothing_is_left_of_the_group_is_none() -> None:
    keys = Keys(MemoryStore, "group/")
    assert not _c10d_rules.end_rank(keys, 2, Fault("TERMINATED", 1, "it was killed", 0.0))
    keys.close()


def test_who_sees_a_soft_time_out_of_a_rank_that_was_counted_out_is_none_the_worse(
    opens: Opens,
) -> None:
    links = begun(opens, 3)
    links[0].accuse(1, "HARD_TIMEOUT", "it hangs")
    links[0].overdue(1, 0, "it hung")
    met = healed([links[0], links[2]], 0)
    assert [m.lost for m in met] == [(1,)] * 2


def test_the_last_call_is_over_when_all_have_heard(opens: Opens) -> None:
    links = begun(opens, 2)
    links[0].report(0, "EXCEPTION", "first")
    first = Background(links[0].heard, 0)
    links[1].report(0, "SOFT_TIMEOUT", "second")
    assert first.running()
    links[1].heard(0)
    both = [("EXCEPTION", 0, "first"), ("SOFT_TIMEOUT", 1, "second")]
    assert kinds(first.result()) == both


def test_who_does_not_hear_does_not_hold_up_the_last_call_for_ever(opens: Opens) -> None:
    links = begun(opens, 2, PATIENT._replace(last_call=0.05))
    links[0].report(0, "EXCEPTION", "first")
    assert kinds(links[0].heard(0)) == [("EXCEPTION", 0, "first")]


def test_a_rank_that_leaves_is_told_the_root_cause_and_not_waited_for(opens: Opens) -> None:
    links = begun(opens, 4)
    links[3].report(0, "EXCEPTION", "the root")
    told = links[1].terminated(0, "EXCEPTION", "sick")
    assert kinds(told)[0] == ("EXCEPTION", 3, "the root")
    assert links[1].follow(0) is None or kinds(links[1].follow(0)) == kinds(told)
    met = healed([links[0], links[2], links[3]], 0)
    assert [(m.terminated, m.lost) for m in met] == [((1,), (1,))] * 3
    world = [links[0], links[2], links[3]]
    assert everyone(world, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3


def test_empty_places_are_numbered_as_in_the_world_that_ended(opens: Opens) -> None:
    links = begun(opens, 4)
    links[0].terminated(0, "BASE_EXCEPTION", "it exits")
    healed(links[1:], 0)
    everyone(links[1:], lambda link, rank: link.enter(1, rank, 3))
    links[2].terminated(1, "BASE_EXCEPTION", "it exits, too")
    met = healed([links[1], links[3]], 1)
    assert [(m.terminated, m.lost) for m in met] == [((1,), (2,))] * 2


def test_when_all_are_unhealthy_all_leave_with_one_root_cause(opens: Opens) -> None:
    links = begun(opens, 3)
    links[2].report(0, "EXCEPTION", "the root")
    told = everyone(links, lambda link, rank: link.terminated(0, "EXCEPTION", f"sick {rank}"))
    assert {kinds(faults)[0] for faults in told} == {("EXCEPTION", 2, "the root")}
    assert {len(kinds(faults)) for faults in told} <= {2, 3, 4}


def test_two_faults_at_once_are_both_recorded_and_end_one_iteration(opens: Opens) -> None:
    links = begun(opens, 2)
    everyone(links, lambda link, rank: link.report(0, "EXCEPTION", f"of {rank}"))
    met = healed(links, 0)
    assert sorted(kinds(met[0].faults)) == [("EXCEPTION", 0, "of 0"), ("EXCEPTION", 1, "of 1")]
    assert met[0].faults.records == met[1].faults.records


def test_a_second_fault_while_the_first_is_healed_is_of_the_same_iteration(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].report(0, "EXCEPTION", "first")
    everyone(links, lambda link, _: link.heard(0))
    waiting = [Background(links[rank].ready, 0) for rank in (0, 1)]
    links[2].terminated(0, "EXCEPTION", "finalize failed")
    met = [call.result() for call in waiting]
    assert [kinds(m.faults)[-1] for m in met] == [("EXCEPTION", 2, "finalize failed")] * 2
    assert [m.terminated for m in met] == [(2,)] * 2


def test_a_fault_between_meeting_and_entering_is_of_the_next_iteration(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].report(0, "EXCEPTION", "first")
    healed(links, 0)
    entering = Background(links[0].enter, 1, 0, 3)
    links[1].terminated(1, "BASE_EXCEPTION", "assignment failed")
    assert kinds(entering.result()) == [("BASE_EXCEPTION", 1, "assignment failed")]
    assert kinds(links[2].enter(1, 2, 3)) == [("BASE_EXCEPTION", 1, "assignment failed")]
    met = healed([links[0], links[2]], 1)
    assert [(m.iteration, m.terminated, m.lost) for m in met] == [(2, (1,), (1,))] * 2


def test_a_discarded_rank_leaves_and_nobody_restarts_for_it(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].report(0, "EXCEPTION", "first")
    healed(links, 0)
    entering = [Background(links[rank].enter, 1, rank, 2) for rank in (0, 1)]
    links[2].terminated(1, "EXCEPTION", "no place", discarded=True)
    assert [call.result() for call in entering] == [None, None]
    links[0].report(1, "EXCEPTION", "again")
    met = healed(links[:2], 1)
    assert [(m.terminated, m.lost) for m in met] == [((), ())] * 2


def test_a_fault_ends_the_wait_at_the_end_of_the_call(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].completed(0)
    done = Background(links[0].done, 0)
    links[1].report(0, "EXCEPTION", "in the last step")
    assert kinds(done.result()) == [("EXCEPTION", 1, "in the last step")]
    assert len(healed(links, 0)) == 3


def test_reserve_ranks_wait_until_a_rank_has_completed(opens: Opens) -> None:
    links = begun(opens, 3)
    reserve = Background(links[2].wait_completed, 0)
    assert reserve.running()
    links[0].completed(0)
    assert reserve.result() is None


def test_reserve_ranks_are_released_by_a_fault(opens: Opens) -> None:
    links = begun(opens, 2)
    reserve = Background(links[1].wait_completed, 0)
    links[0].report(0, "EXCEPTION", "a mistake")
    assert kinds(reserve.result()) == [("EXCEPTION", 0, "a mistake")]


def test_who_is_not_done_in_time_is_a_fault_of_its_own_and_all_restart(opens: Opens) -> None:
    links = begun(opens, 3, PATIENT._replace(completion=0.05))
    told = everyone(links[:1], lambda link, _: link.done(0))
    assert [(kind, rank) for kind, rank, _ in kinds(told[0])] == [
        ("SOFT_TIMEOUT", 1),
        ("SOFT_TIMEOUT", 2),
    ]
    assert len(healed(links, 0)) == 3


def test_a_barrier_that_somebody_misses_ends_in_time_and_names_the_missing(opens: Opens) -> None:
    links = begun(opens, 3, PATIENT._replace(barrier=1.0, last_call=0.05))
    links[0].report(0, "EXCEPTION", "first")
    told = everyone(links[:2], lambda link, _: (link.heard(0), link.ready(0)))
    assert [type(error) for error in told] == [BarrierTimeout] * 2
    assert "1 of 3 ranks (2) did not come to the barrier 'ready'" in str(told[0])


def test_who_never_joins_is_named(opens: Opens) -> None:
    told = everyone([opens(0, 2, PATIENT._replace(barrier=0.1))], lambda link, _: link.join())
    assert isinstance(told[0], BarrierTimeout)
    assert "1 of 2 ranks (1) did not come to the barrier 'joined'" in str(told[0])


def test_a_rank_can_be_there_only_once(opens: Opens) -> None:
    begun(opens, 2)
    told = everyone([opens(0, 2), opens(1, 2)], lambda link, _: link.join())
    assert [type(error) for error in told] == [BarrierOverflow] * 2


def test_ranks_that_disagree_about_the_world_are_all_told(opens: Opens) -> None:
    links = [opens(rank, 2) for rank in range(2)]
    everyone(links, lambda link, _: link.join())
    told = everyone(links, lambda link, _: link.enter(0, 0, 2))
    assert [type(error) for error in told] == [BarrierOverflow] * 2
    assert "the rank assignment must come to the same on all ranks" in str(told[0])


def test_an_accused_rank_is_counted_out_once_and_told_so(opens: Opens) -> None:
    links = begun(opens, 3)
    watcher = opens(0, 3)
    assert watcher.accuse(1, "HARD_TIMEOUT", "it hangs")
    assert not watcher.accuse(1, "TERMINATED", "it was killed")
    told = everyone(links, lambda link, _: link.heard(0))
    assert isinstance(told[1], CountedOutError)
    assert "HARD_TIMEOUT: it hangs" in str(told[1])
    met = healed([links[0], links[2]], 0)
    assert [(m.terminated, kinds(m.faults)) for m in met] == [
        ((1,), [("HARD_TIMEOUT", 1, "it hangs")])
    ] * 2
    # Another watcher that comes late has it counted out of no iteration that it is not in.
    assert not watcher.accuse(1, "TERMINATED", "it was killed")
    places = {0: 0, 2: 1}
    entered = everyone([links[0], links[2]], lambda link, i: link.enter(1, places[2 * i], 2))
    assert entered == [None, None]


def test_a_rank_that_ends_before_all_have_joined_is_missed_from_the_first_iteration_on(
    opens: Opens,
) -> None:
    links = [opens(rank, 3) for rank in range(3)]
    assert not links[0].accuse(1, "TERMINATED", "it came to nothing before it joined")
    early = [Background(link.join) for link in links[:2]]
    assert all(call.running() for call in early)
    accused = Background(eventually, lambda: links[0].accuse(1, "TERMINATED", "it has ended"))
    assert links[2].join() == 0
    accused.result()
    living = [links[0], links[2]]
    assert early[0].result() == 0
    everyone(living, lambda link, i: link.enter(0, 2 * i, 3))
    told = everyone(living, lambda link, _: link.follow(0))
    assert [kinds(faults) for faults in told] == [[("TERMINATED", 1, "it has ended")]] * 2
    assert [met.lost for met in healed(living, 0)] == [(1,)] * 2


class Accusing(MemoryStore):
    """In which a rank is accused while the one that is last at the barrier writes how all met."""

    accuse: Callable[[], Background]

    def compare_set(
        self, key: str, expected: Any, desired: Any, /, *, ephemeral: bool = False
    ) -> bytes:
        if key == "group/0/met":
            self.accused = self.accuse()
            eventually(lambda: bytes(self.get("group/0/gone")) == b"1\n")
        return super().compare_set(key, expected, desired, ephemeral=ephemeral)


def test_a_rank_that_ends_while_the_others_meet_is_missed_in_the_next_iteration() -> None:
    store = Accusing()
    links: list[Link] = [C10dLink(lambda: store, "group", rank, 3, PATIENT) for rank in range(3)]
    store.accuse = lambda: Background(links[0].accuse, 1, "TERMINATED", "it has ended")
    everyone(links, lambda link, _: link.join())
    everyone(links, lambda link, rank: link.enter(0, rank, 3))
    links[2].report(0, "EXCEPTION", "a mistake")
    assert [met.lost for met in healed(links, 0)] == [()] * 3
    assert store.accused.result()
    living = [links[0], links[2]]
    everyone(living, lambda link, i: link.enter(1, 2 * i, 3))
    assert [met.lost for met in healed(living, 1)] == [(1,)] * 2
    for link in links:
        link.close()


class Losing(MemoryStore):
    """That is lost to the rank which wants to write down first how all have met."""

    lost = False

    def compare_set(
        self, key: str, expected: Any, desired: Any, /, *, ephemeral: bool = False
    ) -> bytes:
        if key == "group/0/met" and not self.lost:
            self.lost = True
            raise StoreConnectionError("it was killed")
        return super().compare_set(key, expected, desired, ephemeral=ephemeral)


def test_who_is_killed_before_it_has_told_how_all_have_met_is_not_waited_for() -> None:
    store = Losing()
    links: list[Link] = [C10dLink(lambda: store, "group", rank, 3, PATIENT) for rank in range(3)]
    everyone(links, lambda link, _: link.join())
    everyone(links, lambda link, rank: link.enter(0, rank, 3))
    links[2].report(0, "EXCEPTION", "a mistake")
    everyone(links, lambda link, _: link.heard(0))
    calls = [Background(link.ready, 0) for link in links]
    eventually(lambda: not all(call.running() for call in calls))
    (dead,) = (rank for rank, call in enumerate(calls) if not call.running())
    living = [rank for rank in range(3) if rank != dead]
    assert links[living[0]].accuse(dead, "TERMINATED", "it has ended")
    assert [calls[rank].result().lost for rank in living] == [(dead,)] * 2
    for link in links:
        link.close()


class Breaking(MemoryStore):
    """Of which a thread can change no more than so much."""

    left: dict[int, int]

    def _change(self, change: Callable[[Any], Any]) -> Any:
        me = threading.get_ident()
        if me in self.left:
            self.left[me] -= 1
            if self.left[me] < 0:
                raise StoreConnectionError("it was killed")
        return super()._change(change)


@pytest.mark.parametrize("steps", range(16))
def test_who_is_killed_while_it_counts_a_rank_out_leaves_nothing_undone(steps: int) -> None:
    store = Breaking()
    store.left = {}
    links: list[Link] = [C10dLink(lambda: store, "group", rank, 3, PATIENT) for rank in range(3)]
    everyone(links, lambda link, _: link.join())
    everyone(links, lambda link, rank: link.enter(0, rank, 3))
    store.left[threading.get_ident()] = steps
    with suppress(LinkError):
        links[2].accuse(1, "TERMINATED", "it has ended")
    del store.left[threading.get_ident()]
    links[0].accuse(1, "TERMINATED", "it has ended")
    (met,) = {met.lost: met for met in healed([links[0], links[2]], 0)}.values()
    assert kinds(met.faults) == [("TERMINATED", 1, "it has ended")]
    assert met.lost == (1,)
    for link in links:
        link.close()


def test_nobody_can_be_accused_when_the_call_is_over(opens: Opens) -> None:
    links = begun(opens, 2)
    assert everyone(links, lambda link, _: link.done(0)) == [None, None]
    assert not links[0].accuse(1, "TERMINATED", "it ended")


def test_calls_that_wait_end_when_the_link_is_closed(opens: Opens) -> None:
    links = begun(opens, 2)
    following = Background(links[0].follow, 0)
    eventually(following.running)
    links[0].close()
    with pytest.raises(LinkClosedError):
        following.result()


class Interrupt(BaseException):
    """What a signal's handler raises here."""


# What is raised where a weak reference ends, or a finalizer, is lost but for a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_calls_may_be_interrupted_anywhere_and_made_again(opens: Opens) -> None:
    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name in _spared._PASSING:
            signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.0)  # as a wrapper lets it finish
            return
        raise Interrupt

    def interrupted(call: Callable[[int], Any], after: float) -> None:
        # One that is lost comes again.
        signal.setitimer(signal.ITIMER_REAL, after, 1.0)
        call(0)

    links = begun(opens, 2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for call in (links[0].wait_completed, links[0].follow, links[0].done):
            for turn in range(12):
                with pytest.raises((Interrupt, RuntimeError)) as raised:
                    interrupted(call, 5e-5 * 1.5**turn)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                # threading.Condition does not hold its lock any more if it is interrupted while it
                # takes it again, and says so instead.
                assert Interrupt in (raised.type, type(raised.value.__context__))
    finally:
        signal.signal(signal.SIGALRM, before)
    links[1].completed(0)
    assert links[0].wait_completed(0) is None
    assert everyone(links, lambda link, _: link.done(0)) == [None, None]
