"""The cause of a failure, found in what a process wrote to stderr before it ended.

A Python traceback is best: it names the exception and the line of code. Then come the messages with
which other programs crash (an uncaught C++ exception, a panic of Rust or Go, Python's
faulthandler). Else the last line is all that there is.

The text is of the user's program: any characters, perhaps cut at its start, perhaps mixed with the
lines of other threads. Nothing here raises for its content.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

MOST_LINES = 200
"""Most lines of the text of a cause."""
_LONGEST = 2000  # characters of a line that are searched
_TRAILING = 20
"""Most lines after a traceback for it to count as the cause of an end that is not exit code 1."""
_LAST_LINES = 5
"""Lines in the text of a cause that is no known message."""


class Cause(NamedTuple):
    """Why a process failed, in its own words."""

    summary: str
    """One line, such as `KeyError: 'x' (train.py:12)`."""
    text: str
    """The lines that show it, such as a traceback."""
    is_traceback: bool = False
    """Whether the text is a Python traceback."""


_HEADER = re.compile(r"Traceback \(most recent call last\):$")
_GROUP = re.compile(r"^ *(\||\+(?!-)) ?")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FRAME = re.compile(r'^ +File "([^"<][^"]*)", line (\d+)')
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+)/")
_SOURCE = re.compile(r"\[\S{1,200}\.(?:cc|cpp|cu|h|hpp):\d+\] ")
"""Place in the source of a library in C++, such as gloo."""
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError)\b")
# Colours; and the prefix that torch adds to each line of a traceback.
_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[rank\d+\]: ?")

_FATAL = re.compile(r"^Fatal Python error: (.+)")
_WHERE = re.compile(r'^ +File "([^"<][^"]*)", line (\d+) in ')
_CPP = re.compile(
    r"^terminate called (?:after throwing an instance of '(.+)'|(recursively|without .+))$"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)")
_RUST = re.compile(r"^thread '.*?' (?:\(\d+\) )?panicked at (?:'(.*)', )?(\S+?):(\d+):\d+:?$")
_GO = re.compile(r"^panic: (.+)")

_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that come from outside: what the process wrote before them is not their cause."""


def find_cause(output: str, exitcode: int = 1) -> Cause | None:
    """Find the cause of a failure in the end of the process's stderr.

    Args:
        output: the end of the output.
        exitcode: exit code of the process; a negative one is the signal that killed it.

    Returns:
        The cause; None if the process wrote nothing, or a signal from outside ended it.
    """
    if -exitcode in _OUTSIDE:
        return None
    lines = [_plain(line) for line in output.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    found = _traceback(lines)
    if found is not None:
        begin, end, cause = found
        if exitcode == 1 or len(lines) - end <= _TRAILING:
            return (_crash(lines, begin) if exitcode != 1 else None) or cause
    return _crash(lines) or _last(lines)


def exception_of(traceback: str) -> str:
    """Return the exception that a traceback shows, and the last line of the user's code in it.

    The result is like `KeyError: 'x' (train.py:12)`. A message of several lines is cut to its
    first. Files of installed packages and of Python are not the user's. A text without a traceback
    is cut to its first line.
    """
    lines = [_plain(line) for line in traceback.split("\n") if line.strip()]
    if (found := _traceback(lines)) is not None:
        return found[2].summary
    first = next((line for line in lines if not line[:1].isspace()), "".join(lines[:1]))
    return " ".join(first.split())


def _plain(line: str) -> str:
    """Return a line without colours, a prefix of torch, and what a progress bar has overwritten."""
    return _NOISE.sub("", line.rstrip().rpartition("\r")[2][:_LONGEST]).rstrip()


def _traceback(lines: Sequence[str]) -> tuple[int, int, Cause] | None:
    """Return the first and the last line of the last traceback, and the cause that it shows."""
    headers = [number for number, line in enumerate(lines) if _HEADER.search(line)]
    if not headers:
        return _syntax_error(lines)
    last = headers[-1]
    indent = len(lines[last]) - len(lines[last].lstrip())
    is_group = lines[last].lstrip().startswith(("+ Exception Group", "| Exception Group"))
    frames: list[tuple[str, str]] = []
    named, end = "", last
    for number, line in enumerate(lines[last + 1 :], last + 1):
        text = _GROUP.sub("", line, 1) if is_group else line[min(indent, _margin(line)) :]
        if not text.strip():
            continue
        if not text[0].isspace():
            named, end = " ".join(text.split()), number
            break
        if frame := _FRAME.match(text):
            frames.append((frame[1], frame[2]))
    if not named:
        return None
    begin = last
    for header in reversed(headers[:-1]):
        between = {line.strip() for line in lines[header + 1 : begin]}
        if not between.intersection(_CHAINED) or last - header > MOST_LINES:
            break
        begin = header
    # Further lines of the message, or of the members of a group of exceptions.
    shown = lines[begin : end + _TRAILING + 1][-MOST_LINES:]
    return begin, end, Cause(_placed(named, frames), "\n".join(shown), is_traceback=True)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _syntax_error(lines: Sequence[str]) -> tuple[int, int, Cause] | None:
    """Return the error of a script that cannot be parsed; its traceback has no heading."""
    for end in range(len(lines) - 1, -1, -1):
        if not _SYNTAX.match(lines[end]):
            continue
        for begin in range(end - 1, max(end - 6, -1), -1):
            if frame := _FRAME.match(lines[begin]):
                text = "\n".join(lines[begin : end + 1])
                named = _placed(" ".join(lines[end].split()), [(frame[1], frame[2])])
                return begin, end, Cause(named, text, is_traceback=True)
    return None


def _placed(exception: str, frames: Sequence[tuple[str, str]]) -> str:
    exception = _SOURCE.sub("", exception)
    own = [(file, line) for file, line in frames if not _LIBRARY.search(file)]
    if not own:
        return exception
    file, line = own[-1]
    return f"{exception} ({file.rpartition('/')[2]}:{line})"


def _crash(lines: Sequence[str], begin: int = 0) -> Cause | None:
    """Return the message of a crash in the lines from `begin` on."""
    for number in range(len(lines) - 1, max(begin, len(lines) - MOST_LINES) - 1, -1):
        line, rest = lines[number], lines[number + 1 : number + MOST_LINES]
        if fatal := _FATAL.match(line):
            frames = [(found[1], found[2]) for each in rest if (found := _WHERE.match(each))]
            summary = _placed(f"Fatal Python error: {fatal[1]}", frames[::-1])
        elif thrown := _CPP.match(line):
            what = next((found[1] for each in rest[:5] if (found := _WHAT.match(each))), "")
            kind = thrown[1] or f"terminate called {thrown[2]}"
            summary = f"{kind}: {what}" if what else kind
        elif panic := _RUST.match(line):
            message = panic[1] or next((each.strip() for each in rest[:3] if each.strip()), "")
            file = panic[2].rpartition("/")[2]
            summary = f"panic: {message} ({file}:{panic[3]})"
        elif gone := _GO.match(line):
            summary = f"panic: {gone[1]}"
        else:
            continue
        return Cause(" ".join(summary.split()), "\n".join([line, *rest[:_TRAILING]]))
    return None


def _last(lines: Sequence[str]) -> Cause | None:
    full = [line for line in lines[-MOST_LINES:] if line.strip()]
    if not full:
        return None
    return Cause(" ".join(full[-1].split()), "\n".join(full[-_LAST_LINES:]))
