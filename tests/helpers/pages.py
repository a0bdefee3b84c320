"""The pages for users: README.md and docs/, their commands and their code blocks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from helpers.commands import ROOT, Ended, run

PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
"""The text of every page, by its path from the project's root."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)

#: A script for torchrun, such as a reader's own `train.py`.
TRAIN = """\
import os
# In one piece, or the ranks' words would mix.
os.write(1, "hello from rank {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""


class Block(NamedTuple):
    """A code block and its place."""

    page: str
    kind: str
    """Its language: "python", "console", "bash", "yaml", "text"."""
    number: int
    """Index among the blocks of this kind on its page, from 0."""
    text: str


def blocks(kind: str, *pages: str) -> list[Block]:
    """Return all blocks of a kind, or only those on the named pages."""
    found = []
    for page in pages or PAGES:
        texts = [text for other, text in _BLOCK.findall(PAGES[page]) if other == kind]
        found += [Block(page, kind, number, text) for number, text in enumerate(texts)]
    return found


def commands(*pages: str) -> list[str]:
    """Return the commands of all pages, or of the named pages, without prompts."""
    lines = [line for block in blocks("console", *pages) for line in block.text.splitlines()]
    assert all(line.startswith("$ ") for line in lines), lines
    return [line[2:] for line in lines]


def typed(command: str, cwd: Path, **env: str) -> Ended:
    """Run a shell line in the active virtual environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(["bash", "-c", command], cwd=cwd, env={"PATH": path, "HOME": str(cwd), **env})
