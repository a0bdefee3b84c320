"""Stories in tests: their lines without the times at the start."""

from __future__ import annotations

import re

_TIME = re.compile(r"(?:\d\d:\d\d:\d\d )? *\+\d+\.\ds ")


def without_times(text: str) -> str:
    """Return a story without the times, and without the spaces in their place."""
    lines, size = [], 0
    for line in text.splitlines():
        if time := _TIME.match(line):
            size = time.end()
        lines.append(line[size:] if time or line[:size].isspace() else line)
    return "\n".join(lines)
