"""The page for new users: its training survives the fault, and has the story that it shows."""

from __future__ import annotations

from pathlib import Path

from helpers.pages import blocks, commands, typed

PAGE = "docs/getting-started.md"
SHOWN = (
    "SUCCEEDED",
    "failure 1 (attempt 0): rank 1 on host ",
    "was killed by SIGKILL",
    "detected after",
    "restarted after",
    "(all 2 workers started again; 2 restarts",
    "first step after",
)
"""Texts of the story, on the page and in the output. A busy machine may have lost no step."""


def test_the_training_of_the_page_survives_its_fault(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python", PAGE)[1].text)
    (start,) = (command for command in commands(PAGE) if "--chaos" in command)
    job = typed(start, tmp_path)
    assert job.code == 0, job.output
    _, story_of_page = (block.text for block in blocks("text", PAGE))
    story = typed("regrow events runs", tmp_path).output
    for text in SHOWN:
        assert text in story_of_page
        assert text in story
