"""Tests of restarts under simulated faults: a few seeds here, many with `simulator.restarts`.

The promises are in `run.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from simulator.restarts.bugs import BUGS
from simulator.restarts.run import simulate

SIMULATE = "simulator.restarts"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", SIMULATE, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_no_promise_is_broken_under_any_fault_of_a_rank() -> None:
    outcomes = [simulate(seed) for seed in range(100)]
    assert [outcome.violation for outcome in outcomes] == [""] * 100
    assert max(outcome.size for outcome in outcomes) == 64
    for what in ("iterations", "faults", "lost", "replaced", "repeated", "completed"):
        assert sum(getattr(outcome, what) for outcome in outcomes) > 100, f"too few {what}"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    assert any(simulate(seed, bug=bug).violation for seed in bug.seeds)


def test_a_seed_always_gives_the_same_history() -> None:
    histories: list[list[str]] = [[], []]
    for history in histories:
        simulate(7, history.append)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 10


def test_a_search_reports_its_result() -> None:
    done = command("--seeds", "2", "--jobs", "1")
    assert done.stdout.endswith("0 broken promises\n"), done.stderr
    assert done.returncode == 0


def test_one_command_repeats_a_broken_promise() -> None:
    done = command("--seed", "0", "--plant", "first begins", "--trace")
    assert "runs without" in done.stdout, done.stderr
    assert done.returncode == 1
