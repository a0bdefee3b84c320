"""The training that replaces its killed processes, and its demo, run as a user runs them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import ROOT, run

EXAMPLES = ROOT / "examples"

OUTPUT = """\
rank [2] is replaced; continue after step 104
rank [0] is replaced; continue after step 203
final test loss 2.412
regrow: job 1 (gpt.py, 4 workers on 1 node) SUCCEEDED after 21.4 s
    replaced         rank 2: pid 7 ended by SIGKILL after step 105; pid 9 started from the template
    replaced         rank 0: pid 5 ended by SIGKILL after step 203; pid 11 started by a cold start
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo_replace")


@pytest.mark.training
@pytest.mark.timeout(200)
def test_the_demo_s_training_replaces_two_killed_processes(tmp_path: Path) -> None:
    ended = run([sys.executable, EXAMPLES / "demo_replace.py", "--dir", tmp_path])
    assert ended.code == 0, ended.output
    (log,) = tmp_path.glob("logs/*/events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["rank"] for e in events if e["name"] == "regrow.worker.replaced"] == [2, 0]
    assert sum(e["name"] == "regrow.attempt.started" for e in events) == 1


def test_the_demo_accepts_a_job_that_recovered(demo: Any) -> None:
    assert demo.check(0, OUTPUT) == 2.412


@pytest.mark.parametrize(
    ("code", "output", "complaint"),
    [
        (1, OUTPUT, "exit code 1"),
        (0, OUTPUT.replace("2.412", "3.9"), "not under"),
        (0, OUTPUT.replace("final", "first"), "not printed"),
        (0, OUTPUT.replace("rank 2: pid", "rank 1: pid"), "as replaced"),
        (0, OUTPUT.replace("step 104", "step 90"), "resumed after step 90"),
        (0, OUTPUT + "  failure 1 (attempt 1): rank 0", "started again"),
        (0, OUTPUT.replace("rank [0]", "nobody"), "resumed 1 times"),
    ],
)
def test_the_demo_fails_when_the_job_broke_a_promise(
    demo: Any, code: int, output: str, complaint: str
) -> None:
    with pytest.raises(SystemExit, match=complaint):
        demo.check(code, output)
