"""`regrow goodput` prints a ledger, or the reason why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regrow.cli import main

LENGTH_S = 10.0


def write_run(folder: Path, run_id: str, begin: float) -> Path:
    """Write the log of a run without steps."""
    folder.mkdir(parents=True)
    common = {"run_id": run_id, "host": "node0", "attempt": 0}
    events: list[dict[str, Any]] = [
        {"name": "regrow.job.started", "monotonic": 5.0, "nproc_per_node": 2},
        {"name": "regrow.attempt.started", "monotonic": 6.0, "ranks": [0, 1]},
        {"name": "regrow.attempt.ended", "monotonic": 14.0, "state": "SUCCEEDED"},
        {"name": "regrow.job.finished", "monotonic": 5.0 + LENGTH_S, "state": "SUCCEEDED"},
    ]
    path = folder / "events.jsonl"
    lines = [event | common | {"time": begin + event["monotonic"]} for event in events]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_prints_both_ratios_and_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", "first", 100)
    assert main(["goodput", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "= productive 0 s / all 20.0 s" in printed.out
    assert "= productive and phases 0 s / all 20.0 s" in printed.out
    assert "regrow.step" in printed.out


@pytest.mark.parametrize(("run_id", "line"), [("first", "job first: 2 w"), ("none", "job: 2 w")])
def test_the_id_of_a_job_is_printed_if_it_has_one(
    run_id: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", run_id, 100)
    assert main(["goodput", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(line)


def test_the_job_that_began_last_is_shown_unless_another_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_run(tmp_path / name, name, at) for name, at in (("b", 200.0), ("a", 100.0))]
    assert main(["goodput", "--json", *map(str, paths), str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["run_id"] == "b"
    assert "2 jobs; this is the one that began last; the others: a" in printed.err
    assert main(["goodput", "--json", "--job", "a", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run_id"], found["worker_seconds"]) == ("a", 2 * LENGTH_S)
    assert sum(found["buckets"].values()) == found["worker_seconds"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["missing"], "missing: no such file or directory"),
        (["."], "no events.jsonl in it"),
        (["a", "--job", "z"], "no such job in a; the jobs there: a"),
        (["empty"], "no such job in empty; the jobs there: none"),
    ],
)
def test_it_says_why_there_is_no_ledger(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if words != ["."]:
        write_run(tmp_path / "a", "a", 100)
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "events.jsonl").write_text("garbage\n\x00\n")
    assert main(["goodput", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err
    assert "Traceback" not in printed.err
