"""Restarts under simulated faults: a few seeds each time, many by `simulate_restarts.py`.

What is promised is written in `sim_restarts`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sim_restart_bugs import BUGS, planted
from sim_restarts import simulate

SIMULATE = Path(__file__).parent / "simulate_restarts.py"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SIMULATE), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_no_promise_is_broken_whatever_befalls_the_ranks() -> None:
    outcomes = [simulate(seed) for seed in range(100)]
    assert [outcome.violation for outcome in outcomes] == [""] * 100
    assert max(outcome.size for outcome in outcomes) == 64
    for what in ("iterations", "faults", "lost", "repeated", "completed"):
        assert sum(getattr(outcome, what) for outcome in outcomes) > 100, f"too few {what}"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_mistake_is_found(name: str) -> None:
    with planted(name):
        assert any(simulate(seed).violation for seed in BUGS[name].seeds)


def test_a_seed_is_one_history() -> None:
    histories: list[list[str]] = [[], []]
    for history in histories:
        simulate(7, history.append)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 10


def test_a_search_ends_with_what_it_found() -> None:
    done = command("--seeds", "2", "--jobs", "1")
    assert done.stdout.endswith("0 broken promises\n"), done.stderr
    assert done.returncode == 0


def test_a_broken_promise_is_shown_again_by_one_command() -> None:
    done = command("--seed", "0", "--plant", "first begins", "--trace")
    assert "runs without" in done.stdout, done.stderr
    assert done.returncode == 1
