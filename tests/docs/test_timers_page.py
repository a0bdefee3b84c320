"""The options on docs/guides/timers.md are those of the program."""

from __future__ import annotations

import dataclasses
import re

from helpers.pages import PAGES
from regrow.cli.args.parser import build_parser
from regrow.launch import LaunchConfig

PAGE = PAGES["docs/guides/timers.md"]


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
