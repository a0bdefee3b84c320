"""The job's log of events, and how it is found again."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from regrow.events import (
    Event,
    EventLog,
    EventSource,
    QueuedEventLog,
    find_event_file,
    read_events,
)


def event(name: str = "x", /, **metadata: object) -> Event:
    return Event(name, EventSource.AGENT, metadata=metadata)


def test_a_line_has_the_event_its_wall_time_and_its_monotonic_time(tmp_path: Path) -> None:
    before = time.time(), time.monotonic()
    with EventLog(tmp_path / "events.jsonl") as log:
        log(event("regrow.job.started", rank=1, bounds={"a": 0.5}))
    after = time.time(), time.monotonic()
    (line,) = read_events(tmp_path)
    assert before[0] <= line.pop("time") <= after[0]
    assert before[1] <= line.pop("monotonic") <= after[1]
    assert line == {
        "name": "regrow.job.started",
        "source": "AGENT",
        "rank": 1,
        "bounds": {"a": 0.5},
    }


def test_the_times_that_an_event_carries_win_over_the_time_of_writing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log(Event("x", EventSource.AGENT, 12_500, {"monotonic": 3.25}))
    (line,) = read_events(tmp_path)
    assert (line["time"], line["monotonic"]) == (12.5, 3.25)


def test_metadata_cannot_hide_what_the_event_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log(event("x", name="y", source="z", time=1))
    (line,) = read_events(tmp_path)
    assert (line["name"], line["source"]) == ("x", "AGENT")
    assert (line["metadata_name"], line["metadata_source"]) == ("y", "z")
    assert line["metadata_time"] == 1


def test_a_log_that_cannot_be_written_counts_what_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = EventLog("/dev/full")
    for _ in range(3):
        log.record(event())
    assert log.lost == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_an_event_that_comes_after_a_queued_log_is_closed_is_written(tmp_path: Path) -> None:
    log = QueuedEventLog(tmp_path / "events.jsonl")
    for number in range(3):
        log(event(f"{number}"))
        log.close()
    assert [line["name"] for line in read_events(tmp_path)] == ["0", "1", "2"]


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("reason", ["it failed", "\U0001f4a5" * 100_000])
def test_the_end_of_a_job_is_kept_on_a_disk_that_is_full_by_then(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log(event("regrow.job.started"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_room)
            log(event("regrow.attempt.started"))
            log(event("regrow.job.finished", state="FAILED", reason=reason))
    started, gap, finished = read_events(tmp_path)
    assert started["name"] == "regrow.job.started"
    assert (gap["name"], gap["lost"]) == ("regrow.log.gap", 1)
    assert (finished["name"], finished["state"]) == ("regrow.job.finished", "FAILED")
    assert reason.startswith(finished["reason"])
    assert finished["reason"]


def test_a_job_that_ended_as_usual_leaves_the_log_and_one_that_was_killed_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log(event("regrow.job.started"))
    assert [line["name"] for line in read_events(tmp_path)] == ["regrow.job.started"]
    log(event("regrow.job.finished"))
    assert os.listdir(tmp_path) == ["events.jsonl"]
    assert capsys.readouterr().err == ""


def write_run(folder: Path, name: str, mtime: int) -> Path:
    path = folder / name / "events.jsonl"
    path.parent.mkdir(parents=True)
    EventLog(path)(event(name))
    os.utime(path, (mtime, mtime))
    return path


def test_a_log_is_found_by_its_path_its_run_and_its_log_directory(tmp_path: Path) -> None:
    path = write_run(tmp_path, "job_abc", 1)
    for place in (path, path.parent, tmp_path, str(tmp_path)):
        assert [line["name"] for line in read_events(place)] == ["job_abc"]


def test_of_several_runs_the_newest_is_read_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, "job_z", 1)
    newest = write_run(tmp_path, "job_a", 3)
    write_run(tmp_path, "job_m", 2)
    (tmp_path / "unrelated").mkdir()
    remarks: list[str] = []
    assert [line["name"] for line in read_events(tmp_path, remarks.append)] == ["job_a"]
    assert remarks == [f"3 runs in {tmp_path}; this is the newest, {newest}"]
    assert [Path(p).parent.name for p in find_event_file(tmp_path).older] == ["job_m", "job_z"]


def test_broken_lines_are_reported_once_each_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"name": "a"}\nrubbish\n{"name": "b"}\n{"name": "c')
    assert [line["name"] for line in read_events(tmp_path)] == ["a", "b"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert f"{path}: line 2 left out: not JSON" in lines[0]
    assert f"{path}: line 4 left out: incomplete" in lines[1]


@pytest.mark.parametrize(("place", "text"), [("", "no events.jsonl"), ("gone", "no such file")])
def test_where_there_is_no_log_the_error_names_the_place(
    place: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=text) as caught:
        read_events(tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
