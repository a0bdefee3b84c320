"""The benchmark draws the same faults for all systems, and a short form of it runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("goodput")


def test_each_kind_of_fault_comes_equally_often_and_the_seed_decides(bench: Any) -> None:
    faults = bench.schedule(600, 20, 7)
    assert [each.at_s for each in faults] == [20.0 * n for n in range(1, 30)]
    for start in range(0, 28, 4):
        assert {each.kind for each in faults[start : start + 4]} == set(bench.KINDS)
    assert {each.rank for each in faults} == {0, 1, 2, 3}
    assert bench.schedule(600, 20, 7) == faults != bench.schedule(600, 20, 8)


def test_the_table_compares_with_the_run_without_faults(bench: Any) -> None:
    faults = [
        {"kind": "kill", "rank": 1, "at_s": 20.0, "step": 390, "recovery_s": 0.25},
        {"kind": "hang", "rank": 2, "at_s": 40.0, "step": 500, "recovery_s": None},
    ]
    found = {
        "without faults": {"seconds": 60, "steps": 1200, "faults": [], "missed": 0},
        "torchrun": {"seconds": 120, "steps": 600, "faults": faults, "missed": 3},
    }
    (row,) = [line for line in bench.table(found).splitlines() if "torchrun" in line]
    assert row == "| torchrun | 600 of 2,400 | 25.0% | 1 of 5 | 0.2 s | - | - | - |"


@pytest.mark.training
@pytest.mark.timeout(200)
def test_a_short_run_survives_its_faults(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    short = ["--minutes=0.4", "--every=8", "--only=regrow", f"--json={figures}"]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "goodput.py"), *short], check=True, timeout=190
    )
    found = json.loads(figures.read_text())["regrow"]
    assert found["steps"] > 1
    assert found["missed"] + len(found["faults"]) == 2
