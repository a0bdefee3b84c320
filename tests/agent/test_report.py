"""The report of a failure: bounded, and any content can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.records import shared_failure as _report
from regrow.workers import ChildFailedError, ProcessFailure

TEXT = st.text(max_size=20)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("host", "rank", "local_rank", "pid", "exit_code", "message", "traceback", "timestamp")


def raised(directory: Path, traceback: str) -> ProcessFailure:
    """The failure of a worker that left an error file."""
    message = {"message": "ValueError: no", "extraInfo": {"py_callstack": traceback}}
    path = directory / "error.json"
    path.write_text(json.dumps({"message": message}))
    return ProcessFailure(1, 42, 1, str(path))


def test_a_report_shows_the_same_failure_on_another_host(tmp_path: Path) -> None:
    here = raised(tmp_path, "Traceback (most recent call last):\n  ...\nValueError: no")
    rank, there = _report.decode(_report.encode(5, here, "host-a"))
    assert (rank, there.host, there.pid, there.exitcode) == (5, "host-a", 42, 1)
    assert (there.summary, there.traceback) == (here.summary, here.traceback)
    assert (there.error_file, there.has_error_file) == (here.error_file, False)
    assert there.timestamp == here.timestamp
    text = str(ChildFailedError("train.py", {5: there}))
    assert "host      : host-a" in text
    assert "ValueError: no" in text


@pytest.mark.parametrize("exitcode", [3, -9])
def test_a_failure_without_a_message_reads_the_same_on_every_host(exitcode: int) -> None:
    here = ProcessFailure(0, 42, exitcode, "")
    _, there = _report.decode(_report.encode(0, here, "host-a"))
    assert (there.summary, there.message) == (here.summary, here.message)
    assert there.signal_name() == here.signal_name()


@pytest.mark.parametrize("letter", ["x", "é", "\N{GRINNING FACE}", "\0", '"'])
def test_a_report_is_bounded_and_keeps_the_end_of_the_traceback(
    tmp_path: Path, letter: str
) -> None:
    here = raised(tmp_path, letter * 300_000 + "ValueError: the end")
    report = _report.encode(0, here, letter * 10_000)
    assert len(report.encode()) <= _report.MAX_BYTES
    _, there = _report.decode(report)
    assert there.traceback is not None
    assert there.traceback.endswith("ValueError: the end")
    assert "characters cut" in there.traceback


@given(st.dictionaries(st.sampled_from(FIELDS) | TEXT, ANYTHING))
def test_any_document_of_another_release_becomes_a_failure(
    fields: dict[str, Any],
) -> None:
    rank, failure = _report.decode(json.dumps(fields))
    assert rank is None or rank >= 0
    assert failure.host
    assert "FAILED" in str(ChildFailedError("train.py", {0: failure}))
    json.loads(_report.encode(rank, failure, failure.host))


@given(st.text())
def test_any_other_text_becomes_a_failure(report: str) -> None:
    _, failure = _report.decode(report)
    assert failure.summary
