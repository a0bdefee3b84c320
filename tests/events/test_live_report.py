"""What an agent reports to views: any text is parsed, and the events are limited."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.events import Event, EventSource
from regrow.events.live_report import (
    MOST_BYTES,
    LiveReport,
    LiveStep,
    RecentEvents,
    decode,
    encode,
    read_events_after,
)

NUMBER = st.integers(0, 2**62)
SECONDS = st.floats(0, 1e12)
PRINTABLE = st.characters(exclude_categories=["C", "Z"])
STEP = st.builds(
    LiveStep, NUMBER, SECONDS, NUMBER, SECONDS, st.text(PRINTABLE, max_size=40), SECONDS
)
REPORT = st.builds(
    LiveReport,
    host=st.text(PRINTABLE, max_size=60),
    pid=NUMBER,
    start_ticks=NUMBER,
    nodes=NUMBER,
    attempt=st.integers(-1, 2**62),
    monotonic=SECONDS,
    events=NUMBER,
    steps=st.dictionaries(st.integers(0, 4096), STEP, max_size=8),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


@given(REPORT)
def test_a_report_is_read_as_it_was_written(report: LiveReport) -> None:
    assert decode(encode(report)) == report


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode(text)


@given(REPORT, st.integers(0, 7), JSON)
def test_a_report_with_a_wrong_field_is_refused_or_plausible(
    report: LiveReport, field: int, value: Any
) -> None:
    fields = json.loads(encode(report))
    fields[field] = value
    try:
        found = decode(json.dumps(fields).encode())
    except ValueError:
        return
    assert [type(each) for each in found] == [type(each) for each in report]


@pytest.mark.parametrize("host", ["\0", "\ud800", "\x1b[2J", "x" * 301])
def test_a_host_that_cannot_be_shown_is_refused(host: str) -> None:
    report = LiveReport(host, 1, 2, 3, 4, 5.0, 6, {})
    with pytest.raises(ValueError, match="plausible"):
        decode(encode(report))


def test_a_text_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nested"):
        decode(b"[" * 100_000)


def event(name: str, **fields: Any) -> Event:
    return Event(f"regrow.{name}", EventSource.AGENT, metadata=fields)


def names(text: bytes, after: int = 0) -> list[str]:
    return [record["name"].removeprefix("regrow.") for _, record in read_events_after(text, after)]


def test_the_latest_events_are_kept_and_numbered() -> None:
    recent = RecentEvents()
    for name in ("job.started", "worker.accounts", "worker.failed"):
        recent(event(name))
    count, text = recent.text()
    assert (count, names(text), names(text, 1)) == (
        2,
        ["job.started", "worker.failed"],
        ["worker.failed"],
    )


def test_many_events_are_limited_and_the_start_of_the_attempt_is_kept() -> None:
    recent = RecentEvents()
    for name in ("job.started", "attempt.started", "attempt.started"):
        recent(event(name))
    for _ in range(10_000):
        recent(event("inprocess.restarted", kind="x" * 100))
    count, text = recent.text()
    assert count == 10_003
    assert len(text) < 2 * MOST_BYTES
    assert names(text)[:3] == ["job.started", "attempt.started", "inprocess.restarted"]
    assert read_events_after(text, 0)[-1][0] == count


def test_lines_that_are_no_events_are_left_out() -> None:
    text = b'1 {"name": "a"}\n\nx\n3 [1]\n4 {\n\xff 2\n99999999999999999999 {}\n5 {"name": "b"}\n'
    assert [number for number, _ in read_events_after(text, 0)] == [1, 5]
