"""The example training and the demo, run as a user runs them."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import ROOT, run

EXAMPLES = ROOT / "examples"

STORY = """\
resuming after epoch 3
final test accuracy 0.9805
regrow: job 1 (train_digits.py, 2 workers on 1 node) SUCCEEDED after 21.4 s with 1 restart
  failure 1 (attempt 0): rank 1 on host vm (pid 20903) was killed by SIGKILL
    detected after   0.5 ms
    restarted after  95.1 ms    (all 2 workers started again; 2 restarts left)
    first step after 6.50 s     (rank 0 had made step 136)
    work lost        15 steps   (step 150 reached, resumed from step 135)
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo")


@pytest.mark.training
@pytest.mark.timeout(200)
def test_the_demo_s_training_survives_sigkill_of_a_worker(tmp_path: Path) -> None:
    ended = run([sys.executable, EXAMPLES / "demo.py", "--dir", tmp_path])
    assert ended.code == 0, ended.output
    (log,) = tmp_path.glob("logs/*/events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    first = next(e for e in events if e["name"] == "regrow.worker.failed" and e["root_cause"])
    assert (first["rank"], first["exit_code"]) == (1, -signal.SIGKILL)


@pytest.mark.training
@pytest.mark.timeout(200)
def test_the_training_runs_under_torchrun_where_regrow_cannot_be_imported(tmp_path: Path) -> None:
    missing = tmp_path / "path" / "regrow"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ImportError('there is no regrow here')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(EXAMPLES / "train_digits.py"), "--epochs=1", f"--checkpoint-dir={tmp_path}"]
    ended = run(command, env={"PYTHONPATH": str(missing.parent)})
    assert ended.code == 0, ended.output
    assert "final test accuracy" in ended.output
    assert (tmp_path / "epoch-0001.pt").exists()


@pytest.mark.thorough
@pytest.mark.timeout(200)  # it loads torch and scikit-learn
def test_a_checkpoint_that_was_not_finished_is_not_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    training = importlib.import_module("train_digits")
    assert training.load_newest_checkpoint(tmp_path) is None
    for epochs_done in (9, 10):
        training.save_checkpoint(tmp_path, epochs_done, {"epochs_done": epochs_done})
    (tmp_path / "epoch-0011.unfinished").write_bytes(b"half of a checkp")
    assert training.load_newest_checkpoint(tmp_path) == {"epochs_done": 10}


def test_the_demo_accepts_a_job_that_recovered(demo: Any) -> None:
    assert demo.check(0, STORY) == 0.9805


@pytest.mark.parametrize(
    ("code", "output", "complaint"),
    [
        (1, STORY, "exit code 1"),
        (0, STORY.replace("resuming", "beginning"), "no attempt resumed"),
        (0, STORY.replace("0.9805", "0.9499"), "not over 0.95"),
        (0, STORY.replace("final test", "worst test"), "not printed"),
        (0, STORY.replace("work lost", ""), "work lost"),
        (0, STORY.replace("rank 1 ", "rank 0 "), "rank 1"),
        (0, STORY.replace("regrow: job", ""), "story"),
    ],
)
def test_the_demo_fails_when_the_job_broke_a_promise(
    demo: Any, code: int, output: str, complaint: str
) -> None:
    with pytest.raises(SystemExit, match=complaint):
        demo.check(code, output)


def test_the_demo_reads_a_log_whose_last_line_is_half_written(demo: Any, tmp_path: Path) -> None:
    log = tmp_path / "job_1" / "events.jsonl"
    log.parent.mkdir()
    line = json.dumps({"name": "regrow.attempt.started", "pids": {"0": 7, "1": 8}})
    log.write_text(line)
    assert demo.first_pids(tmp_path) == {}
    log.write_text(line + "\n" + '{"name": "regr')
    assert demo.first_pids(tmp_path) == {0: 7, 1: 8}
