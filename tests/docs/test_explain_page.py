"""The page about `regrow explain`: its commands, with a job that fails twice, and its example."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.explained.record import STORIES
from helpers.pages import blocks, commands, typed

PAGE = "docs/guides/explain.md"
FAILS_TWICE = """\
import os, time
attempt = int(os.environ["REGROW_ATTEMPT"])
if attempt < 2 and os.environ["RANK"] == "1":
    raise ValueError("a bad batch")
if attempt < 2:
    time.sleep(100)
"""


def test_the_commands_of_the_page_explain_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_TWICE)
    start, listed, second, as_json, as_picture = commands(PAGE)
    assert typed(start, tmp_path).code == 0
    found = typed(listed, tmp_path)
    assert (found.code, found.output.count("ValueError: a bad batch")) == (0, 2), found.output
    page = typed(second, tmp_path)
    assert page.code == 0, page.output
    assert "Failure 2 of 2" in page.output
    assert "ValueError: a bad batch (train.py:4)" in page.output
    assert json.loads(typed(as_json, tmp_path).output)["number"] == 2
    assert typed(as_picture, tmp_path) == page
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


def test_the_page_shows_a_recorded_failure() -> None:
    shown = blocks("text", PAGE)[0].text
    assert shown == (STORIES / "slow-stop.txt").read_text()
