"""The service that counts beats, without a server: what it answers, to whom and when."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.heartbeat import Progress
from regrow.heartbeat import _questions as questions
from regrow.heartbeat._failure import NOBODY, Ranks
from regrow.heartbeat._merge import Standing
from regrow.heartbeat._questions import Beat, Follow, Hushed, Look, Missing, Over, Sums, Together
from regrow.heartbeat._service import GROUPS, HeartbeatService
from regrow.store import Answer, StoreServiceError

TOKEN = 4711


class Desk:
    """A service, and workers that ask it: each has a session, and numbers its questions."""

    def __init__(self) -> None:
        self.service = HeartbeatService()
        self.now = 50.0
        self.id = 0

    def ask(self, session: str, question: questions.Question) -> dict[str, Any]:
        """Ask, and return the answers that this brought, by session."""
        self.id += 1
        return heard(self.service.asked(session, self.id, questions.encode(question), self.now))

    def beat(self, rank: int, session: str = "", **fields: Any) -> dict[str, Any]:
        return self.ask(session or f"s{rank}", beat(rank, **fields))

    def due(self) -> dict[str, Any]:
        """Let the time pass until the service has something to do."""
        assert self.service.deadline is not None
        self.now = max(self.now, self.service.deadline)
        return heard(self.service.due(self.now))

    def ended(self, session: str, closed: bool = True) -> dict[str, Any]:
        self.service.suspended(session, self.now)
        return heard(self.service.ended(session, "its connection broke", closed, self.now))


def heard(answers: list[Answer]) -> dict[str, Any]:
    return {str(each.session): questions.decode_answer(each.body) for each in answers}


def beat(rank: int, **fields: Any) -> Beat:
    """What a worker of three says after some beats."""
    said: dict[str, Any] = {
        "group": "job",
        "rank": rank,
        "size": 3,
        "incarnation": 1000 + rank,
        "token": TOKEN,
        "joined": True,
        "step": -1,
        "phase": "",
        "leaving": False,
        "final": False,
        "seen": 0,
        "wait": 2.0,
    }
    return Beat(**{**said, **fields})


def follow(rank: int, on: bool = True) -> Follow:
    return Follow("job", rank, 1000 + rank, on)


@pytest.fixture
def desk() -> Desk:
    """Three workers that have beaten once, and follow the group under sessions of their own."""
    desk = Desk()
    for rank in range(3):
        told = desk.beat(rank, joined=False, token=TOKEN if rank == 0 else 0)
    assert told == {f"s{rank}": Together(1, TOKEN, None, 0.0) for rank in range(3)}
    for rank in range(3):
        assert desk.ask(f"s{rank}", follow(rank)) == {}
    return desk


def test_all_are_told_when_the_last_one_has_come(desk: Desk) -> None:
    assert desk.beat(2, seen=1, step=4) == {}
    assert desk.beat(0, seen=1, step=5) == {}
    standing = Standing(4, Ranks.of([2]), 5, Ranks.of([0]))
    assert set(desk.beat(1, seen=1)) == {"s0", "s1", "s2"}
    desk.beat(2, seen=2, step=4)
    desk.beat(0, seen=2, step=5)
    told = desk.beat(1, seen=2)
    assert told["s0"] == Together(
        3, TOKEN, standing._replace(still=1, stalled=Ranks.of([2]), step=4), 0.0
    )


def test_an_answer_is_of_the_same_length_however_many_workers_there_are() -> None:
    lengths = []
    for size in (16, 512):
        service = HeartbeatService()
        for rank in range(size):
            question = beat(rank, size=size, joined=False, step=rank % 2)
            answers = service.asked(rank, 1, questions.encode(question), 0.0)
        assert len(answers) == size
        lengths.append(len(answers[0].body))
    assert lengths[1] - lengths[0] <= 8  # the digits of two counts


def test_who_has_waited_long_enough_is_told_who_is_missing(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.now += 0.01
    desk.beat(1, seen=1)
    assert desk.due() == {"s0": Missing(Ranks.of([2])), "s1": Missing(Ranks.of([2]))}
    assert desk.service.deadline is None


def test_one_that_gave_up_a_moment_ago_is_not_missing(desk: Desk) -> None:
    desk.beat(0, seen=1, wait=1.0)
    desk.now += 0.5
    desk.beat(1, seen=1, wait=2.0)
    assert desk.due() == {"s0": Missing(Ranks.of([2]))}
    assert desk.due() == {"s1": Missing(Ranks.of([2]))}
    desk.now += 1.0
    desk.beat(1, seen=1, wait=2.0)
    assert desk.due() == {"s1": Missing(Ranks.of([0, 2]))}


def test_one_that_gave_up_does_not_count_as_there(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.due()
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1) == {}
    assert set(desk.beat(0, seen=1)) == {"s0", "s1", "s2"}


def test_the_first_who_gives_up_for_good_ends_the_group_for_the_reason_it_has(desk: Desk) -> None:
    desk.beat(0, seen=1, final=True)
    desk.beat(1, seen=1, wait=9.0)
    verdict = Over("missing", Ranks.of([2]))
    told = desk.due()
    assert told == {"s0": verdict, "s1": verdict, "s2": verdict}
    assert desk.beat(2, seen=1) == {"s2": verdict}  # too late


def test_who_never_came_never_started() -> None:
    desk = Desk()
    desk.beat(0, joined=False, final=True)
    assert desk.due() == {"s0": Over("never started", Ranks.of([1, 2]))}


def test_workers_that_take_turns_are_not_called_missing(desk: Desk) -> None:
    desk.beat(1, seen=1, wait=1.0)
    desk.beat(0, seen=1, final=True)
    desk.due()
    desk.beat(2, seen=1, wait=5.0)
    assert desk.due()["s0"] == Over("no exchange", NOBODY, "all came, but never at the same time")


def test_a_process_that_ended_is_known_to_all_at_once(desk: Desk) -> None:
    desk.beat(0, seen=1)
    lost = Over("lost", Ranks.of([2]), "its connection broke")
    told = heard(desk.service.ended("s2", "its connection broke", True, desk.now))
    assert told == {"s0": lost, "s1": lost}
    assert desk.beat(1, seen=1) == {"s1": lost}  # if it had not been listening


def test_a_connection_that_was_not_closed_by_the_worker_proves_nothing(desk: Desk) -> None:
    assert desk.ended("s2", closed=False) == {}
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert set(desk.beat(2, "another session", seen=1)) == {"s0", "s1", "another session"}
    assert desk.ended("another session")["s0"].kind == "lost"


def test_the_end_of_a_session_that_a_worker_has_left_behind_is_nothing(desk: Desk) -> None:
    desk.beat(2, "another session", seen=1)
    assert desk.ended("s2") == {}


def test_a_worker_whose_connection_broke_asks_again_and_misses_nothing(desk: Desk) -> None:
    for rank in (2, 0):
        desk.beat(rank, seen=1)
    desk.service.suspended("s2", desk.now)
    assert desk.beat(1, seen=1) == {}  # it is not there
    assert set(desk.beat(2, seen=1)) == {"s0", "s1", "s2"}
    desk.service.suspended("s2", desk.now)  # before the answer arrived
    desk.now += 0.25
    assert desk.beat(2, seen=1) == {"s2": Together(2, TOKEN, None, 0.25)}
    assert desk.beat(2, seen=2) == {}


def test_that_the_first_answer_was_lost_makes_nobody_a_new_process(desk: Desk) -> None:
    first: dict[str, Any] = {"joined": False, "token": 0}
    assert desk.beat(2, **first) == {"s2": Together(1, TOKEN, None, 0.0)}


def test_a_new_process_in_the_place_of_one_that_beats_ends_the_group(desk: Desk) -> None:
    verdict = Over("restarted", Ranks.of([2]))
    told = desk.beat(2, "new", incarnation=7, joined=False, token=0)
    assert told == {"new": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_what_is_left_of_another_run_ends_the_group_and_was_not_restarted(desk: Desk) -> None:
    verdict = Over("out of step", Ranks.of([2]), f"the others show {TOKEN}")
    told = desk.beat(2, "old", incarnation=7, token=TOKEN + 1)
    assert told == {"old": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_the_newer_of_two_takes_the_place_while_the_group_forms() -> None:
    desk = Desk()
    first: dict[str, Any] = {"joined": False, "token": 0}
    desk.beat(2, **first)
    assert desk.beat(2, "new", incarnation=7, **first) == {"s2": Over("twice", Ranks.of([2]))}
    assert desk.ended("s2") == {}
    desk.beat(0, joined=False)
    assert set(desk.beat(1, **first)) == {"s0", "s1", "new"}


def test_a_process_that_ends_while_the_group_forms_may_come_again() -> None:
    desk = Desk()
    desk.beat(2, joined=False, token=0)
    assert desk.ended("s2") == {}
    desk.beat(0, joined=False)
    desk.beat(1, joined=False, token=0)
    assert set(desk.beat(2, "new", incarnation=7, joined=False, token=0)) == {"s0", "s1", "new"}


@pytest.mark.parametrize("rank", [2, 5])
def test_another_world_size_is_told_apart(desk: Desk, rank: int) -> None:
    verdict = Over("wrong world size", Ranks.of([rank]), "it says 8, and rank 0 says 3")
    told = desk.beat(rank, "new", size=8, incarnation=7, joined=False)
    assert told == {"new": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_that_one_leaves_is_told_to_all_and_nobody_is_lost_afterwards(desk: Desk) -> None:
    left = Over(None, Ranks.of([1]))
    assert desk.beat(1, seen=1, leaving=True) == {"s0": left, "s1": left, "s2": left}
    assert desk.ended("s1") == {}
    assert desk.beat(0, seen=1) == {"s0": left}
    assert desk.beat(2, seen=1, leaving=True) == {"s2": left}


def test_who_leaves_before_all_have_met_is_let_go_and_its_place_is_free() -> None:
    desk = Desk()
    for rank in range(2):
        assert desk.beat(rank, joined=False) == {}
    assert desk.beat(1, joined=False, leaving=True) == {"s1": Over(None, Ranks.of([1]))}
    assert desk.ended("s1") == {}
    assert desk.beat(2, joined=False) == {}
    assert set(desk.beat(1, "new", incarnation=7, joined=False)) == {"s0", "s2", "new"}


def test_the_goodbye_of_a_stranger_ends_nothing(desk: Desk) -> None:
    left = Over(None, Ranks.of([1]))
    assert desk.beat(1, "another", incarnation=7, leaving=True) == {"another": left}
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_the_name_of_a_group_that_ended_is_free_for_a_new_one(desk: Desk) -> None:
    desk.beat(1, leaving=True)
    for rank in range(2):
        desk.beat(rank, "new", incarnation=rank + 1, joined=False, size=2)
    told = desk.beat(0, "new", incarnation=1, size=2, wait=1.0)
    assert desk.beat(2, seen=1) == {"s2": Over(None, Ranks.of([1]))}  # one of the old group
    assert desk.due() == {"new": Missing(Ranks.of([1]))} or told


def test_workers_whose_server_was_started_again_go_on() -> None:
    desk = Desk()
    desk.beat(0, seen=40)
    desk.beat(1, seen=40)
    assert desk.beat(2, seen=40)["s0"] == Together(1, TOKEN, None, 0.0)
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_a_table_of_how_far_all_are_is_there_on_demand(desk: Desk) -> None:
    desk.beat(1, seen=1, step=7, phase="train")
    desk.now += 0.5
    rows = desk.ask("anyone", Look("job"))["anyone"].rows
    assert rows == [
        Progress(0, None, None, 0.5),
        Progress(1, 7, "train", 0.5),
        Progress(2, None, None, 0.5),
    ]
    assert desk.ask("anyone", Look("another"))["anyone"].rows == []


def test_who_does_not_want_to_be_told_any_more_is_not(desk: Desk) -> None:
    hushed = desk.service.asked("s1", 99, questions.encode(follow(1, on=False)), desk.now)
    assert [each.body for each in hushed] == [questions.encode(Hushed())] * 2
    assert set(desk.ended("s2")) == {"s0"}


def test_a_group_that_the_server_does_not_know_cannot_be_followed() -> None:
    assert Desk().ask("s0", follow(0)) == {"s0": Hushed()}


def test_a_question_that_is_given_up_is_not_answered(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.service.cancelled("s0", desk.id)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1) == {}


def test_a_group_of_which_nobody_is_left_is_forgotten(desk: Desk) -> None:
    for rank in range(3):
        desk.ended(f"s{rank}", closed=False)
    assert desk.ask("anyone", Look("job"))["anyone"].rows == []


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (b"\x00", "Expected `array`"),
        (questions.encode(beat(3)), "there is no rank 3 in a world of 3"),
        (questions.encode(beat(0, token=70000)), "Expected `int` <= 65535"),
        (bytes(questions.BODY_BYTES + 1), "bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    desk: Desk, question: bytes, why: str
) -> None:
    with pytest.raises(StoreServiceError, match=why):
        desk.service.asked("s0", 99, question, desk.now)
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_there_are_not_more_groups_than_are_allowed() -> None:
    desk = Desk()
    for number in range(GROUPS):
        desk.beat(0, group=f"job {number}")
    with pytest.raises(StoreServiceError, match="groups beat here already"):
        desk.beat(0, group="one too many")


# --- sums


def reduce(rank: int, vector: list[int], **fields: Any) -> questions.Reduce:
    said: dict[str, Any] = {
        "group": "sum",
        "rank": rank,
        "size": 2,
        "incarnation": 1000 + rank,
        "vector": vector,
        "seen": 0,
        "wait": 2.0,
    }
    return questions.Reduce(**{**said, **fields})


def test_vectors_are_summed_up_when_all_have_come() -> None:
    desk = Desk()
    assert desk.ask("a", reduce(0, [1, -2])) == {}
    assert desk.ask("b", reduce(1, [10, 20])) == dict.fromkeys("ab", Sums(1, [11, 18]))
    assert desk.ask("a", reduce(0, [1, -2])) == {"a": Sums(1, [11, 18])}  # it was lost on the way
    assert desk.ask("a", reduce(0, [5, 5], seen=1)) == {}
    assert desk.ask("new b", reduce(1, [1, 1], incarnation=7)) == dict.fromkeys(
        ["a", "new b"], Sums(2, [6, 6])
    )


def test_a_sum_of_which_one_is_missing_says_who() -> None:
    desk = Desk()
    desk.ask("a", reduce(0, [1]))
    assert desk.due() == {"a": Missing(Ranks.of([1]))}
    desk.ask("b", reduce(1, [1]))
    desk.service.suspended("b", desk.now)
    assert desk.ask("a", reduce(0, [1])) == {}


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (reduce(1, [1, 2]), "rank 1 gives 2 numbers, and rank 0 1"),
        (reduce(1, [1], size=3), "rank 1 sums over 3, and others over 2"),
        (reduce(1, [2**63 - 1]), "does not fit into 64 bits"),
    ],
)
def test_vectors_that_cannot_be_summed_up_are_refused(question: questions.Reduce, why: str) -> None:
    desk = Desk()
    desk.ask("a", reduce(0, [1]))
    with pytest.raises(StoreServiceError, match=why):
        desk.ask("b", question)
    assert desk.ask("a", reduce(0, [1])) == {}
    assert desk.ask("b", reduce(1, [2]))["a"] == Sums(1, [3])


def test_a_sum_that_nobody_is_there_for_is_forgotten() -> None:
    desk = Desk()
    desk.ask("a", reduce(0, [1]))
    desk.ended("a")
    assert desk.ask("b", reduce(1, [1], size=5)) == {}
