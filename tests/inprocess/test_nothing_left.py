"""A call of a wrapped function leaves no object alive, without the garbage collector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.ranks.playing import Play, playing


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    with playing("leaving_ranks") as play:
        yield play


@pytest.mark.parametrize(
    ("case", "ended"),
    [
        ("completes", "NoneType"),
        ("restarts", "NoneType"),
        ("raises_a_restart", "NoneType"),
        ("uses_another_store", "NoneType"),
        ("runs_in_another_thread", "NoneType"),
        ("raises_and_leaves", "SystemExit"),
        pytest.param("loses_its_store_and_leaves", "SystemExit", marks=pytest.mark.thorough),
        ("gives_up", "RestartAbort"),
        ("ends_in_initialize", "SystemExit"),
        ("ends_in_finalize", "Played"),
        ("is_unhealthy", "HealthCheckError"),
        ("fails_in_terminate", "Played"),
        ("cannot_be_assigned", "Played"),
        ("cannot_be_assigned_again", "Played"),
        ("has_no_store", "Played"),
        ("is_called_with_the_wrong_arguments", "TypeError"),
        ("waits_until_the_time_out", "BarrierTimeout"),
    ],
)
def test_nothing_is_left_right_after_the_call(play: Play, case: str, ended: str) -> None:
    (fate,) = play(case, 1)
    how, while_held, after = fate["seen"]
    assert how == ended
    assert while_held == []
    assert after == []
