"""Reports on stacks: parse a dump, describe a place in one line, compare ranks, save a dump.

`parse` reads the output of `faulthandler` of Python 3.11 to 3.15. It accepts any other text,
because the memory of a dump belongs to the process that hangs.

`where` is one line about one process. It shows two frames of a stack. The innermost frame shows
what the process waits for (`all_reduce`). The nearest frame of the user's code shows which of
several such calls it is (`train.py:42`). The file contains the frames between them, and the frames
that all calls pass through (`threading.py`, decorators, import).

`compare_places` groups ranks by their places, and so names the odd one out. Ranks that wait in one
call have exactly the same place. Ranks that poll do not: one is in `sleep`, another in `glob`, each
on another line of the same loop. So ranks are compared by the whole place, then by the line of the
user's code, then by its function. The comparison stops when more than half of the ranks agree. A
function that all ranks have in common, such as the training function, carries no information. If no
other rule groups them, each rank is shown at its own place.

The asking process calls `save`, because a worker may hang on the file system of its logs. If the
file cannot be written, the dump is in the log only, and the caller continues.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from regrow.utils import get_logger

logger = get_logger(__name__)

Outcome = Literal["dumped", "stopped", "no handler", "silent", "gone"]


class Frame(NamedTuple):
    """One call."""

    file: str
    """File name in the interpreter; "???": unknown."""
    line: int
    """Line number; 0: unknown."""
    function: str


class Thread(NamedTuple):
    """One Python thread."""

    ident: int
    """Identity as in `threading.get_ident`; 0: not in the dump."""
    current: bool
    """Whether the thread took the signal."""
    main: bool
    """Whether this is the main thread."""
    frames: tuple[Frame, ...]
    """The most recent call first; empty if the thread runs no Python code."""


class Dump(NamedTuple):
    """The result of a request for the stacks of a process."""

    pid: int
    outcome: Outcome
    """Result of the request.

    "dumped": `threads` are its stacks. Without stacks: "stopped" by a signal or a debugger; "no
    handler", so no request was sent; "silent", no answer in time; "gone".
    """
    note: str = ""
    """Why stacks are missing, else empty.

    A note that begins with "in " says where in the kernel the process waits.
    """
    text: str = ""
    """The text that `faulthandler` wrote."""
    threads: tuple[Thread, ...] = ()
    native: str = ""
    """The output of py-spy, or the reason for its absence in one line; empty: not requested."""
    path: str = ""
    """The file of this dump; empty until it is saved."""


_HEADING = re.compile(
    r"(?:(?P<current>Current t|T)hread 0x(?P<ident>[0-9a-fA-F]{1,16})(?: \[.*\])?|Stack)"
    r" \(most recent call first\):"
)
_FRAME = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d{1,9}|\?\?\?) in (?P<function>.*)'
)


def parse(text: str, main: int = 0) -> tuple[Thread, ...]:
    """Parse the threads of a dump, in its order; skip other text.

    The first stack of a thread counts: the signal itself may have moved the thread on, because it
    ends a `sleep` or `poll` of native code.

    Args:
        text: the output of `faulthandler`, or any text.
        main: identity of the main thread. 0: unknown; then it is the last thread, because
            faulthandler begins with the newest. A stack without an identity is that of the main
            thread.
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
                threads[ident] = Thread(ident, current, ident == main, ())
                frames[ident] = []
        elif fresh and (frame := _FRAME.fullmatch(line)):
            number = int(frame["line"]) if frame["line"] != "???" else 0
            frames[ident].append(Frame(frame["file"] or "???", number, frame["function"]))
    if threads and not main:
        last = next(reversed(threads))
        threads[last] = threads[last]._replace(main=True)
    return tuple(each._replace(frames=tuple(frames[each.ident])) for each in threads.values())


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread to show: the main one, else the one that took the signal, if listed."""
    shown = [thread for thread in threads if thread.main or thread.current]
    return min(shown, key=lambda thread: not thread.main, default=None)


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/|/python3\d+t?\.zip/")
UNKNOWN = "unknown: "
"""Prefix of the result of `where` for an unknown place."""
_PLUMBING = re.compile(r"/(?:threading|contextlib|functools|runpy)\.py$")


def top(frames: Sequence[Frame]) -> tuple[Frame | None, Frame | None]:
    """Return the two frames of a stack to show in a line.

    Args:
        frames: the most recent call first.

    Returns:
        the innermost call, and the nearest call of the user's code, which may be the same. If all
        code is installed, the second is the nearest call of another package than the innermost one.
        None: there is no such call.
    """
    shown = [frame for frame in frames if not _passing(frame.file)] or list(frames)
    innermost = shown[0] if shown else None
    packages = [(frame, _package(frame.file)) for frame in shown]
    own = [frame for frame, package in packages if package is None]
    other = [frame for frame, package in packages if package and package != packages[0][1]]
    return innermost, next(iter(own + other), None)


def _passing(file: str) -> bool:
    """Return whether all calls pass through this file, so that it carries no information."""
    if file.startswith(("<frozen ", _HERE)):
        return True
    return _package(file) == "" and _PLUMBING.search(file) is not None


def _package(file: str) -> str | None:
    """Return the installed package of a file; empty: the standard library; None: neither."""
    if found := _PACKAGE.search(file):
        return found[1]
    return "" if file.startswith(("<frozen ", _HERE)) or _STANDARD.search(file) else None


def where(dump: Dump) -> str:
    """Describe the place of a process, for the line about its failure.

    Returns:
        for example "in all_reduce (distributed_c10d.py:2810), called by step (train.py:42)", or
        "stopped by a signal (SIGSTOP or a debugger)".
    """
    if dump.outcome == "stopped":
        return "stopped by a signal (SIGSTOP or a debugger)"
    if dump.outcome != "dumped":
        note = readable(dump.note or dump.outcome, 120)
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
    line = f":{frame.line}" if frame.line else ""
    return f"{readable(frame.function)} ({_short(frame.file)}{line})"


def _short(file: str) -> str:
    """Return the name of a file, with its folder if the name alone is ambiguous."""
    folder, _, name = file.rpartition("/")
    if name in ("__init__.py", "__main__.py") and folder:
        name = f"{folder.rpartition('/')[2]}/{name}"
    return readable(name or file)


def readable(text: str, most: int = 60) -> str:
    """Return one line in which other characters are escaped; a long line loses its middle."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= most else f"{shown[: most // 2]}…{shown[1 - most // 2 :]}"


class _Own(NamedTuple):
    """The parts of a place (a result of `where`): in `function`:`line``rest`."""

    function: str
    """Name and file, for example "step (train.py"; the parenthesis closes in `rest`."""
    line: str
    """Line number; empty if it is not known."""
    rest: str


def compare_places(places: Mapping[int, str], world_size: int = 0) -> list[str]:
    """Group ranks by their places.

    A rank is called "alone" only if the places of all ranks are known.

    Args:
        places: by rank, the result of `where`.
        world_size: number of ranks, if more than those in `places`.

    Returns:
        a line for each place, the place of the most ranks first.
    """
    known = {rank: place for rank, place in places.items() if not place.startswith(UNKNOWN)}
    unknown = {rank: place for rank, place in places.items() if rank not in known}
    groups = [*_groups(known), *_alike(unknown)]
    ordered = sorted(groups, key=lambda ranks: (-len(ranks), ranks[0]))
    most = _most(groups)
    total = max(len(places), world_size)
    return [
        _line(_shared([places[rank] for rank in ranks]), ranks, total, most, not unknown)
        for ranks in ordered
    ]


def _groups(places: Mapping[int, str]) -> list[list[int]]:
    """Group ranks with known places."""
    exact = _alike(places)
    if 2 * _most(exact) > len(places):
        return exact
    own = {rank: _own(place) for rank, place in places.items()}
    for groups in (
        _alike(own),
        _alike({rank: each._replace(line="") for rank, each in own.items()}),
    ):
        if len(places) > _most(groups) > len(places) / 2:
            return groups
    return exact


def _alike(places: Mapping[int, object]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank], []).append(rank)
    return list(groups.values())


def _most(groups: Iterable[Sequence[int]]) -> int:
    return max(map(len, groups), default=0)


def _own(place: str) -> _Own:
    call, closed, rest = place.removeprefix("in ").rpartition(", called by ")[2].partition(")")
    if not closed or not place.startswith("in "):
        return _Own(place, "", "")
    function, _, line = call.rpartition(":")
    known = line.isdecimal() and len(line) < 10  # another host may have sent any text
    return _Own(function, line, rest) if known else _Own(call, "", rest)


def _shared(places: Sequence[str]) -> str:
    """Return the common place of a group: the place of all, or the function of all."""
    if len(set(places)) == 1:
        return places[0]
    own = [_own(place) for place in places]
    lines = _numbers({int(each.line) for each in own if each.line})
    return f"in {own[0].function}{':' if lines else ''}{lines}){own[0].rest}"


def _line(place: str, ranks: Sequence[int], total: int, most: int, known: bool) -> str:
    one = len(ranks) == 1
    subject = f"rank {ranks[0]}" if one else f"ranks {_numbers(ranks)}"
    if one and most > 1 and known:
        subject += " alone"
    elif not one and most == total:
        subject = f"all {total} ranks"
    if place.startswith(("in ", "stopped ")):
        return f"{subject} {'is' if one else 'are'} {place}"
    return f"{subject} could not be asked: {place.removeprefix(UNKNOWN)}"


def _numbers(numbers: Iterable[int]) -> str:
    """Format numbers as ranges, for example 0, 2-5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        f"{first}-{last}" if last > first + 1 else ", ".join(map(str, sorted({first, last})))
        for first, last in runs
    )


def dump_path(prefix: str, pid: int) -> str:
    """Return the path of the file with the stacks of process `pid`: `prefix`.`pid`.txt."""
    return f"{prefix}.{pid}.txt"


def save(dump: Dump, path: str) -> Dump:
    """Append an answer to a file; a new file gets mode 0600.

    Args:
        dump: the result of `capture`; without any stacks, nothing is written.
        path: the file; empty: nowhere.

    Returns:
        the dump with its path. Without a path if it was not written; then the log has the reason.
    """
    if not path or not (dump.text or dump.native):
        return dump
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    note = f": {dump.note}" if dump.note else ""
    whole = f"Process {dump.pid}, {when}{note}\n\n{dump.text}\n"
    if dump.native:
        whole += f"With native frames:\n\n{dump.native}\n"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="replace") as file:
            file.write(whole)
    except OSError as error:
        logger.warning(
            "timers: cannot write stacks of %d to %s: %s", dump.pid, path, error.strerror
        )
        return dump
    return dump._replace(path=path)
