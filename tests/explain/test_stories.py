"""The pages about recorded failures of real jobs, word for word.

`python -m helpers.explained.record --pages` writes them again after a change of the words; read
what it changed.
"""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.explained.record import STORIES, in_utc, stories, text_of
from regrow.events import read_events
from regrow.explain import Explanation, draw, explain, page


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC")
        in_utc()
        yield
    time.tzset()


def explanations(name: str) -> list[Explanation]:
    logs = {path.name: list(read_events(path)) for path in (STORIES / name).glob("*.jsonl")}
    return list(explain(logs).values())[-1]


def test_a_dozen_kinds_of_failures_are_recorded() -> None:
    assert len(stories()) >= 12


@pytest.mark.parametrize("name", stories())
def test_the_page_is_the_recorded_one(name: str) -> None:
    assert text_of(name) == Path(STORIES, f"{name}.txt").read_text()


@pytest.mark.parametrize("name", stories())
def test_each_page_has_all_parts_in_lines_that_fit(name: str) -> None:
    for each in explanations(name):
        text = page(each)
        assert each.evidence, text
        assert each.action, text
        assert each.cost.seconds is not None, text
        assert text.isascii(), text
        long = [line for line in text.splitlines() if len(line) > 100]
        assert all("File" in line for line in long), long


@pytest.mark.parametrize("name", stories())
def test_the_timeline_has_no_gap_and_the_json_is_plain(name: str) -> None:
    for each in explanations(name):
        ends = [0.0, *(phase.end_s for phase in each.timeline)]
        assert [phase.start_s for phase in each.timeline] == pytest.approx(ends[:-1])
        found = json.loads(json.dumps(each.to_json()))
        assert found["title"] == each.title
        assert found["cost"].keys() >= {"seconds", "steps", "worker_seconds", "worker_hours"}


@pytest.mark.parametrize("name", stories())
def test_the_picture_is_a_well_formed_document_with_a_bar_for_each_phase(name: str) -> None:
    for each in explanations(name):
        tree = ET.fromstring(draw(each))
        assert tree.tag.endswith("}svg")
        bars = [node for node in tree.iter() if node.tag.endswith("}rect")]
        assert len(bars) == len(each.timeline)


def test_the_worker_seconds_of_a_failure_are_a_part_of_all() -> None:
    from regrow.ledger import build_ledgers

    for name in stories():
        logs = {path.name: list(read_events(path)) for path in (STORIES / name).glob("*.jsonl")}
        ledger = build_ledgers(logs)[-1]
        spent = sum(each.cost.worker_seconds or 0.0 for each in explanations(name))
        assert spent <= ledger.total + 1e-6, name


@pytest.mark.parametrize("name", stories())
def test_an_event_may_be_missing_or_malformed(name: str) -> None:
    logs = {path.name: list(read_events(path)) for path in (STORIES / name).glob("*.jsonl")}
    count = max(len(events) for events in logs.values())
    for gone in range(count):
        cut = {log: events[:gone] + events[gone + 1 :] for log, events in logs.items()}
        torn = {log: events[:gone] for log, events in logs.items()}
        odd = {
            log: [
                {key: [{"x": 1}] for key in event} | {"name": event["name"]} if n == gone else event
                for n, event in enumerate(events)
            ]
            for log, events in logs.items()
        }
        for changed in (cut, torn, odd):
            for found in explain(changed).values():
                for each in found:
                    assert page(each)
                    assert draw(each)
                    json.dumps(each.to_json())


def test_control_characters_of_a_message_do_not_reach_the_terminal() -> None:
    logs = {
        path.name: [
            {
                k: f"{v}\x1b[2J\n" if isinstance(v, str) and k == "message" else v
                for k, v in e.items()
            }
            for e in read_events(path)
        ]
        for path in (STORIES / "exit-code").glob("*.jsonl")
    }
    (only,) = list(explain(logs).values())[-1]
    assert not re.search(r"[^\x20-\x7e\n]", page(only))
    assert "\x1b" not in draw(only)
