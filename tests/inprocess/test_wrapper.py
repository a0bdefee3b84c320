"""A wrapped function on each rank after each kind of failure."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ranks.playing import Fates, Play, playing


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Runs a case: `play(name, number of ranks)`."""
    with playing("wrapped_ranks") as play:
        yield play


def values(fates: Fates) -> list[Any]:
    return [fate.get("value", "none") for fate in fates]


def worlds(fate: dict[str, Any]) -> list[list[Any]]:
    calls: list[list[Any]] = fate["calls"]
    return calls


def seen(fates: Fates) -> list[Any]:
    return [fate["seen"] for fate in fates]


def test_a_function_without_faults_is_called_once(play: Play) -> None:
    fates = play("completes")
    assert values(fates) == [0, 0, 0]
    assert [worlds(fate) for fate in fates] == [[[0, str(r), "3"]] for r in range(3)]


def test_a_process_that_replaced_another_begins_its_next_call_as_every_other_rank(
    play: Play,
) -> None:
    assert seen(play("completes_its_second_call")) == [[[False, []]]] * 3


def test_an_exception_restarts_the_function_on_all_ranks(play: Play) -> None:
    fates = play("raises")
    assert values(fates) == [1, 1, 1]
    assert [worlds(fate)[1] for fate in fates] == [[1, str(r), "3"] for r in range(3)]


def test_the_others_restart_without_a_rank_that_was_killed(play: Play) -> None:
    killed, *living = play("is_killed")
    assert killed == {"signal": signal.SIGKILL}
    assert values(living) == [1, 1]
    assert [worlds(fate)[1] for fate in living] == [[1, "0", "2"], [1, "1", "2"]]


@pytest.mark.parametrize(
    ("case", "rank", "raised"),
    [
        ("exits", 1, "SystemExit"),
        ("gets_sigint", 0, "KeyboardInterrupt"),
        ("gets_sigint_in_a_pause", 0, "KeyboardInterrupt"),
        ("exits_in_initialize", 1, "SystemExit"),
        ("fails_in_finalize", 1, "Played"),
        ("is_unhealthy_after_a_fault", 1, "HealthCheckError"),
        ("fails_while_restarting", 2, "Played"),
        ("is_discarded", 2, "RankDiscarded"),
    ],
)
def test_what_ends_a_rank_is_raised_there_and_the_others_restart_without(
    play: Play, case: str, rank: int, raised: str
) -> None:
    fates = play(case)
    assert fates[rank]["raised"] == raised
    living = fates[:rank] + fates[rank + 1 :]
    assert [worlds(fate)[-1][1:] for fate in living] == [["0", "2"], ["1", "2"]]
    assert all(value >= 1 for value in values(living))


def test_the_keys_of_an_iteration_are_gone_in_the_next(play: Play) -> None:
    # Each of the three ranks writes one key in each of the three iterations.
    assert seen(play("writes_into_the_store")) == [[3]] * 3


@pytest.mark.thorough
def test_a_rank_without_a_place_is_nothing_that_others_restart_for(play: Play) -> None:
    assert [len(worlds(fate)) for fate in play("is_discarded")] == [2, 2, 1]


@pytest.mark.thorough
def test_a_rank_that_leaves_names_the_fault_that_ended_the_iteration(play: Play) -> None:
    fates = play("fails_in_finalize")
    assert "untidy" in fates[1]["text"]
    assert "ended by EXCEPTION on initial rank 0: Played('the root')" in fates[1]["text"]


def test_a_rank_that_fails_when_the_call_is_over_raises_what_it_was(play: Play) -> None:
    fates = play("fails_when_the_call_is_over")
    assert [fate.get("value") for fate in fates] == [0, None, 0]
    assert fates[1]["raised"] == "InternalError"
    assert "the call has ended on the other ranks" in fates[1]["text"]
    assert "too late" in fates[1]["cause"]


def test_when_all_are_unhealthy_all_leave_and_name_one_root_cause(play: Play) -> None:
    fates = play("all_are_unhealthy")
    assert [fate["raised"] for fate in fates] == ["HealthCheckError"] * 3
    assert all("sick" in fate["text"] for fate in fates)
    assert all("on initial rank 2: Played('the root')" in fate["text"] for fate in fates[:2])
    assert "on initial rank" not in fates[2]["text"]  # its own


@pytest.mark.parametrize(
    "case",
    [
        "fails_in_initialize",
        "is_unhealthy_at_first",
        "fails_in_abort",
        "fails_when_another_is_done",
        "is_never_done",
        "swallows",
        "sleeps_too_long",
        "stops_pinging",
        "meets_in_any_store",
    ],
)
def test_a_fault_that_a_rank_survives_restarts_all(play: Play, case: str) -> None:
    fates = play(case)
    assert values(fates) == [1, 1, 1]
    assert [worlds(fate)[-1] for fate in fates] == [[1, str(r), "3"] for r in range(3)]


def test_faults_of_two_ranks_at_once_are_one_restart_and_each_has_its_own(play: Play) -> None:
    fates = play("two_at_once")
    assert values(fates) == [1, 1, 1]
    assert seen(fates)[2] == [0]
    assert [1] in seen(fates)[:2]


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["dies_in_finalize", "dies_when_the_others_are_done"])
def test_a_death_at_a_barrier_is_no_end_of_the_others(play: Play, case: str) -> None:
    first, dead, last = play(case)
    assert dead == {"signal": signal.SIGKILL}
    assert [worlds(fate)[-1][1:] for fate in (first, last)] == [["0", "2"], ["1", "2"]]


