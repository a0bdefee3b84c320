"""Logs are found, grouped into jobs, and read as they grow; pages are opened with care."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from helpers.views.written_job import WrittenJob
from regrow.events import NO_ID
from regrow.views import Library
from regrow.views.logs import LogName, LogReader, log_files
from regrow.views.pages import StepPage
from regrow.views.runs import MOST_OF_A_NAME, EventReader, Run, grouped


def run(directory: str, started: float, last: float, run_id: str = "job", end: str = "") -> Run:
    return Run(directory, run_id, "host", started, last, end or None, None, "train.py")


def test_runs_of_one_id_that_overlap_are_one_job() -> None:
    runs = [run("a", 0, 100, end="SUCCEEDED"), run("b", 5, 90, end="SUCCEEDED")]
    assert [[each.directory for each in job.runs] for job in grouped(runs)] == [["a", "b"]]


def test_a_requeued_run_is_another_job_and_comes_first() -> None:
    runs = [run("a", 0, 100, end="SIGNALED"), run("b", 101, 150)]
    assert [[each.directory for each in job.runs] for job in grouped(runs)] == [["b"], ["a"]]


def test_a_log_without_an_end_may_overlap_for_a_minute() -> None:
    runs = [run("a", 0, 1), run("b", 50, 60), run("c", 200, 201)]
    assert [[each.directory for each in job.runs] for job in grouped(runs)] == [["c"], ["a", "b"]]


def test_runs_of_other_ids_are_other_jobs() -> None:
    assert len(grouped([run("a", 0, 100), run("b", 5, 90, "other")])) == 2


def log_of(runs: Path, name: str, nodes: list[str], wall: float = 1000.0, filler: int = 0) -> None:
    """Write the log of a run of the job "none"; `filler` bytes precede its round."""
    common = {"run_id": NO_ID, "host": name}
    events: list[dict[str, object]] = [
        {"name": "regrow.job.started", "time": wall},
        {"name": "regrow.worker.accounts", "time": wall + 1, "filler": "x" * filler},
        {"name": "regrow.rendezvous.completed", "time": wall + 2, "first_ranks": nodes},
        {"name": "regrow.job.finished", "time": wall + 100, "state": "SUCCEEDED"},
    ]
    (runs / name).mkdir()
    lines = "".join(json.dumps(common | event) + "\n" for event in events)
    (runs / name / "events.jsonl").write_text(lines)


def names_of(library: Library) -> list[list[str]]:
    """Return the names of the directories of each job."""
    return [[os.path.basename(run.directory) for run in job.runs] for job in library.jobs()]


def test_the_nodes_of_a_round_are_one_job_however_far_their_clocks_differ(tmp_path: Path) -> None:
    log_of(tmp_path, "a", ["x", "y"], wall=4600)
    log_of(tmp_path, "b", ["x", "y"], wall=1000, filler=1 << 18)  # the end of the log has them
    assert names_of(Library([str(tmp_path)])) == [["b", "a"]]


def test_jobs_with_the_default_id_that_share_no_node_are_different_jobs(tmp_path: Path) -> None:
    log_of(tmp_path, "a", ["x", "y"])
    log_of(tmp_path, "b", ["p", "q"], wall=1050)
    assert names_of(Library([str(tmp_path)])) == [["b"], ["a"]]


def test_the_key_of_a_job_that_becomes_part_of_an_earlier_one_leads_to_it(tmp_path: Path) -> None:
    log_of(tmp_path, "a", ["x", "y"], wall=4600)
    library = Library([str(tmp_path)])
    (alone,) = library.jobs()
    log_of(tmp_path, "b", ["x", "y"])
    found = library.job(alone.key)
    assert found is not None
    assert len(found.runs) == 2
    assert library.job("of no job") is None


def test_the_log_itself_its_directory_and_the_one_above_lead_to_the_job(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    log = written.directory / "events.jsonl"
    keys = {Library([str(p)]).jobs()[0].key for p in (log, written.directory, tmp_path)}
    assert len(keys) == 1
    assert len(Library([str(tmp_path), str(written.directory)]).jobs()) == 1
    assert Library([str(tmp_path / "missing")]).jobs() == []


def test_a_reader_reads_a_growing_log_and_leaves_out_broken_lines(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(b'{"name": "a"}\nno json\n[1]\n{"name"')
    reader = EventReader(str(tmp_path))
    assert reader.read()
    assert [event["name"] for event in reader.events] == ["a"]
    assert not reader.read()
    with log.open("ab") as file:
        file.write(b': "b"}\n' + b"x" * (2 << 20) + b'\n{"name": "c"}\n')
    assert reader.read()
    assert [event["name"] for event in reader.events] == ["a", "b", "c"]


def test_a_reader_notices_a_log_that_was_replaced(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text('{"name": "a"}\n{"name": "b"}\n')
    reader = EventReader(str(tmp_path))
    reader.read()
    log.write_text('{"name": "c"}\n')
    assert reader.read()
    assert [event["name"] for event in reader.events] == ["c"]


def test_a_reader_finds_the_end_that_did_not_fit_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"name": "a"}\n')
    (tmp_path / ".events.jsonl.end").write_bytes(b"\0" * 100)
    reader = EventReader(str(tmp_path))
    reader.read()
    (tmp_path / ".events.jsonl.end").write_bytes(b'{"name": "regrow.job.finished"}\n')
    assert reader.read()
    assert [event["name"] for event in reader.events] == ["a", "regrow.job.finished"]


def test_a_loop_of_events_does_not_fill_the_memory(tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("w") as file:
        file.write('{"name": "first"}\n')
        file.writelines(json.dumps({"name": "x", "n": n}) + "\n" for n in range(50_000))
    reader = EventReader(str(tmp_path))
    reader.read()
    assert len(reader.events) < 2 * MOST_OF_A_NAME + 1
    assert (reader.events[0]["name"], reader.events[-1]["n"]) == ("first", 49_999)


# --- the page of steps


def test_only_the_page_with_the_inode_is_mapped(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.step(1, 9)
    address = json.loads((written.directory / "events.jsonl").read_text().splitlines()[-1])["page"]
    page = StepPage(address)
    assert page.read()[1].last == 9
    for wrong in (
        {"inode": address["inode"] + 1},
        {"slot_bytes": 8},
        {"slot_format": "@q"},
        {"fd": 0},
        {"pid": None},
        {"fd": "../../../../etc/passwd"},
    ):
        with pytest.raises(OSError, match=r".*"):
            StepPage(address | wrong)
    written.close()
    assert page.read()[1].last == 9  # the mapping outlives the agent's descriptor
    page.close()


def test_a_pipe_in_the_place_of_the_page_does_not_block(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    begun = time.monotonic()
    with pytest.raises(OSError, match="page of steps"):
        StepPage({"pid": os.getpid(), "fd": reading, "inode": 1, "slot_bytes": 40})
    assert time.monotonic() - begun < 10
    os.close(reading)
    os.close(writing)


# --- output of workers


def test_the_output_of_workers_is_listed_and_followed(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.log(0, "one\n")
    written.log(1, "problem\n", "stderr")
    directory = str(written.directory)
    assert log_files([directory]) == [
        (LogName(0, 0, 0, "stdout"), 4),
        (LogName(0, 0, 1, "stderr"), 8),
    ]
    reader = LogReader(directory, LogName(0, 0, 0, "stdout"))
    assert (reader.read(), reader.read()) == (b"one\n", b"")
    written.log(0, "two\n")
    assert reader.read() == b"two\n"
    written.close()


def test_a_long_log_is_read_from_a_whole_line_near_its_end(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.log(0, "".join(f"line {n}\n" for n in range(100_000)))
    data = LogReader(str(written.directory), LogName(0, 0, 0, "stdout")).read()
    assert len(data) < 1 << 16
    assert data.startswith(b"line ")
    assert data.endswith(b"line 99999\n")
    written.close()


def test_no_link_is_followed_out_of_the_logs(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.log(0, "x")
    log = written.directory / "attempt_0" / "0" / "stdout.log"
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert log_files([str(written.directory)]) == []
    with pytest.raises(OSError, match=r".*"):
        LogReader(str(written.directory), LogName(0, 0, 0, "stdout")).read()
    with pytest.raises(FileNotFoundError):
        LogReader(str(written.directory), LogName(0, 0, 0, "../../../etc/passwd"))
    written.close()
