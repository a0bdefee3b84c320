"""Exceptions in the user's code that the wrapper calls end no rank and hide no fault."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ranks.playing import Fates, Play, playing


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    with playing("hostile_ranks") as play:
        yield play


def values(fates: Fates) -> list[Any]:
    return [fate.get("value", "none") for fate in fates]


@pytest.mark.parametrize(
    "case",
    [
        "raises_what_cannot_be_shown",
        "raises_what_cannot_be_compared",
        "raises_what_cannot_be_inspected",
        "raises_what_has_no_class",
        "raises_what_has_a_strange_cause",
        "fails_while_others_handle_a_ring_of_exceptions",
        "has_a_log_handler_that_raises",
        "has_a_log_handler_that_exits",
        "has_plugins_that_return_something_else",
        "has_an_assignment_with_numbers_of_its_own",
        "raises_a_restart",
    ],
)
def test_a_fault_with_user_code_that_raises_restarts_all(play: Play, case: str) -> None:
    assert values(play(case)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("case", "raised"),
    [
        ("ends_by_what_cannot_be_shown", "UnspeakableEnd"),
        ("ends_by_what_has_no_class", "ClasslessEnd"),
        ("ends_by_what_is_frozen", "Frozen"),
        ("fails_in_finalize_and_takes_no_note", "Unnotable"),
        ("counts_faults_that_cannot_be_shown", "HealthCheckError"),
        ("has_a_health_check_that_raises_what_cannot_be_shown", "HealthCheckError"),
    ],
)
def test_a_rank_that_leaves_raises_what_ended_it_and_the_others_continue(
    play: Play, case: str, raised: str
) -> None:
    first, gone, last = play(case)
    assert gone.get("raised") == raised
    assert values([first, last]) == [1, 1]


def test_a_rank_that_leaves_a_failed_group_raises_what_ended_it(play: Play) -> None:
    (gone,) = play("leaves_a_failed_group_by_what_cannot_be_shown", 1)
    assert gone.get("raised") == "UnspeakableEnd"


@pytest.mark.thorough
def test_a_rank_that_cannot_show_its_fault_is_ended_at_the_hard_timeout(play: Play) -> None:
    first, hung, last = play("raises_what_takes_too_long_to_show")
    assert hung == {"signal": signal.SIGTERM}
    assert values([first, last]) == [1, 1]


def test_the_type_of_a_fault_that_cannot_be_shown_is_named(play: Play) -> None:
    _, gone, _ = play("counts_faults_that_cannot_be_shown")
    assert "Unspeakable: repr() raises RuntimeError" in gone["text"]


def test_a_restart_that_the_function_raises_may_have_a_cause(play: Play) -> None:
    fates = play("raises_a_restart_with_a_cause")
    assert values(fates) == [1, 1, 1]
    assert [fate["seen"] for fate in fates] == [["None"], ["Played('the cause')"], ["None"]]


@pytest.mark.parametrize(
    ("case", "end"),
    [
        ("swallows_a_restart", r"continued to \S+\.py:\d+ in \w+"),
        ("swallows_a_restart_and_returns", "continued to its end"),
    ],
)
def test_a_restart_that_the_function_swallowed_is_logged_with_the_place(
    play: Play, case: str, end: str
) -> None:
    fates = play(case)
    assert values(fates) == [1, 1, 1]
    for fate in fates[1:]:
        (line,) = fate["seen"]
        assert re.search(r"raised at \S+\.py:\d+ in \w+", line)
        assert re.search(end, line)


@pytest.mark.thorough
def test_a_restart_that_waits_for_a_cleanup_is_not_swallowed(play: Play) -> None:
    fates = play("takes_its_time_to_clean_up")
    assert values(fates) == [1, 1, 1]
    assert [fate["seen"] for fate in fates] == [[], [], []]


def test_the_end_of_the_restarts_is_raised_from_the_last_fault_on_every_rank(play: Play) -> None:
    fates = play("gives_up_and_is_recorded")
    fault = (
        r"RankFault\(\"EXCEPTION on initial rank 1 in iteration 1: Played\('again'\) \(\w+.py:\d+\)"
    )
    assert [bool(re.match(fault, fate["seen"][0])) for fate in fates] == [True, False, True]
    assert fates[1]["seen"][0] == "Played('again')"
    assert [fate["seen"][1] for fate in fates] == [False, True, False]
    for fate in fates:
        recorded = fate["seen"][2]
        assert "again" in recorded.split("direct cause of")[0]
        assert "RestartAbort: no further restart" in recorded.split("direct cause of")[1]


def test_a_fault_that_is_kept_for_that_holds_nothing_of_the_function(play: Play) -> None:
    assert values(play("gives_up_and_is_recorded")) == [0, 0, 0]
    _, rank, _ = play("gives_up_by_what_holds_more")
    assert rank["seen"][0].startswith("RankFault('EXCEPTION on initial rank 1 in iteration 1:")


def test_the_files_of_the_monitor_are_there_after_the_call(play: Play) -> None:
    for rank, fate in enumerate(play("names_files_of_the_monitor", 2)):
        assert fate["value"] == [f"{n}.{rank}.{kind}" for n in (0, 1) for kind in ("log", "pid")]


def test_a_plugin_that_cannot_be_shown_is_called_as_any_other(play: Play) -> None:
    assert values(play("has_a_plugin_that_cannot_be_shown", 1)) == [0]


def test_a_line_that_a_log_handler_loses_is_seen_by_the_others(play: Play) -> None:
    first, _, _ = play("has_a_log_handler_that_raises")
    assert any("restarts the function" in line for line in first["seen"])


def test_log_handlers_of_the_user_see_each_restart(play: Play) -> None:
    fates = play("has_a_log_handler_for_information")
    assert [fate["seen"] for fate in fates] == [["WARNING"], ["INFO"], ["INFO"]]


def test_each_iteration_logs_a_debug_line(play: Play) -> None:
    fates = play("has_a_log_handler_for_everything")
    levels = ["WARNING", "DEBUG"], ["INFO", "DEBUG"], ["INFO", "DEBUG"]
    assert [fate["seen"] for fate in fates] == [*levels]


def test_a_restart_is_one_warning_of_rank_0(play: Play) -> None:
    fates = play("has_a_log_handler_for_warnings")
    assert [fate["seen"] for fate in fates] == [["WARNING"], [], []]
