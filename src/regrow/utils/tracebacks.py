"""Tracebacks in a few lines: those of a worker's exception in an event, and on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from regrow.utils.user_text import get_traceback

MOST_LINES: Final = 20
"""Most lines of a shortened traceback."""
_WIDEST = 300  # characters of a line of `stack_of`
_DEEPEST = 50  # frames of each exception of a chain that `stack_of` looks at, the innermost
_PACKAGE = f"{__name__.partition('.')[0]}."
_FRAME = re.compile(r'( *)File "([^"]+)", line \d')
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+|regrow/inprocess)/")


def stack_of(error: BaseException) -> list[str]:
    """Return the traceback of an exception, without regrow's own frames at its begin.

    Returns:
        At most `MOST_LINES` lines of at most 300 characters; none if its class refuses it.
    """
    from traceback import format_exception

    part = get_traceback(error)
    while part is not None and str(part.tb_frame.f_globals.get("__name__")).startswith(_PACKAGE):
        part = part.tb_next
    try:
        text = "".join(format_exception(type(error), error, part, limit=-_DEEPEST))
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return []
    return [line[:_WIDEST] for line in shortened(text)]


def shortened(traceback: str) -> tuple[str, ...]:
    """Return the lines of a traceback, at most `MOST_LINES`.

    A longer one loses the frames of installed packages, of Python and of regrow first, then lines
    in its middle: its cause is at its end.
    """
    lines = [line.rstrip() for line in traceback.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        lines = list(_of_the_user(lines))
    if len(lines) <= MOST_LINES:
        return tuple(lines)
    left_out = len(lines) - MOST_LINES + 2
    return lines[0], f"... {left_out} lines left out", *lines[-(MOST_LINES - 2) :]


def _of_the_user(lines: Iterable[str]) -> Iterator[str]:
    skipped: int | None = None  # indent of the frame that is left out
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            skipped = len(frame[1]) if _LIBRARY.search(frame[2]) else None
        elif skipped is not None and len(line) - len(line.lstrip()) <= skipped:
            skipped = None
        if skipped is None:
            yield line
