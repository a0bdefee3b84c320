"""The commands of docs/guides/watching.md that show a job on this host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import TRAIN, commands, typed

PAGE = "docs/guides/watching.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the logs of the page's job."""
    (tmp_path / "train.py").write_text(TRAIN)
    (job,) = (c for c in commands(PAGE) if c.startswith("regrow run") and "--tee" in c)
    assert typed(job, tmp_path).code == 0
    return tmp_path


def test_the_command_for_the_terminal_shows_the_job(folder: Path) -> None:
    command = next(c for c in commands(PAGE) if c.startswith("regrow top"))
    ended = typed(command, folder)
    assert ended.code == 0, ended.output
    assert "train.py" in ended.output
    assert "succeeded" in ended.output


def test_the_command_for_the_browser_prints_an_address(folder: Path) -> None:
    command = next(c for c in commands(PAGE) if c.startswith("regrow web"))
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("regrow web: open http://127.0.0.1:")
        process.kill()
