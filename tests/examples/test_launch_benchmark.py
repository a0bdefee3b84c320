"""The benchmark of the launcher measures correctly; its own `--check` tests the bounds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from helpers.commands import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("launch")


@pytest.mark.thorough
def test_a_crash_run_gives_both_times_and_leaves_no_process(bench: Any) -> None:
    before = bench.descendants(os.getpid())  # other tests' helper processes, too
    began_s = time.monotonic()
    first_line_s, restart_s, _ = bench.crash_run("regrow.run", "crash", 2)
    passed_s = time.monotonic() - began_s
    assert 0 < first_line_s < passed_s
    assert 0 < restart_s < passed_s
    assert bench.descendants(os.getpid()) <= before


def test_a_launcher_that_does_not_restart_is_no_result(bench: Any) -> None:
    with pytest.raises(SystemExit, match=r"(?s)exit code 1.*No module named no_launcher"):
        bench.crash_run("no_launcher", "crash", 2)


def test_usage_is_that_of_the_process_itself(bench: Any) -> None:
    code = "import time; block = bytearray(64_000_000); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            used = bench.usage(child.pid)
            assert child.pid in bench.descendants(os.getpid())
        finally:
            child.kill()
    assert 64 < used.resident_mb < 128
    assert 64 < used.proportional_mb <= used.resident_mb
    assert 0 < used.cpu_s < 60
    assert used.command.startswith(sys.executable)
