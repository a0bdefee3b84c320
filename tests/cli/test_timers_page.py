"""What docs/timers.md says is what happens: its scripts run, its names are those of the program."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
from commands import ROOT, run

from regrow.cli._parser import build_parser
from regrow.launch import LaunchConfig

PAGE = (ROOT / "docs" / "timers.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
ALONE = [script for script in SCRIPTS if "server.stop()" in script]


def test_all_code_of_the_page_is_python() -> None:
    assert len(ALONE) == 2
    for script in SCRIPTS:
        compile(script, "timers.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("script", ALONE, ids=["queue", "pipe"])
def test_what_is_used_alone_reaps_its_process(script: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(script)
    ended = run([sys.executable, "mine.py"], cwd=tmp_path)
    assert ended.code == 0, ended.output
    assert "exit code -9\n" in ended.output


def test_the_options_are_those_of_the_program() -> None:
    table = (line.split("|") for line in PAGE.splitlines() if line.startswith("|"))
    rows = [(cells[1], cells[2]) for cells in table if len(cells) == 6]
    flags = [flag for row in rows for flag in re.findall(r"`--([a-z-]+)`", row[0])]
    fields = [field for row in rows for field in re.findall(r"`([a-z_]+)=True`", row[1])]
    assert flags == ["timers", "native-stacks"]
    args = build_parser().parse_args([*(f"--{flag}" for flag in flags), "train.py"])
    assert all(getattr(args, flag.replace("-", "_")) for flag in flags)
    assert set(fields) <= {field.name for field in dataclasses.fields(LaunchConfig)}
    assert [field.replace("_", "-") for field in fields] == flags
