"""Requests out of a stream of bytes that anybody may write to: pure.

Everything that a process can write into a pipe arrives here, in pieces of any size. What is a
request comes out as one, whatever came before it; what is none is refused with a reason, and with
as much of its source as can be made out. Nothing that arrives raises, and what is kept between two
pieces is no longer than a line may be.

Two things let a request survive what is written around it. Our clients put a newline before it as
well as after, which ends a half line that somebody else has left. Torch's do not, so a line that
cannot be read is searched for the beginning of another one: within a JSON string its quotes would
be escaped, so what looks like a beginning is one.
"""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import NamedTuple

from regrow.timer._file_request import MAX_LINE, FileTimerRequest

SHORTEST = len('{"pid":2,"scope_id":"","expiration_time":0,"signal":0}')
"""Bytes of the shortest line that can be a request; what is shorter is not parsed."""
EXAMINED = 100
"""Bad lines of one piece whose source is looked for. Who writes more of them is found out sooner or
later, and the requests among them are not to wait for that."""
LAST_SIGNAL = 64
"""The highest signal of Linux."""
LAST_PID = 2**22
"""The highest process id that Linux can be configured for."""

_LONG = re.compile(rb"[^\n]{%d,}" % SHORTEST)
_SHORT = re.compile(rb"(?<![^\n])[^\n]{1,%d}(?![^\n])" % (SHORTEST - 1))
_BEGIN = b'{"version"'
_PID = re.compile(rb'"pid": ?(\d{1,7})[,}]')
_SAMPLE = 120  # bytes of a refused line that are shown


class Refusal(NamedTuple):
    """Something that came through the pipe and is no request, or none that counts."""

    why: str
    """What is wrong, in words that are the same for all of the kind."""
    pid: int
    """The process that it says it is from; 0: it does not say."""
    sample: str
    """The beginning of it."""


class Batch(NamedTuple):
    """What a piece of the stream has completed."""

    requests: list[FileTimerRequest]
    """In the order in which they came."""
    refusals: list[Refusal]
    """The first of each kind and source, among the first `EXAMINED` that are none."""


class Lines:
    """The stream of one pipe."""

    __slots__ = ("_partial", "_too_long")

    def __init__(self) -> None:
        self._partial = b""
        self._too_long = False  # whether the beginning of the partial line was dropped

    def feed(self, data: bytes) -> Batch:
        """Take the next bytes of the stream."""
        requests: list[FileTimerRequest] = []
        refused = _Refused()
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        data, self._partial = data[:end], data[end:]
        lines = _LONG.findall(data)
        for line in lines:
            if self._too_long:  # of which this is the end, and that it is has been said
                self._too_long = False
                why = ""
            else:
                read = _read(line)
                if isinstance(read, FileTimerRequest):
                    requests.append(read)
                    continue
                why = read
            begin = line.rfind(_BEGIN)
            if begin > 0 and isinstance(another := _read(line[begin:]), FileTimerRequest):
                requests.append(another)
                line = line[:begin]
            if why:
                refused.add(why, line)
        if data.count(b"\n") + sum(map(len, lines)) < len(data):
            for short in islice(_SHORT.finditer(data), EXAMINED):
                refused.add(_NO_OBJECT, short[0])
        if len(self._partial) > MAX_LINE:
            if not self._too_long:
                refused.add(_TOO_LONG, self._partial)
            self._too_long = True
            self._partial = self._partial[-MAX_LINE:]
        return Batch(requests, list(refused.found.values()))


class _Refused:
    """The refusals of one piece: of so many lines that they do not hold up the requests."""

    __slots__ = ("_left", "found")

    def __init__(self) -> None:
        self._left = EXAMINED
        self.found: dict[tuple[str, int], Refusal] = {}

    def add(self, why: str, line: bytes) -> None:
        if self._left:
            self._left -= 1
            said = _PID.search(line, 0, MAX_LINE)
            pid = int(said[1]) if said else 0
            if (why, pid) not in self.found:
                sample = line[:_SAMPLE].decode(errors="backslashreplace")
                self.found[why, pid] = Refusal(why, pid, sample)


_TOO_LONG = f"is longer than {MAX_LINE} bytes"
_NO_OBJECT = "is no JSON object, or half of one"


def _read(line: bytes) -> FileTimerRequest | str:
    """The request that a line is, or why it is none."""
    if len(line) > MAX_LINE:
        return _TOO_LONG
    if not line.endswith(b"}"):  # as of what is cut off; many of them are not to take long
        return _NO_OBJECT
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError):
        return _NO_OBJECT
    if not isinstance(content, dict):
        return _NO_OBJECT
    pid, scope = content.get("pid"), content.get("scope_id")
    if type(pid) is not int or not 1 < pid <= LAST_PID:
        return "has a pid that is none of a worker"
    if type(scope) is not str:
        return "has a scope_id that is no text"
    signal = content.get("signal")
    if type(signal) is not int or signal > LAST_SIGNAL:
        return "has a signal that is none"
    expiration = _seconds(content.get("expiration_time"))
    if expiration is None:
        return "has an expiration_time that is no finite number"
    request = FileTimerRequest(pid, scope, expiration, signal)
    if "monotonic" in content:
        request.monotonic = _seconds(content["monotonic"])
        request.armed = _seconds(content.get("armed"))
        if request.monotonic is None or request.armed is None:
            return "has a time on the monotonic clock that is no finite number"
    return request


def _seconds(value: object) -> float | None:
    """A number that JSON may hold, as one that can be calculated with."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int:  # not a bool
        return float(value) if abs(value) < 2**63 else None
    return None