@pytest.mark.thorough
def test_restarts_end_on_all_ranks_when_they_were_too_many(play: Play) -> None:
    fates = play("gives_up_after_three")
    assert [fate["raised"] for fate in fates] == ["RestartAbort"] * 3
    assert [len(worlds(fate)) for fate in fates] == [3] * 3


def test_a_rank_in_reserve_takes_the_place_of_a_lost_one_and_others_return_none(
    play: Play,
) -> None:
    dead, one, two, three = play("has_a_reserve", 4)
    assert dead == {"signal": signal.SIGKILL}
    assert values([one, two, three]) == [1, 1, None]
    assert worlds(two) == [[1, "1", "2"]]
    assert worlds(three) == []


def test_no_restart_begins_in_a_section(play: Play) -> None:
    fates = play("is_in_a_section")
    assert values(fates) == [1, 1, 1]
    assert seen(fates) == [[], ["whole"], ["whole"]]


@pytest.mark.thorough
def test_a_section_without_hang_protection_may_take_long(play: Play) -> None:
    assert values(play("takes_its_time")) == [0, 0, 0]


def test_plugins_of_both_generations_work_in_one_chain(play: Play) -> None:
    fates = play("uses_both_generations")
    assert values(fates) == [1, 1, 1]
    at_first, later = ["old assignment", []], ["old assignment", []]
    own, none = "Played('x')", "None"
    assert seen(fates)[0] == [at_first, ["old finalize", own], ["finalize", own], later]
    assert seen(fates)[1] == [at_first, ["old finalize", none], ["finalize", none], later]


def test_the_end_of_the_call_and_the_end_of_a_rank_have_their_plugins(play: Play) -> None:
    fates = play("ends")
    done, gone = [["completion", "ACTIVE"]], [["terminate", "TERMINATED"]]
    assert seen(fates) == [done, gone, done]


@pytest.mark.thorough
def test_what_fails_at_the_end_of_a_rank_is_raised_there_and_at_that_of_the_call_is_not(
    play: Play,
) -> None:
    first, gone, last = play("fails_at_its_end")
    assert values([first, last]) == [1, 1]
    assert (gone["raised"], gone["text"], gone["cause"]) == (
        "Played",
        "of the rank",
        "SystemExit(3)",
    )


@pytest.mark.thorough
def test_a_call_within_a_call_ends_all_ranks_at_once(play: Play) -> None:
    for fate in play("calls_within_a_call", 2):
        assert fate["raised"] == "RestartAbort"
        assert "calls another one" in fate["text"]
        assert len(worlds(fate)) <= 2  # a rank may be interrupted before it calls the inner one


@pytest.mark.thorough
def test_a_rank_without_its_store_leaves_with_link_lost_error(play: Play) -> None:
    (fate,) = play("loses_its_store", 1)
    assert fate["raised"] == "LinkLostError"
    assert "cannot reach the store" in fate["text"]


@pytest.mark.thorough
def test_a_forked_child_has_no_part_in_the_call(play: Play) -> None:
    fates = play("forks", 2)
    assert values(fates) == [0, 0]
    assert seen(fates) == [[True], [True]]


@pytest.mark.thorough
def test_calls_may_be_made_one_after_the_other(play: Play) -> None:
    assert values(play("calls_one_after_the_other", 2)) == [[1, 0], [1, 0]]


@pytest.mark.thorough
def test_the_function_may_run_in_another_thread(play: Play) -> None:
    assert values(play("in_another_thread", 2)) == [[1], [1]]


@pytest.mark.thorough
def test_what_the_function_held_is_gone_when_it_is_called_again(play: Play) -> None:
    assert seen(play("leaves_something_behind", 2)) == [[[], [True], [True, True]]] * 2


def test_objects_of_the_first_iteration_are_not_scanned_at_each_restart(
    play: Play,
) -> None:
    (fate,) = play("loads_much_in_the_function", 1)
    gone = [[True] * iteration for iteration in range(4)]
    assert fate["seen"] == [[False, each] for each in gone]
    assert fate["value"] == 0  # nothing stays frozen after the call


@pytest.mark.thorough
def test_a_call_that_is_over_holds_nothing(play: Play) -> None:
    for early, late in seen(play("calls_again_and_again", 2)):
        assert late == early


@pytest.mark.thorough
def test_each_rank_logs_once_that_restarts_wait(play: Play) -> None:
    fates = play("restarts_more_often_than_is_free", 2)
    assert values(fates) == [5, 5]
    for lines in seen(fates):
        assert sum("fails again and again" in line for line in lines) == 1


@pytest.mark.thorough
def test_restarts_leave_no_thread_and_no_descriptor(play: Play) -> None:
    fates = play("restarts_twenty_times")
    assert values(fates) == [20, 20, 20]
    for early, late in seen(fates):
        assert late[:2] == early[:2]


@pytest.mark.thorough
@pytest.mark.training
@pytest.mark.timeout(280)
def test_a_thousand_restarts_leave_nothing_behind(play: Play) -> None:
    fates = play("restarts_a_thousand_times")
    assert values(fates) == [1000, 1000, 1000]
    for early, late in seen(fates):
        assert late[:2] == early[:2]
        assert late[2] < early[2] + 4096  # KiB: a leak of 5 KiB a restart is more
