"""Trainings of Lightning, Transformers and Accelerate under `regrow run`, killed and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import ROOT
from helpers.pages import commands
from helpers.processes import wait_until
from regrow.cli.exit_codes import STOPPED_EARLY
from regrow.ledger import is_phase, read_ledgers, title

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

DEADLINE_S = 120.0
FRAMEWORKS = {
    # name of the example: flags for a training of some seconds more; its first checkpoint
    "lightning": (["--epochs=12"], "last.ckpt"),
    "transformers": (["--epochs=12"], "checkpoint-20/trainer_state.json"),
    "accelerate": (["--steps=400"], "step-000020"),
}

PHASES = {
    "lightning": {"data", "eval", "checkpoint"},
    "transformers": {"data", "eval", "checkpoint"},
    "accelerate": {"data", "checkpoint"},
}


class Training:
    """An example's training in two processes."""

    def __init__(self, name: str, folder: Path, run: int = 1) -> None:
        self.name = name
        flags, self._first = FRAMEWORKS[name]
        self._folder = folder / "dir"
        self._logs, self._output = folder / f"logs{run}", folder / f"output{run}"
        flags = [*flags, f"--dir={self._folder}"]
        page = commands("docs/guides/frameworks.md")
        (words,) = (line.split() for line in page if line.endswith(f" {name}_digits.py"))
        command = [sys.executable, "-m", *words[:-1], f"--log-dir={self._logs}"]
        script = str(ROOT / "examples" / "frameworks" / words[-1])
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, script, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for_checkpoint(self) -> None:
        first = self._folder / self._first
        wait_until(
            lambda: first.exists() or self.process.poll() is not None,
            lambda: f"a checkpoint; {self.output}",
            DEADLINE_S,
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        (log,) = self._logs.glob("*/events.jsonl")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        return [event for event in events if event["name"] == f"regrow.{name}"]

    def phases(self) -> set[str]:
        """Return the phases in the ledger."""
        (ledger,) = read_ledgers([str(self._logs)], print)
        names = {title(bucket) for bucket in ledger.seconds if is_phase(bucket)}
        return {name.removeprefix("phase ") for name in names}

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=FRAMEWORKS)
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    training = Training(request.param, tmp_path)
    yield training
    training.close()


def test_a_killed_training_continues_and_its_steps_are_known(training: Training) -> None:
    training.wait_for_checkpoint()
    (started,) = training.events("attempt.started")
    os.kill(started["pids"]["1"], signal.SIGKILL)
    assert training.end() == 0, training.output
    lost, finished = training.events("attempt.ended")
    again = {event["rank"]: event["step"] for event in training.events("worker.first_step")[2:]}
    assert set(again) == {0, 1}, training.output
    # The second attempt continues after a checkpoint of the first one.
    assert 20 < again[0] <= lost["last_steps"]["0"]["last_step"] + 1
    assert finished["last_steps"]["0"]["last_step"] >= 348
    assert "trained after step" in training.output
    assert re.search(r"work lost +\d+ steps?", training.output), training.output
    assert training.phases() == PHASES[training.name]


def test_a_training_that_is_asked_to_stop_saves_its_step_and_continues(
    training: Training, tmp_path: Path
) -> None:
    training.wait_for_checkpoint()
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == STOPPED_EARLY, training.output
    (stop,) = re.findall(r"stopped early after step (\d+)", training.output)
    (attempt,) = training.events("attempt.ended")
    last = {steps["last_step"] for steps in attempt["last_steps"].values()}
    assert last == {int(stop)}, training.output
    again = Training(training.name, tmp_path, run=2)
    try:
        assert again.end() == 0, again.output
        assert {e["step"] for e in again.events("worker.first_step")} == {int(stop) + 1}
        assert "trained after step" in again.output
    finally:
        again.close()
