"""`regrow explain` lists the failures of a job, or explains one, or says why it cannot."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from helpers.explained.record import STORIES
from regrow.cli import main


def put(story: str, run: Path) -> Path:
    """Write the log of a recorded job as that of a run."""
    run.mkdir(parents=True)
    shutil.copy(STORIES / story / "host0.jsonl", run / "events.jsonl")
    return run / "events.jsonl"


def test_the_only_failure_is_explained_without_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("exception", tmp_path / "a")
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("Failure 1 of 1 of job demo (train.py): rank 1 on host node0")
    assert main(["explain", str(tmp_path), "1"]) == 0
    assert capsys.readouterr().out == printed.out


def test_several_failures_are_listed_and_a_number_chooses_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("crash-loop", tmp_path / "a")
    assert main(["explain", str(tmp_path)]) == 0
    numbers = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert numbers == ["1", "2", "3"]
    assert main(["explain", str(tmp_path / "a"), "2"]) == 0
    assert capsys.readouterr().out.startswith("Failure 2 of 3")


def test_the_json_is_one_object_or_the_list_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("crash-loop", tmp_path / "a")
    assert main(["explain", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in found] == [1, 2, 3]
    assert main(["explain", "--json", str(tmp_path), "3"]) == 0
    assert json.loads(capsys.readouterr().out) == found[2]


def test_the_picture_is_written_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("slow-stop", tmp_path / "a")
    picture = tmp_path / "timeline.svg"
    assert main(["explain", str(tmp_path), "--svg", str(picture)]) == 0
    assert "What made it long" in capsys.readouterr().out
    assert ET.parse(picture).getroot().tag.endswith("}svg")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["missing"], "missing: no such file or directory"),
        (["."], "no events.jsonl in it"),
        (["a", "4"], "there is no failure 4: job demo has 3, numbered from 1"),
        (["a", "0"], "there is no failure 0: job demo has 3, numbered from 1"),
        (["a", "--job", "z"], "no such job in a; the jobs there: demo"),
        (["empty"], "no such job in empty; the jobs there: none"),
        (["a", "--svg", "x.svg"], "--svg draws one failure: give its number"),
        (["a", "1", "--svg", "no/such/folder.svg"], "no/such/folder.svg: No such file"),
    ],
)
def test_it_says_why_nothing_is_explained(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if words != ["."]:
        put("crash-loop", tmp_path / "a" / "run")
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "events.jsonl").write_text("garbage\n\x00\n")
    assert main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err
    assert "Traceback" not in printed.err


def test_a_number_alone_is_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "1"]) == 2
    assert "LOGDIR is missing" in capsys.readouterr().err


def test_a_killed_job_with_a_torn_log_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = put("budget-spent", tmp_path / "a")
    lines = log.read_text().splitlines(keepends=True)
    until = next(n for n, line in enumerate(lines) if "attempt.ended" in line)
    log.write_text("".join(lines[: until + 1]) + lines[until + 1][:40])
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "incomplete" in printed.err
    assert "unknown: the log ends here" in printed.out


@pytest.mark.parametrize(("id", "named"), [("demo", "job demo"), ("none", "the job")])
def test_a_job_without_failures_is_no_error(
    id: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = put("exception", tmp_path / "a")
    lines = log.read_text().splitlines(keepends=True)
    until = next(n for n, line in enumerate(lines) if "worker.failed" in line)
    log.write_text("".join(lines[:until]).replace('"run_id": "demo"', f'"run_id": "{id}"'))
    assert main(["explain", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{named}: nothing has failed in its logs")
    assert main(["explain", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["explain", str(tmp_path), "1"]) == 2
    assert "nothing has failed" in capsys.readouterr().err


def test_the_failures_of_a_requeued_job_are_numbered_over_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("budget-spent", tmp_path / "a")
    log = put("exception", tmp_path / "b")
    later = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [
        json.dumps(event | {"time": event["time"] + 600, "monotonic": event["monotonic"]})
        for event in later
    ]
    log.write_text("".join(f"{line}\n" for line in lines))
    assert main(["explain", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["number"], each["run"], each["rung"]) for each in found] == [
        (1, 1, 3),
        (2, 1, 5),
        (3, 2, 3),
    ]
    assert "it was started again" in found[1]["outcome"]
