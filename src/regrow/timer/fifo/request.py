"""Requests in the pipe of a file timer: the format of a line, and the parser of the stream.

A line is one JSON object with the names that torch's client and server use, so either end may be
torch's, and with two further names. torch sends the expiration in seconds since the epoch, and that
clock may be set between the two ends. So regrow's client adds the deadline on the monotonic clock,
which all processes of a host share. A write of up to PIPE_BUF bytes (4096) into a pipe arrives in
one piece, so no line is longer.

Any process can write anything into the pipe. So the parser (`RequestLines`) accepts pieces of any
size and never raises. It refuses input that is no request, with a reason and the pid that the text
claims. Between two pieces it keeps at most one line.

Two rules protect a request from invalid input around it. regrow's clients also write a newline
before the request, which ends an incomplete line of another client. torch's clients do not. So the
parser searches a line that it cannot parse for the beginning of another request. Quotes within a
JSON string are escaped, so text that looks like a beginning is one.
"""

from __future__ import annotations

import json
import math
import re
import select
import stat
from typing import NamedTuple

from regrow.timer.api import TimerRequest
from regrow.timer.processes import LAST_PID

VERSION = 1
"""Version of the line format, in torch's numbering."""
MAX_LINE = select.PIPE_BUF
"""Most bytes of a line, with the newlines around it."""
KEPT_OPEN = stat.S_ISVTX
"""Mode bit of a pipe that clients may keep open; the bit has a meaning for directories only."""
SHORTEST = len('{"pid":2,"scope_id":"","expiration_time":0,"signal":0}')
"""Fewest bytes of a line that can be a request; shorter lines are not parsed."""
EXAMINED = 100
"""Most bad lines of one piece that are searched for their source.

More of them must not delay the requests.
"""
LAST_SIGNAL = 64
"""The highest signal of Linux."""

_BEGIN = b'{"version"'
_PID = re.compile(rb'"pid": ?(\d{1,7})[,}]')
_SAMPLE = 120  # most bytes of a refused line that are shown
_TOO_LONG = f"is longer than {MAX_LINE} bytes"
_NO_OBJECT = "is not a complete JSON object"


class FileTimerRequest(TimerRequest):
    """A request to arm or release a timer of a process.

    Args:
        worker_pid: the process.
        scope_id: the name of the timer; a process has one timer in each scope.
        expiration_time: seconds since the epoch; negative: release the timer.
        signal: the signal to send to the process when the timer expires. Zero or less: no signal,
            the expiration is only reported.
        monotonic: the expiration, in seconds on CLOCK_MONOTONIC. None: the server converts
            `expiration_time` on arrival.
        armed: time of the request, in seconds on CLOCK_MONOTONIC. None: on arrival.
    """

    __slots__ = ("armed", "monotonic", "signal", "version")
    __hash__ = None  # the request is mutable

    def __init__(
        self,
        worker_pid: int,
        scope_id: str,
        expiration_time: float,
        signal: int = 0,
        *,
        monotonic: float | None = None,
        armed: float | None = None,
    ) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = VERSION
        self.signal = signal
        self.monotonic = monotonic
        self.armed = armed

    @property
    def worker_pid(self) -> int:
        """The process; another name of `worker_id`."""
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        """Compare the content of the requests, without their times of arrival and clocks."""
        return (
            isinstance(other, FileTimerRequest)
            and super().__eq__(other)
            and (self.version, self.signal) == (other.version, other.signal)
        )

    def to_json(self) -> str:
        """Return the line, without a newline."""
        content = {
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": self.signal,
        }
        clocks = {"monotonic": self.monotonic, "armed": self.armed}
        return json.dumps(content | {name: at for name, at in clocks.items() if at is not None})


class RequestRefusal(NamedTuple):
    """Input from the pipe that is no valid request."""

    why: str
    """The defect, in the same words for all input of the kind."""
    pid: int
    """The process that the input claims to be from; 0: it names none."""
    sample: str
    """The beginning of the input."""


class Batch(NamedTuple):
    """The lines that a piece of the stream has completed."""

    requests: list[FileTimerRequest]
    """The requests, in the order of arrival."""
    refusals: list[RequestRefusal]
    """The refusals of the first `EXAMINED` bad lines."""


class RequestLines:
    """The stream of one pipe."""

    def __init__(self) -> None:
        self.partial = b""
        """The beginning of a line, at most `MAX_LINE` bytes."""
        self._too_long = False  # whether the beginning of the partial line was dropped

    def feed(self, data: bytes) -> Batch:
        """Parse the next bytes of the stream."""
        requests: list[FileTimerRequest] = []
        bad: list[tuple[str, bytes]] = []  # reasons and lines
        data = self.partial + data
        end = data.rfind(b"\n") + 1
        data, self.partial = data[:end], data[end:]
        for line in data.split(b"\n"):
            if len(line) < SHORTEST:
                if line:
                    bad.append((_NO_OBJECT, line))
                continue
            if self._too_long:  # this is the end of a line that was already refused
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
                bad.append((why, line))
        if len(self.partial) > MAX_LINE:
            if not self._too_long:
                bad.append((_TOO_LONG, self.partial))
            self._too_long = True
            self.partial = self.partial[-MAX_LINE:]
        return Batch(requests, [_refusal(why, line) for why, line in bad[:EXAMINED]])


def _refusal(why: str, line: bytes) -> RequestRefusal:
    claimed = _PID.search(line, 0, MAX_LINE)
    sample = line[:_SAMPLE].decode(errors="backslashreplace")
    return RequestRefusal(why, int(claimed[1]) if claimed else 0, sample)


def _read(line: bytes) -> FileTimerRequest | str:
    """Parse a line; return the reason if it is no request."""
    if len(line) > MAX_LINE:
        return _TOO_LONG
    if not line.endswith(b"}"):  # true for a cut-off line; faster than parsing
        return _NO_OBJECT
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError):
        return _NO_OBJECT
    if not isinstance(content, dict):
        return _NO_OBJECT
    pid, scope = content.get("pid"), content.get("scope_id")
    if type(pid) is not int or not 1 < pid <= LAST_PID:
        return "has a pid that no worker can have"
    if type(scope) is not str:
        return "has a scope_id that is not a text"
    signal = content.get("signal")
    if type(signal) is not int or signal > LAST_SIGNAL:
        return "has a signal that does not exist"
    expiration = _seconds(content.get("expiration_time"))
    if expiration is None:
        return "has an expiration_time that is not a finite number"
    request = FileTimerRequest(pid, scope, expiration, signal)
    if "monotonic" in content:
        request.monotonic = _seconds(content["monotonic"])
        request.armed = _seconds(content.get("armed"))
        if request.monotonic is None or request.armed is None:
            return "has a time on the monotonic clock that is not a finite number"
    return request


def _seconds(value: object) -> float | None:
    """Return a finite number as a float; None: the value is no such number."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int:  # not a bool
        return float(value) if abs(value) < 2**63 else None
    return None
