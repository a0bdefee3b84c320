"""docs/guides/heartbeats.md agrees with the program: arguments, kinds, figures."""

from __future__ import annotations

import inspect
import re
from typing import get_args

from helpers.pages import PAGES
from regrow import heartbeat
from regrow.agent.agent import bounds
from regrow.cli.args.parser import build_parser
from regrow.heartbeat import terms
from regrow.heartbeat.failure import Kind

PAGE = PAGES["docs/guides/heartbeats.md"]
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]


def test_the_names_of_the_page_are_there() -> None:
    named = set(re.findall(r"heartbeat\.([a-zA-Z]+)\(", PAGE))
    assert named == {"start", "step", "progress", "TorchExchange"}
    assert named <= set(heartbeat.__all__)


def test_the_arguments_of_start_are_those_of_the_page() -> None:
    listed = {name for row in ROWS for name in re.findall(r"`([a-z_]+)`", row[0]) if len(row) == 3}
    parameters = inspect.signature(heartbeat.start).parameters
    assert set(parameters) - {"rank", "world_size"} <= listed
    assert all(f"`{name}`" in PAGE for name in parameters)


def test_every_kind_of_failure_is_on_the_page() -> None:
    listed = {row[0].strip(" `") for row in ROWS if len(row) == 3}
    assert set(get_args(Kind)) <= listed


def test_the_figures_are_those_of_the_program() -> None:
    assert (terms.bound(10), terms.bound(1)) == (36, 9)
    assert "with `--heartbeat 10` that is 36 s, with 1 it is 9 s" in PAGE
    assert bounds(30, 5, ended_s=38)["a missing heartbeat ends all workers"] == 38
    assert (terms.lead(36, 2), terms.lead(6, 2)) == (1.0, 0.6)
    assert build_parser().parse_args(["--heartbeat", "10", "train.py"]).heartbeat == 10
