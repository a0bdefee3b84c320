"""Expand the placeholders in the pages of the site.

`{{ help run }}` becomes the text of `regrow run --help`, `{{ file PATH }}` the file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_INSERT = re.compile(r"^\{\{ (help|file) (\S+) \}\}$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with everything inserted (a hook of mkdocs)."""
    return _INSERT.sub(
        lambda found: _help(found[2]) if found[1] == "help" else _file(found[2]), markdown
    )


def _help(command: str) -> str:
    environ = os.environ | {"COLUMNS": "98", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "regrow", command, "--help"]
    text = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout
    return f"```text\n{text}```"


def _file(path: str) -> str:
    return f"```python\n{(_ROOT / path).read_text()}```"
