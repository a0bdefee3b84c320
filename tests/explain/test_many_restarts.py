"""The work for the explanations grows with the number of restarts, and not with its square."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.many_restarts import Line, calls_of, failing, replaced
from regrow.explain import Explanation, explain


@pytest.mark.parametrize("job", [failing, replaced])
def test_twice_as_many_restarts_are_twice_the_work(job: Callable[[int], list[Line]]) -> None:
    def explained(events: list[Line]) -> list[Explanation]:
        return next(iter(explain({"log": events}).values()))

    assert len(explained(job(100))) >= 100
    assert calls_of(explained, job(200)) < 2.3 * calls_of(explained, job(100))
