"""The memory of the console: bounded in a crash loop, and enough for the story."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from helpers.explained.record import STORIES
from regrow.cli.screen.console import MOST, Console, KeptEvents
from regrow.events import Event, EventSource, read_events, story


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"regrow.{name}", "run_id": "job", "attempt": 0, **fields}


def kept_of(*records: dict[str, Any]) -> KeptEvents:
    kept = KeptEvents()
    for each in records:
        kept.add(each)
    return kept


def test_the_first_and_the_last_events_of_a_loop_are_kept_in_their_order() -> None:
    loop = [record("inprocess.restarted", iteration=i) for i in range(3 * MOST)]
    start, end = record("job.started"), record("job.finished", state="SUCCEEDED", restarts=2)
    kept = kept_of(start, *loop, end)
    assert kept.in_order() == [start, *loop[:MOST], *loop[-MOST:], end]
    assert kept.left_out == MOST
    told = story(kept.in_order())
    assert (told.restarts, told.in_place[-1].iteration) == (2, 3 * MOST - 1)


def test_events_that_the_story_relates_to_each_other_are_all_kept() -> None:
    attempts = [
        each
        for attempt in range(2 * MOST + 1)
        for each in (
            record("attempt.started", attempt=attempt),
            *(record("worker.failed", attempt=attempt, rank=rank) for rank in (0, 1)),
        )
    ]
    replaced = [
        each
        for number in range(2 * MOST + 1)
        for each in (
            record("worker.vacated", rank=1, incarnation=number),
            record("worker.replaced", rank=1, incarnation=number + 1),
            record("inprocess.restarted", iteration=number, replaced=[1]),
        )
    ]
    kept = kept_of(*attempts, *replaced)
    assert kept.in_order() == attempts + replaced
    assert kept.left_out == 0


def test_what_only_the_ledger_uses_is_not_kept() -> None:
    steps: dict[str, dict[str, float]] = {"seconds": {"steps": 1.0}, "counts": {"steps": 2}}
    account = {"open": "pending", "highest_step": 2, "counts": steps["counts"]}
    accounts = {"0": account | {"seconds": {"steps": 1.0, "phase:data": 1.0}}}
    ended = record("attempt.ended", state="FAILED")
    updates = [record("worker.accounts", accounts=accounts)] * (3 * MOST)
    vacated = record("worker.vacated")
    kept = kept_of(*updates, vacated | {"account": accounts["0"]}, ended | {"accounts": accounts})
    assert kept.in_order() == [vacated, ended | {"accounts": {"0": steps}}]
    assert kept.left_out == 0


@pytest.mark.parametrize(
    "path", sorted(STORIES.glob("*/*.jsonl")), ids=lambda path: path.parent.name
)
def test_the_printed_story_is_that_of_all_events(path: Path) -> None:
    events = list(read_events(path))
    assert story(kept_of(*events).in_order()).render() == story(events).render()


def test_the_printed_story_says_that_it_is_without_some_events() -> None:
    def printed(loops: int) -> str:
        stream = io.StringIO()
        with Console(stream, {}) as console:
            for number in range(loops):
                fields = {"run_id": "job", "attempt": 0, "iteration": number}
                console(Event("regrow.inprocess.restarted", EventSource.AGENT, metadata=fields))
        return stream.getvalue()

    assert "without" not in printed(2 * MOST)
    assert "regrow: without 5 events; `regrow events` shows" in printed(2 * MOST + 5)
