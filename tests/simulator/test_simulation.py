"""Tests of the rendezvous under simulated faults: a few seeds here, many with `make simulate`.

The promises are in `history.py` and `worlds.py`, and the faults in `faults.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from simulator.bugs import BUGS, planted
from simulator.run import simulate, simulate_many

SIMULATE = "simulator"
pytestmark = pytest.mark.timeout(240)  # a slow machine needs a minute for the longest ones


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", SIMULATE, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("driver", "seeds"), [("server", 8), ("nodes", 4), ("hosts", 12), ("witness", 24)]
)
def test_no_promise_is_broken_under_any_faults(driver: str, seeds: int) -> None:
    outcomes = [simulate(seed, driver) for seed in range(seeds)]
    assert [outcome.violation for outcome in outcomes] == [""] * seeds
    seen = ["rounds", "losses", "charged", "forgiven"]
    # With "nodes", the end of a connection is not taken for the end of a node. With two hosts, few
    # connections break.
    if driver in ("server", "hosts"):
        seen.append("mistaken")
    if driver in ("hosts", "witness"):
        seen.append("takeovers")
    for what in seen:
        assert sum(getattr(outcome, what) for outcome in outcomes) >= seeds / 4, f"too few {what}"


@pytest.mark.thorough
def test_hundreds_of_nodes_meet_at_one_server_and_meet_again_when_some_are_lost() -> None:
    outcome = simulate_many(250)
    assert outcome.violation == ""
    assert outcome.losses == 50


@pytest.mark.training
@pytest.mark.parametrize(("driver", "nodes"), [("server", 60), ("nodes", 30), ("hosts", 40)])
def test_no_promise_is_broken_in_a_job_of_many_nodes(driver: str, nodes: int) -> None:
    outcome = simulate(0, driver, nodes=nodes)
    assert outcome.violation == ""
    assert outcome.losses > nodes / 4, "too few"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    driver = BUGS[name].driver
    with planted(name):
        assert any(simulate(seed, driver).violation for seed in BUGS[name].seeds)


@pytest.mark.thorough
def test_a_seed_is_one_history_in_every_process() -> None:
    again = [
        command("--seed", "7", "--trace", PYTHONHASHSEED=hashes).stdout for hashes in ("1", "2")
    ]
    assert again[0] == again[1]
    assert "server: Outcome(seed=7" in again[0]
    assert "nodes: Outcome(seed=7" in again[0]
    assert "hosts: Outcome(seed=7" in again[0]
    assert "witness: Outcome(seed=7" in again[0]


@pytest.mark.thorough
def test_a_search_prints_how_much_it_has_run() -> None:
    done = command(
        *("--driver=server", "--seeds=1", "--events=1", "--jobs=1", "--nodes=0"),
        *("--crowds=1", "--crowd=9"),
    )
    assert "10 seeds with each driver (server): " in done.stdout
    assert "9 nodes (server), seed 0: " in done.stdout
    assert done.stdout.endswith("0 broken promises\n")
    assert done.returncode == 0


@pytest.mark.parametrize("more", [[], ["--crowd", "12"]])
def test_a_broken_promise_is_shown_again_by_one_command(more: list[str]) -> None:
    done = command("--driver", "server", *more, "--seed", "0", "--plant", "ranks kept")
    assert "its ranks are not those of" in done.stdout
    assert done.returncode == 1
