"""The promises of a rank's link."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.ranks.monitor_reports import report_dead, report_overdue
from helpers.stores.storing import Background, ServerThread
from regrow.inprocess.exception import (
    BarrierOverflow,
    BarrierTimeout,
    CallOverError,
    EvictedError,
    LinkClosedError,
    LinkError,
)
from regrow.inprocess.group.group import Group, ranks_of
from regrow.inprocess.group.group_messages import Timeouts
from regrow.inprocess.group.group_rules import Event, step
from regrow.inprocess.group.group_service import InprocessService
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.interrupt import no_interrupt_zones

PATIENT = Timeouts(barrier=30.0, completion=30.0, last_call=30.0)


class Opens:
    """Opens the links of ranks; acts as the monitor of their host."""

    def __init__(self) -> None:
        self._joined: set[int] = set()
        self.server = ServerThread(services={"inprocess": InprocessService(self._step)})
        self._links: list[ServiceLink] = []

    def __call__(self, rank: int, size: int, timeouts: Timeouts = PATIENT) -> ServiceLink:
        link = ServiceLink(
            lambda _: self.server.connect(session_grace=0.2), "group", rank, size, timeouts
        )
        self._links.append(link)
        return link

    def _step(self, group: Group, event: Event, now: float) -> Group:
        group = step(group, event, now)
        self._joined.update(ranks_of(group.living))
        return group

    def has_joined(self, rank: int) -> bool:
        return rank in self._joined

    def report_dead(self, rank: int, kind: str, message: str) -> None:
        with self.server.connect() as client:
            report_dead(client, self._links[rank], rank, kind, message)

    def report_overdue(self, rank: int, iteration: int, message: str) -> None:
        with self.server.connect() as client:
            report_overdue(client, self._links[rank], rank, iteration, message)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.server.stop()


@pytest.fixture
def opens() -> Iterator[Opens]:
    opens = Opens()
    yield opens
    opens.close()


def call_all(links: list[ServiceLink], call: Callable[[ServiceLink, int], Any]) -> list[Any]:
    """Make a call on each link at once; returns what each returned, or the LinkError it raised."""

    def one(link: ServiceLink, rank: int) -> Any:
        try:
            return call(link, rank)
        except LinkError as error:
            return error

    calls = [Background(one, link, rank) for rank, link in enumerate(links)]
    return [call.result() for call in calls]


def begun(opens: Opens, size: int, timeouts: Timeouts = PATIENT) -> list[ServiceLink]:
    """The links of ranks that run iteration 0."""
    links = [opens(rank, size, timeouts) for rank in range(size)]
    assert call_all(links, lambda link, _: link.join()) == [0] * size
    assert call_all(links, lambda link, rank: link.enter(0, rank, size)) == [None] * size
    return links


def healed(links: list[ServiceLink], iteration: int) -> list[Any]:
    """Have the ranks go from a fault to the next iteration."""
    call_all(links, lambda link, _: link.follow(iteration))
    call_all(links, lambda link, _: link.answer_last_call(iteration))
    return call_all(links, lambda link, _: link.ready(iteration))


def kinds(faults: Any) -> list[tuple[str, int, str]]:
    return [(fault.kind, fault.rank, fault.message) for fault in faults.records]


def test_a_call_without_faults_is_over_for_all_at_once(opens: Opens) -> None:
    links = begun(opens, 3)
    following = [Background(link.follow, 0) for link in links]
    first = Background(links[0].done, 0)
    links[0].completed(0)
    assert first.running()
    assert call_all(links[1:], lambda link, _: link.done(0)) == [None] * 2
    assert first.result() is None
    first = Background(links[0].confirm, 0)
    assert first.running()
    assert following[0].running()
    assert call_all(links[1:], lambda link, _: link.confirm(0)) == [None] * 2
    assert [call.result() for call in [first, *following]] == [None] * 4


def ended(links: list[ServiceLink]) -> None:
    """Have the ranks end the call together."""
    assert call_all(links, lambda link, _: link.done(0)) == [None] * len(links)
    assert call_all(links, lambda link, _: link.confirm(0)) == [None] * len(links)


def test_no_rank_replaces_a_rank_that_leaves_when_the_call_is_over(opens: Opens) -> None:
    links = begun(opens, 2)
    ended(links)
    with pytest.raises(CallOverError, match="so no rank can continue in place of initial rank 1"):
        links[1].terminated(0, "BASE_EXCEPTION", "too late")


def test_the_others_restart_without_a_rank_that_ends_before_it_has_confirmed(
    opens: Opens,
) -> None:
    links = begun(opens, 3)
    assert call_all(links, lambda link, _: link.done(0)) == [None] * 3
    waiting = Background(links[0].confirm, 0)
    links[2].terminated(0, "BASE_EXCEPTION", "exits")
    assert kinds(waiting.result()) == [("BASE_EXCEPTION", 2, "exits")]
    assert [met.lost for met in healed(links[:2], 0)] == [(2,)] * 2


def test_a_rank_that_does_not_confirm_in_time_is_a_fault_and_all_restart(opens: Opens) -> None:
    links = begun(opens, 3, PATIENT._replace(completion=0.5))
    assert call_all(links, lambda link, _: link.done(0)) == [None] * 3
    results = call_all(links[:2], lambda link, _: link.confirm(0))
    assert [(kind, rank) for kind, rank, _ in kinds(results[0])] == [("SOFT_TIMEOUT", 2)]
    assert len(healed(links, 0)) == 3


def test_the_others_do_not_continue_when_a_rank_of_a_failed_group_leaves(
    opens: Opens,
) -> None:
    link = opens(0, 2, PATIENT._replace(barrier=0.1))
    call_all([link], lambda link, _: link.join())
    with pytest.raises(BarrierTimeout, match=r"1 of 2 ranks \(1\) did not arrive"):
        link.terminated(0, "BASE_EXCEPTION", "the others are late")


def test_no_rank_continues_when_the_ranks_disagree_about_the_world(opens: Opens) -> None:
    links = [opens(rank, 2) for rank in range(2)]
    call_all(links, lambda link, _: link.join())
    call_all(links, lambda link, _: link.enter(0, 0, 2))
    for link in links:
        with pytest.raises(BarrierOverflow):
            link.terminated(0, "BASE_EXCEPTION", "we disagree")


def test_all_ranks_receive_a_fault_and_meet_again(opens: Opens) -> None:
    links = begun(opens, 3)
    links[1].report(0, "EXCEPTION", "a mistake")
    results = call_all(links, lambda link, _: link.follow(0))
    assert [kinds(faults) for faults in results] == [[("EXCEPTION", 1, "a mistake")]] * 3
    call_all(links, lambda link, _: link.answer_last_call(0))
    met = call_all(links, lambda link, _: link.ready(0))
    assert [(m.iteration, m.terminated, m.lost) for m in met] == [(1, (), ())] * 3
    assert [kinds(m.faults) for m in met] == [[("EXCEPTION", 1, "a mistake")]] * 3
    assert call_all(links, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3


def test_a_soft_time_out_is_recorded_once_if_rank_and_monitor_report_it(opens: Opens) -> None:
    links = begun(opens, 3)
    opens.report_overdue(1, 0, "seen by its monitor")
    opens.report_overdue(1, 0, "seen by its monitor")
    links[1].report(0, "SOFT_TIMEOUT", "seen by itself")
    links[2].report(0, "SOFT_TIMEOUT", "another one")
    records = [("SOFT_TIMEOUT", 1, "seen by its monitor"), ("SOFT_TIMEOUT", 2, "another one")]
    met = healed(links, 0)
    assert [(m.lost, kinds(m.faults)) for m in met] == [((), records)] * 3
    assert call_all(links, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3
    opens.report_overdue(1, 1, "and again")
    assert kinds(links[1].follow(1)) == [("SOFT_TIMEOUT", 1, "and again")]


def test_a_soft_time_out_of_a_rank_that_was_evicted_has_no_effect(
    opens: Opens,
) -> None:
    links = begun(opens, 3)
    opens.report_dead(1, "HARD_TIMEOUT", "it hangs")
    opens.report_overdue(1, 0, "it hung")
    met = healed([links[0], links[2]], 0)
    assert [m.lost for m in met] == [(1,)] * 2


def test_the_last_call_is_over_when_all_ranks_have_answered(opens: Opens) -> None:
    links = begun(opens, 2)
    links[0].report(0, "EXCEPTION", "first")
    first = Background(links[0].answer_last_call, 0)
    links[1].report(0, "SOFT_TIMEOUT", "second")
    assert first.running()
    links[1].answer_last_call(0)
    both = [("EXCEPTION", 0, "first"), ("SOFT_TIMEOUT", 1, "second")]
    assert kinds(first.result()) == both


def test_the_last_call_ends_without_the_answer_of_a_late_rank(opens: Opens) -> None:
    links = begun(opens, 2, PATIENT._replace(last_call=0.05))
    links[0].report(0, "EXCEPTION", "first")
    assert kinds(links[0].answer_last_call(0)) == [("EXCEPTION", 0, "first")]


def test_a_rank_that_leaves_receives_the_root_cause_and_no_barrier_waits_for_it(
    opens: Opens,
) -> None:
    links = begun(opens, 4)
    links[3].report(0, "EXCEPTION", "the root")
    results = links[1].terminated(0, "EXCEPTION", "sick")
    assert kinds(results)[0] == ("EXCEPTION", 3, "the root")
    assert links[1].follow(0) is None or kinds(links[1].follow(0)) == kinds(results)
    met = healed([links[0], links[2], links[3]], 0)
    assert [(m.terminated, m.lost) for m in met] == [((1,), (1,))] * 3
    world = [links[0], links[2], links[3]]
    assert call_all(world, lambda link, rank: link.enter(1, rank, 3)) == [None] * 3


def test_empty_places_are_numbered_as_in_the_world_that_ended(opens: Opens) -> None:
    links = begun(opens, 4)
    links[0].terminated(0, "BASE_EXCEPTION", "it exits")
    healed(links[1:], 0)
    call_all(links[1:], lambda link, rank: link.enter(1, rank, 3))
    links[2].terminated(1, "BASE_EXCEPTION", "it exits, too")
    met = healed([links[1], links[3]], 1)
    assert [(m.terminated, m.lost) for m in met] == [((1,), (2,))] * 2


def test_when_all_are_unhealthy_all_leave_with_one_root_cause(opens: Opens) -> None:
    links = begun(opens, 3)
    links[2].report(0, "EXCEPTION", "the root")
    results = call_all(links, lambda link, rank: link.terminated(0, "EXCEPTION", f"sick {rank}"))
    assert {kinds(faults)[0] for faults in results} == {("EXCEPTION", 2, "the root")}
    assert {len(kinds(faults)) for faults in results} <= {2, 3, 4}


def test_two_faults_at_once_are_both_recorded_and_end_one_iteration(opens: Opens) -> None:
    links = begun(opens, 2)
    call_all(links, lambda link, rank: link.report(0, "EXCEPTION", f"of {rank}"))
    met = healed(links, 0)
    assert sorted(kinds(met[0].faults)) == [("EXCEPTION", 0, "of 0"), ("EXCEPTION", 1, "of 1")]
    assert met[0].faults.records == met[1].faults.records


def test_a_second_fault_while_the_first_is_healed_is_of_the_same_iteration(opens: Opens) -> None:
    links = begun(opens, 3)
    links[0].report(0, "EXCEPTION", "first")
    call_all(links, lambda link, _: link.answer_last_call(0))
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


def test_no_rank_restarts_when_a_discarded_rank_leaves(opens: Opens) -> None:
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


def test_all_ranks_restart_when_a_rank_is_not_done_in_time(opens: Opens) -> None:
    links = begun(opens, 3, PATIENT._replace(completion=0.05))
    results = call_all(links[:1], lambda link, _: link.done(0))
    assert [(kind, rank) for kind, rank, _ in kinds(results[0])] == [
        ("SOFT_TIMEOUT", 1),
        ("SOFT_TIMEOUT", 2),
    ]
    assert len(healed(links, 0)) == 3


def test_a_barrier_with_a_missing_rank_ends_in_time_and_names_the_rank(opens: Opens) -> None:
    links = begun(opens, 3, PATIENT._replace(barrier=1.0, last_call=0.05))
    links[0].report(0, "EXCEPTION", "first")
    results = call_all(links[:2], lambda link, _: (link.answer_last_call(0), link.ready(0)))
    assert [type(error) for error in results] == [BarrierTimeout] * 2
    assert "1 of 3 ranks (2) did not arrive at the barrier 'ready'" in str(results[0])


def test_a_rank_that_never_joins_is_named(opens: Opens) -> None:
    results = call_all([opens(0, 2, PATIENT._replace(barrier=0.1))], lambda link, _: link.join())
    assert isinstance(results[0], BarrierTimeout)
    assert "1 of 2 ranks (1) did not arrive at the barrier 'joined'" in str(results[0])


def test_a_rank_can_be_there_only_once(opens: Opens) -> None:
    begun(opens, 2)
    results = call_all([opens(0, 2), opens(1, 2)], lambda link, _: link.join())
    assert [type(error) for error in results] == [BarrierOverflow] * 2


def test_all_ranks_receive_an_error_when_they_disagree_about_the_world(opens: Opens) -> None:
    links = [opens(rank, 2) for rank in range(2)]
    call_all(links, lambda link, _: link.join())
    results = call_all(links, lambda link, _: link.enter(0, 0, 2))
    assert [type(error) for error in results] == [BarrierOverflow] * 2
    assert "the rank assignment must give the same result on all ranks" in str(results[0])


def test_a_rank_that_a_monitor_reports_dead_is_evicted_once(opens: Opens) -> None:
    links = begun(opens, 3)
    opens.report_dead(1, "HARD_TIMEOUT", "it hangs")
    opens.report_dead(1, "TERMINATED", "it was killed")
    results = call_all(links, lambda link, _: link.answer_last_call(0))
    assert isinstance(results[1], EvictedError)
    assert "HARD_TIMEOUT: it hangs" in str(results[1])
    met = healed([links[0], links[2]], 0)
    assert [(m.terminated, kinds(m.faults)) for m in met] == [
        ((1,), [("HARD_TIMEOUT", 1, "it hangs")])
    ] * 2
    # A late report of another monitor does not end an iteration without that rank.
    opens.report_dead(1, "TERMINATED", "it was killed")
    places = {0: 0, 2: 1}
    entered = call_all([links[0], links[2]], lambda link, i: link.enter(1, places[2 * i], 2))
    assert entered == [None, None]


def test_a_rank_that_ends_before_all_have_joined_is_lost_in_the_first_iteration(
    opens: Opens,
) -> None:
    links = [opens(rank, 3) for rank in range(3)]
    joining = [Background(link.join) for link in links[:2]]
    wait_until(lambda: opens.has_joined(1), "rank 1 joins")
    opens.report_dead(1, "TERMINATED", "it has ended")
    assert links[2].join() == joining[0].result() == 0
    living = [links[0], links[2]]
    call_all(living, lambda link, i: link.enter(0, 2 * i, 3))
    faults = call_all(living, lambda link, _: link.follow(0))
    assert [kinds(each) for each in faults] == [[("TERMINATED", 1, "it has ended")]] * 2
    assert [met.lost for met in healed(living, 0)] == [(1,)] * 2


def test_a_report_of_a_dead_rank_has_no_effect_when_the_call_is_over(opens: Opens) -> None:
    links = begun(opens, 2)
    ended(links)
    opens.report_dead(1, "TERMINATED", "it ended")
    assert links[0].follow(0) is None


def test_calls_that_wait_end_when_the_link_is_closed(opens: Opens) -> None:
    links = begun(opens, 2)
    following = Background(links[0].follow, 0)
    assert following.running()
    links[0].close()
    with pytest.raises(LinkClosedError):
        following.result()


CALLS: dict[str, Callable[[ServiceLink], Any]] = {
    "follow": lambda link: link.follow(0),
    "wait_completed": lambda link: link.wait_completed(0),
    "done": lambda link: link.done(0),
    "confirm": lambda link: link.confirm(0),
    "answer_last_call": lambda link: link.answer_last_call(0),
    "ready": lambda link: link.ready(0),
    "enter": lambda link: link.enter(1, 0, 2),
    "report": lambda link: link.report(0, "EXCEPTION", "a mistake"),
    "terminated": lambda link: link.terminated(0, "TERMINATED", "it leaves"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_to_a_link_that_was_closed_raises(opens: Opens, name: str) -> None:
    links = begun(opens, 2)
    links[0].close()
    with pytest.raises(LinkClosedError):
        Background(CALLS[name], links[0]).result()


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("report", "terminated")])
def test_a_call_that_waits_raises_when_the_link_is_closed(opens: Opens, name: str) -> None:
    links = begun(opens, 2)
    if name == "confirm":
        links[0].completed(0)
        call_all(links, lambda link, _: link.done(0))
    elif name in ("answer_last_call", "ready", "enter"):
        links[1].report(0, "EXCEPTION", "a mistake")
    if name == "enter":
        healed(links, 0)
    waiting = Background(CALLS[name], links[0])
    assert waiting.running()
    links[0].close()
    with pytest.raises(LinkClosedError):
        waiting.result()


def test_a_call_that_joins_raises_when_the_link_is_closed(opens: Opens) -> None:
    link = opens(0, 2)
    joining = Background(link.join)
    assert joining.running()
    link.close()
    with pytest.raises(LinkClosedError):
        joining.result()


class Interrupt(BaseException):
    """Raised by a signal handler."""


# An exception in a weak reference's callback or in a finalizer becomes a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_calls_may_be_interrupted_anywhere_and_made_again(opens: Opens) -> None:
    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name in no_interrupt_zones.PASSING:
            signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.0)  # lets it finish, as a wrapper does
            return
        raise Interrupt

    def interrupted(call: Callable[[int], Any], after: float) -> None:
        # A lost interrupt is repeated after a second.
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
                # An interrupt while threading.Condition takes its lock again leaves it without the
                # lock; it then raises a RuntimeError instead.
                assert Interrupt in (raised.type, type(raised.value.__context__))
    finally:
        signal.signal(signal.SIGALRM, before)
    links[1].completed(0)
    assert links[0].wait_completed(0) is None
    assert call_all(links, lambda link, _: link.done(0)) == [None, None]
