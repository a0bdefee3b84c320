"""What a dump of stacks says: reading it, and putting it in a line for whoever is on call.

`parse` reads what `faulthandler` of Python 3.11 to 3.15 writes, and survives any other text: the
memory that a dump is read from belongs to the process that hangs. `where` is one line about one
process; those of a job are compared in `_places`.

Of a stack, two frames are shown. The innermost says what is waited for (`all_reduce`), the nearest
one of the user's own code which of several such calls it is (`train.py:42`). What stands between
them, and the frames through which everything passes (`threading.py`, decorators, import), would not
be read at three in the morning; the file has them all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Outcome = Literal["dumped", "stopped", "no handler", "silent", "gone"]


class Frame(NamedTuple):
    """One call."""

    file: str
    """As the interpreter names it; "???" where it does not know."""
    line: int
    """0 where the interpreter does not know it."""
    function: str


class Thread(NamedTuple):
    """One Python thread."""

    ident: int
    """As `threading.get_ident` has it; 0 in a dump that does not say."""
    name: str
    """Only Python 3.14 and newer know it in a dump; else empty."""
    current: bool
    """Whether it took the signal."""
    main: bool
    """Whether it is the main thread."""
    frames: tuple[Frame, ...]
    """The most recent call first; empty where it runs no Python code."""


class Dump(NamedTuple):
    """What a process answered when it was asked for its stacks."""

    pid: int
    outcome: Outcome
    """"dumped": `threads` are its stacks. Without stacks: "stopped" by a signal or a debugger;
    "no handler", so that it was not asked; "silent", it did not answer in time; "gone"."""
    note: str = ""
    """Why there are no stacks, or not all that were asked for; else empty. Where the kernel knows
    in their place where the process stands, it begins with "in "."""
    text: str = ""
    """As `faulthandler` wrote it."""
    threads: tuple[Thread, ...] = ()
    native: str = ""
    """What py-spy printed, or in a line why it did not; empty where it was not asked for."""
    path: str = ""
    """The file that has all this; empty until it is saved."""


_HEADING = re.compile(
    r"(?:(?P<current>Current t|T)hread 0x(?P<ident>[0-9a-fA-F]{1,16})(?: \[(?P<name>.*)\])?|Stack)"
    r" \(most recent call first\):"
)
_FRAME = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d{1,9}|\?\?\?) in (?P<function>.*)'
)


def parse(text: str, main: int = 0) -> tuple[Thread, ...]:
    """The threads of a dump, in its order; what is no part of one is passed over.

    Of a thread that is there twice the first stack counts: to be asked may have set it going, as a
    signal ends a `sleep` or `poll` of native code.

    Args:
        text: what `faulthandler` wrote, or anything.
        main: identity of the main thread; 0: unknown, then it is the one that is listed last, as
            faulthandler begins with the newest. A stack without an identity is taken to be its.
    """
    threads: dict[int, Thread] = {}
    frames: dict[int, list[Frame]] = {}
    ident, fresh = 0, False
    for line in text.split("\n"):
        if heading := _HEADING.fullmatch(line):
            ident = int(heading["ident"], 16) if heading["ident"] else main
            current = not heading["ident"] or heading["current"] != "T"
            fresh = ident not in threads
            if fresh:
                threads[ident] = Thread(ident, heading["name"] or "", current, ident == main, ())
                frames[ident] = []
        elif fresh and (frame := _FRAME.fullmatch(line)):
            number = int(frame["line"]) if frame["line"] != "???" else 0
            frames[ident].append(Frame(frame["file"] or "???", number, frame["function"]))
    if threads and not main:
        last = next(reversed(threads))
        threads[last] = threads[last]._replace(main=True)
    return tuple(each._replace(frames=tuple(frames[each.ident])) for each in threads.values())


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread to look at: the main one, else the one that took the signal, if it is listed."""
    shown = [thread for thread in threads if thread.main or thread.current]
    return min(shown, key=lambda thread: not thread.main, default=None)


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/|/python3\d+t?\.zip/")
UNKNOWN = "unknown: "
"""What `where` begins with, if it says why that is not known."""
_PLUMBING = re.compile(r"/(?:threading|contextlib|functools|runpy)\.py$")


def top(frames: Sequence[Frame]) -> tuple[Frame | None, Frame | None]:
    """The two frames of a stack that are worth a line.

    Args:
        frames: the most recent call first.

    Returns:
        the innermost call, and the nearest one of the user's own code, which may be the same. Where
        nothing is the user's, as all is installed, it is the nearest one of another package than
        the innermost call's. None where there is no such.
    """
    telling = [frame for frame in frames if not _passing(frame.file)] or list(frames)
    innermost = telling[0] if telling else None
    packages = [(frame, _package(frame.file)) for frame in telling]
    own = [frame for frame, package in packages if package is None]
    other = [frame for frame, package in packages if package and package != packages[0][1]]
    return innermost, next(iter(own + other), None)


def _passing(file: str) -> bool:
    """Whether everything goes through this file, so that it says nothing."""
    if file.startswith(("<frozen ", _HERE)):
        return True
    return _package(file) == "" and _PLUMBING.search(file) is not None


def _package(file: str) -> str | None:
    """The installed package that a file is of; empty: the standard library; None: neither."""
    if found := _PACKAGE.search(file):
        return found[1]
    return "" if file.startswith(("<frozen ", _HERE)) or _STANDARD.search(file) else None


def where(dump: Dump) -> str:
    """Where a process stands, for the line about its failure.

    Returns:
        such as "in all_reduce (distributed_c10d.py:2810), called by step (train.py:42)", or
        "stopped by a signal (SIGSTOP or a debugger)".
    """
    if dump.outcome == "stopped":
        return "stopped by a signal (SIGSTOP or a debugger)"
    if dump.outcome != "dumped":
        note = printable(dump.note or dump.outcome, 120)
        return note if note.startswith("in ") else f"{UNKNOWN}{note}"
    thread = main_thread(dump.threads)
    if thread is None:
        return f"{UNKNOWN}its main thread is not in the dump"
    innermost, own = top(thread.frames)
    place = "in native code that no Python code called"
    if innermost is not None:
        place = f"in {_show(innermost)}"
        if own is not None and own != innermost:
            place += f", called by {_show(own)}"
    return place if thread.main else f"{place}, in another thread than the main one"


def _show(frame: Frame) -> str:
    place = _short(frame.file)
    return (
        f"{printable(frame.function)} ({place}:{frame.line})"
        if frame.line
        else (f"{printable(frame.function)} ({place})")
    )


def _short(file: str) -> str:
    """The name of a file as people call it: with its folder where the name alone says nothing."""
    folder, _, name = file.rpartition("/")
    if name in ("__init__.py", "__main__.py") and folder:
        name = f"{folder.rpartition('/')[2]}/{name}"
    return printable(name or file)


def printable(text: str, most: int = 60) -> str:
    """One line of printable characters, the middle left out where it is long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= most else f"{shown[: most // 2]}…{shown[1 - most // 2 :]}"
