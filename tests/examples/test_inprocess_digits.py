"""The example of a training with in-process restart, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.commands import ROOT, run
from regrow.utils import PortReservation

EXAMPLE = str(ROOT / "examples" / "inprocess_digits.py")
SIZE = 3
WITHOUT_FAULTS = ["--kill-at=0", "--fail-at=0"]


def accuracy(output: str) -> float:
    (final,) = re.findall(r"^final test accuracy (\d\.\d+)$", output, re.MULTILINE)
    return float(final)


def by_agent(log_dir: Path, *args: str) -> str:
    command = [sys.executable, "-m", "regrow.run", "--standalone", f"--nproc-per-node={SIZE}"]
    ended = run([*command, f"--log-dir={log_dir}", EXAMPLE, *args])
    assert ended.code == 0, ended.output
    return ended.output


@pytest.mark.training
@pytest.mark.timeout(200)
def test_a_training_that_loses_a_rank_and_a_step_ends_as_accurate_as_one_that_does_not(
    tmp_path: Path,
) -> None:
    undisturbed = by_agent(tmp_path / "undisturbed", *WITHOUT_FAULTS)
    disturbed = by_agent(tmp_path / "disturbed")
    assert re.findall(r"\d ranks continue after step \d+", disturbed) == [
        "3 ranks continue after step 0",
        "2 ranks continue after step 99",
        "2 ranks continue after step 199",
    ]
    # Sums in another order are rounded differently, which is worth an image or two of 359.
    assert accuracy(disturbed) == pytest.approx(accuracy(undisturbed), abs=0.01)
    assert accuracy(disturbed) > 0.95

    (log,) = tmp_path.glob("disturbed/*/events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    restarts = [e for e in events if e["name"] == "regrow.inprocess.restarted"]
    assert [(e["rank"], e["lost"]) for e in restarts] == [(0, [0]), (1, [])]
    assert sum(e["name"] == "regrow.attempt.started" for e in events) == 1


@pytest.mark.training
@pytest.mark.timeout(200)
def test_the_training_needs_no_launcher_that_knows_of_restarts(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("REGROW_", "TORCHELASTIC"))}
    with PortReservation("127.0.0.1") as held, ExitStack() as files:
        environ |= {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1"}
        environ |= {"MASTER_PORT": str(held.port), "REGROW_STORE_PORT": str(held.port)}
        logs = [files.enter_context(open(tmp_path / f"{rank}.log", "w")) for rank in range(SIZE)]
        ranks = [
            subprocess.Popen(
                [sys.executable, EXAMPLE],
                env=environ | {"RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [rank.wait(150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            outputs = [Path(log.name).read_text() for log in logs]
            print(*outputs, sep="\n")
    assert codes == [-signal.SIGKILL, 0, 0]
    assert accuracy("".join(outputs)) > 0.95
