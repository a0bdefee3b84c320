"""The rules of a group in which another process may continue a rank that was lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import Group, GroupPhase, bit, ranks_of, reply
from regrow.inprocess.group.group_messages import Joined, Timeouts
from regrow.inprocess.group.group_rules import Lost, Tick, step
from regrow.inprocess.group.group_service import InprocessService

TIMEOUTS = Timeouts(barrier=10.0, completion=8.0, last_call=1.0, replacement=5.0)
SIZE = 4


class Ranks:
    """A group of four ranks, the place of each, and a clock.

    Args:
        active: number of ranks that call the function; the others wait in reserve.
        timeouts: how long ranks wait.
    """

    def __init__(self, active: int = SIZE, timeouts: Timeouts = TIMEOUTS) -> None:
        self.group = Group(SIZE, timeouts)
        self.timeouts = timeouts
        self.active = active
        self.places = dict(enumerate(range(SIZE)))
        self.world_size = SIZE
        self.incarnations = dict.fromkeys(range(SIZE), 0)
        self.now = 0.0
        for rank in range(SIZE):
            self.send(self.join(rank))

    @property
    def met(self) -> messages.Met:
        """How the previous iteration ended."""
        assert self.group.before is not None
        return self.group.before

    def me(self, rank: int) -> tuple[str, int, str]:
        return "group", rank, f"process {self.incarnations[rank]} of {rank}"

    def join(self, rank: int) -> messages.Join:
        return messages.Join(*self.me(rank), SIZE, self.timeouts, self.incarnations[rank])

    def send(self, event: Any) -> None:
        self.group = step(self.group, event, self.now)

    def all_do(self, kind: Any) -> None:
        """All living ranks ask a question about the current iteration."""
        iteration = self.group.iteration
        for rank in ranks_of(self.group.living):
            self.send(kind(*self.me(rank), iteration))

    def enter(self) -> None:
        iteration = self.group.iteration
        for rank in ranks_of(self.group.living):
            place = self.places[rank]
            active = place < self.active
            self.send(messages.Enter(*self.me(rank), iteration, place, self.world_size, active))

    def lose(self, rank: int) -> None:
        self.send(Lost(rank, "TERMINATED", "gone"))

    def replace(self, rank: int) -> None:
        """A process of the next incarnation joins."""
        self.incarnations[rank] += 1
        self.send(self.join(rank))

    def restart(self) -> None:
        """All living ranks go from the fault to the meeting."""
        self.all_do(messages.AnswerLastCall)
        self.all_do(messages.Ready)

    def follow_assignment(self) -> None:
        """All ranks compute their next places, as `ShiftRanks` does."""
        met = self.group.before
        assert met is not None
        self.places |= {each.rank: each.place for each in met.joined}
        order = sorted(ranks_of(self.group.living), key=lambda rank: self.places[rank])
        self.places = {rank: place for place, rank in enumerate(order)}
        self.world_size = len(order)
        assert self.world_size == met.world_size - len(met.terminated)


def running(**more: Any) -> Ranks:
    ranks = Ranks(**more)
    ranks.enter()
    assert ranks.group.phase is GroupPhase.RUNNING
    return ranks


def test_the_ready_ranks_wait_for_the_replacement_and_every_rank_keeps_its_place() -> None:
    ranks = running()
    ranks.lose(0)
    ranks.restart()
    assert ranks.group.phase is GroupPhase.ENDING
    assert ranks.group.deadline == 5.0
    ranks.replace(0)
    met = ranks.met
    assert (met.terminated, met.lost, met.joined) == ((), (), (Joined(0, 0),))
    assert met.world_size == SIZE
    answer = reply(ranks.group, ranks.join(0), 0.0)
    assert isinstance(answer, messages.Admitted)
    assert (answer.place, answer.met) == (0, met)
    ranks.follow_assignment()
    ranks.enter()
    assert (ranks.group.phase.name, ranks.group.living.bit_count()) == ("RUNNING", SIZE)


def test_a_replacement_that_joins_before_the_others_are_ready_waits_for_them() -> None:
    ranks = running()
    ranks.lose(2)
    ranks.replace(2)
    assert reply(ranks.group, ranks.join(2), 0.0) is None
    ranks.restart()
    assert isinstance(reply(ranks.group, ranks.join(2), 0.0), messages.Admitted)


def test_the_others_continue_when_the_time_of_the_replacement_is_over() -> None:
    ranks = running()
    ranks.lose(3)
    ranks.restart()
    ranks.now = 4.9
    ranks.send(Tick())
    assert ranks.group.phase is GroupPhase.ENDING
    ranks.now = 5.0
    ranks.send(Tick())
    met = ranks.met
    assert (met.terminated, met.lost, met.joined) == ((3,), (3,), ())


@pytest.mark.parametrize("when", ["before the loss", "before the last call", "while they wait"])
def test_the_others_continue_at_once_when_the_agent_reports_that_there_is_no_replacement(
    when: str,
) -> None:
    ranks = running()
    if when == "before the loss":  # the group learns of the loss when the session is over
        ranks.send(messages.NotReplaced(3))
    ranks.lose(3)
    if when == "before the last call":
        ranks.send(messages.NotReplaced(3))
    ranks.restart()
    if when == "while they wait":
        ranks.send(messages.NotReplaced(3))
    assert ranks.group.iteration == 1


def test_the_report_that_a_rank_is_not_replaced_survives_a_restart_that_counted_it() -> None:
    ranks = running()
    ranks.lose(1)
    ranks.replace(1)
    ranks.all_do(messages.AnswerLastCall)
    ranks.send(messages.NotReplaced(3))
    ranks.all_do(messages.Ready)
    ranks.follow_assignment()
    ranks.enter()
    assert ranks.group.iteration == 1
    ranks.lose(3)
    ranks.restart()
    assert ranks.group.iteration == 2


def test_a_rank_whose_replacement_comes_after_all_is_awaited_at_its_next_loss() -> None:
    ranks = running()
    ranks.send(messages.NotReplaced(3))
    ranks.lose(3)
    ranks.replace(3)
    ranks.restart()
    ranks.follow_assignment()
    ranks.enter()
    ranks.lose(3)
    ranks.restart()
    assert ranks.group.phase is GroupPhase.ENDING


def test_without_the_option_a_lost_rank_is_not_awaited() -> None:
    ranks = running(timeouts=TIMEOUTS._replace(replacement=0.0))
    ranks.lose(3)
    ranks.restart()
    assert ranks.group.iteration == 1


def test_a_rank_that_leaves_is_awaited_only_if_it_asks_for_a_replacement() -> None:
    for replaced in (True, False):
        ranks = running()
        ranks.send(messages.LeaveGroup(*ranks.me(1), 0, "BASE_EXCEPTION", "", False, 0.0, replaced))
        ranks.restart()
        assert (ranks.group.phase is GroupPhase.ENDING) is replaced


def test_ranks_in_reserve_take_over_at_once_and_the_replacement_is_the_new_reserve() -> None:
    ranks = running(active=3)
    ranks.lose(1)
    ranks.restart()
    assert ranks.group.iteration == 1
    ranks.follow_assignment()
    ranks.enter()
    ranks.replace(1)
    assert reply(ranks.group, ranks.join(1), 0.0) is None
    ranks.lose(2)  # now no rank is in reserve, but one waits to join
    ranks.replace(2)
    ranks.restart()
    met = ranks.met
    assert met.terminated == ()
    assert {each.rank for each in met.joined} == {1, 2}
    ranks.follow_assignment()
    ranks.enter()
    assert ranks.group.phase is GroupPhase.RUNNING
    assert ranks.group.living.bit_count() == SIZE


def test_a_newcomer_counts_as_reserve_while_it_waits() -> None:
    ranks = running(active=3)
    ranks.lose(1)
    ranks.restart()
    ranks.follow_assignment()
    ranks.enter()
    ranks.replace(1)
    ranks.lose(2)
    ranks.restart()
    assert ranks.group.iteration == 2, "rank 1 takes the place of rank 2"


def test_a_rank_in_reserve_that_was_replaced_takes_over_at_once() -> None:
    ranks = running(active=3)
    ranks.lose(1)
    ranks.lose(3)  # in reserve
    ranks.restart()
    assert ranks.group.phase is GroupPhase.ENDING
    ranks.replace(3)
    assert ranks.group.iteration == 1, "rank 3 takes the place of rank 1"


def test_a_replacement_that_ends_before_it_is_admitted_is_awaited_again() -> None:
    ranks = running()
    ranks.lose(1)
    ranks.restart()
    ranks.now = 1.0
    ranks.group = ranks.group._replace(awaited=0, newcomers=bit(1))
    ranks.lose(1)
    assert ranks.group.awaited == bit(1)
    assert ranks.group.awaited_until == 6.0


def test_a_rank_that_is_lost_while_another_one_is_replaced() -> None:
    ranks = running()
    ranks.lose(1)
    ranks.restart()
    ranks.now = 1.0
    ranks.lose(3)
    ranks.replace(1)
    assert ranks.group.phase is GroupPhase.ENDING
    assert ranks.group.deadline == 6.0
    ranks.replace(3)
    assert ranks.met.joined == (Joined(1, 1), Joined(3, 3))


def test_ranks_that_never_entered_get_the_empty_places() -> None:
    ranks = Ranks()
    ranks.lose(0)
    ranks.lose(2)
    ranks.enter()
    ranks.replace(0)
    ranks.replace(2)
    ranks.restart()
    assert ranks.met.joined == (Joined(0, 0), Joined(2, 2))


def test_all_ranks_learn_the_origin_of_the_latest_process_of_a_rank() -> None:
    ranks = running()
    for origin in ("the first", "the second"):
        ranks.lose(1)
        ranks.incarnations[1] += 1
        join = ranks.join(1)
        ranks.send(messages.Join(*ranks.me(1), SIZE, join.timeouts, join.incarnation, origin))
    ranks.restart()
    assert ranks.met.joined == (Joined(1, 1, "the second"),)
    ranks.follow_assignment()
    ranks.enter()
    ranks.lose(2)
    ranks.replace(2)
    ranks.restart()
    assert ranks.met.joined == (Joined(2, 2),)


def test_a_newcomer_learns_that_the_call_is_over() -> None:
    ranks = running()
    ranks.lose(1)
    ranks.send(messages.NotReplaced(1))
    ranks.restart()
    ranks.follow_assignment()
    ranks.enter()
    ranks.replace(1)
    ranks.all_do(messages.RankDone)
    ranks.all_do(messages.Confirm)
    assert ranks.group.phase is GroupPhase.OVER
    assert isinstance(reply(ranks.group, ranks.join(1), 0.0), messages.Over)


def test_a_replacement_that_joins_when_the_call_is_over_learns_that() -> None:
    ranks = running()
    ranks.lose(1)
    ranks.send(messages.NotReplaced(1))
    ranks.restart()
    ranks.follow_assignment()
    ranks.enter()
    ranks.all_do(messages.RankDone)
    ranks.all_do(messages.Confirm)
    assert ranks.group.phase is GroupPhase.OVER
    ranks.replace(1)
    assert isinstance(reply(ranks.group, ranks.join(1), 0.0), messages.Over)


def test_newcomers_alone_cannot_continue() -> None:
    ranks = running()
    ranks.lose(0)
    ranks.replace(0)
    for rank in (1, 2, 3):
        ranks.lose(rank)
    answer = reply(ranks.group, ranks.join(0), 0.0)
    assert isinstance(answer, messages.GroupRefusal)
    assert answer.reason == "missing"


def test_a_message_of_a_process_that_was_evicted_changes_nothing() -> None:
    ranks = running()
    ranks.lose(1)
    before = ranks.group
    ranks.send(ranks.join(1))  # its own, of the same incarnation
    assert ranks.group is before


class Service:
    """A service with a session for each process."""

    def __init__(self) -> None:
        self.service = InprocessService()

    def join(self, rank: int, incarnation: int, size: int = 1) -> list[Any]:
        """A process joins; returns all answers that are sent then."""
        process = f"process {incarnation} of {rank}"
        question = messages.Join("group", rank, process, size, TIMEOUTS, incarnation)
        answers = self.service.asked(process, 1, messages.encode(question), 0.0)
        return [messages.decode_reply(answer.body) for answer in answers]


def test_the_replacement_of_the_last_rank_begins_another_group() -> None:
    service = Service()
    assert service.join(0, 0) == [messages.Go(0)]
    assert service.join(0, 1) == [messages.Go(1)]  # before the session of the first process is over


def test_a_process_that_was_replaced_does_not_join_any_more() -> None:
    service = Service()
    service.join(0, 0, size=2)
    service.join(0, 2, size=2)
    service.service.suspended("process 2 of 0", 0.0)
    (refusal,) = service.join(0, 1, size=2)
    assert (type(refusal), refusal.reason) == (messages.GroupRefusal, "mismatch")
    service.service.resumed("process 2 of 0", 0.0)
    assert service.join(1, 0, size=2) == [messages.Go(0)]
    for rank in (0, 1):
        service.service.ended(f"process {2 - 2 * rank} of {rank}", "gone", True, 0.0)
    (refusal,) = service.join(0, 1, size=2)  # no rank is left, so another group may begin
    assert (type(refusal), refusal.reason) == (messages.GroupRefusal, "mismatch")


histories = st.lists(
    st.tuples(
        st.sampled_from(("lose", "lose", "replace", "replace", "deny", "tick", "go", "restart")),
        st.integers(0, SIZE - 1),
        st.sampled_from([0.0, 0.0, 0.1, 1.0, 5.0]),
    ),
    max_size=60,
)


@given(histories, st.integers(1, SIZE))
@example(
    [*(("lose", rank, 0.0) for rank in (0, 1, 2)), ("restart", 0, 0.0), ("replace", 0, 0.0)], 2
)
def test_living_ranks_always_agree_and_nobody_has_two_processes(
    history: list[Any], active: int
) -> None:
    ranks = running(active=active)
    for what, rank, passes in history:
        ranks.now += passes
        deadline = ranks.group.deadline
        group = ranks.group
        if deadline is not None and ranks.now >= deadline:
            what = "tick"
        match what:
            case "lose":
                ranks.lose(rank)
            case "replace" if not (group.living | group.newcomers) & bit(rank):
                ranks.replace(rank)
            case "deny":
                ranks.send(messages.NotReplaced(rank))
            case "tick":
                ranks.send(Tick())
            case "restart" if group.phase in (GroupPhase.LAST_CALL, GroupPhase.ENDING):
                ranks.restart()
        if ranks.group.iteration > group.iteration:
            met = ranks.group.before
            assert met is not None
            # The others wait for active ranks, unless ranks in reserve or further ranks take over.
            reserve = sum(bit(place.rank) for place in group.places if not place.active)
            missing = group.awaited & ~ranks.group.living & ~reserve
            spare = ranks.group.living & (reserve | ~group.world)
            covered = missing.bit_count() <= spare.bit_count()
            assert covered or ranks.now >= group.awaited_until or what == "deny"
            ranks.follow_assignment()
        if ranks.group.phase is GroupPhase.ENTERING:
            ranks.enter()
        assert ranks.group.failure is None or ranks.group.finished
        assert not ranks.group.living & ranks.group.newcomers
        assert not ranks.group.awaited & (ranks.group.living | ranks.group.newcomers)
        deadline = ranks.group.deadline
        assert deadline is None or deadline > ranks.now
        if ranks.group.finished:
            assert not ranks.group.living
            return
