"""Insert the examples and the help texts into the pages of the site (a hook of mkdocs).

A line that is only a link to a file of `examples/` becomes that file, and a line that is only the
code `regrow run --help` becomes its output. So a page is complete in the repository as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^\[\S+\]\([./]+/(examples/\S+)\)$", flags=re.MULTILINE)
_HELP = re.compile(r"^`regrow (\S+) --help`$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with everything inserted."""
    with_help = _HELP.sub(lambda found: _help(found[1]), markdown)
    return EXAMPLE.sub(lambda found: _file(found[1]), with_help)


def _help(command: str) -> str:
    environ = os.environ | {"COLUMNS": "98", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "regrow", command, "--help"]
    text = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout
    return f"```text\n{text}```"


def _file(path: str) -> str:
    return f"```python\n{(_ROOT / path).read_text()}```"
