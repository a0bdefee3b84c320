"""The work for a story grows with the number of restarts, and not with its square."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.many_restarts import Line, calls_of, failing, on_many_hosts, replaced
from regrow.events import story


@pytest.mark.parametrize("job", [failing, replaced, on_many_hosts])
def test_twice_as_many_restarts_are_twice_the_work(job: Callable[[int], list[Line]]) -> None:
    assert calls_of(story, job(200)) < 2.3 * calls_of(story, job(100))


def test_a_restart_names_the_process_of_its_rank_on_any_host() -> None:
    assert {restart.pid for restart in story(on_many_hosts(3)).in_place} == {3}


def test_each_restart_has_its_own_replacement() -> None:
    found = story(replaced(3)).in_place
    assert [[each.ended_pid for each in restart.replaced] for restart in found] == [[0], [1], [2]]
    assert [len(restart.states) for restart in found] == [1, 1, 1]
