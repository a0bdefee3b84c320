"""Tee'd lines go where the program's sys.stdout and sys.stderr go."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from helpers.processes import PATIENCE
from regrow.workers import RunProcsResult, Std, start_processes
from regrow.workers.logs.follower import console


class Broken(io.StringIO):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def tee(log_dir: Path) -> RunProcsResult:
    context = start_processes(
        "trainer",
        "sh",
        {0: ("-c", "echo to stdout; echo to stderr >&2; printf 'caf\\303\\251'")},
        {0: {}},
        str(log_dir),
        tee=Std.ALL,
        signals_to_handle="",
    )
    result = context.wait(PATIENCE)
    console().flush()
    assert result is not None
    return result


def test_a_replaced_stream_gets_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    tee(tmp_path)
    assert out.getvalue() == "[trainer0]:to stdout\n[trainer0]:café\n"
    assert err.getvalue() == "[trainer0]:to stderr\n"


@pytest.mark.parametrize("error", [RuntimeError("not today"), SystemExit("never")])
def test_a_stream_of_the_programs_that_raises_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Broken(error))
    monkeypatch.setattr(sys, "stderr", err)
    result = tee(tmp_path)
    assert err.getvalue() == "[trainer0]:to stderr\n"
    assert Path(result.stdouts[0]).read_text() == "to stdout\ncafé"
