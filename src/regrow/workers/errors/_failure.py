"""`ProcessFailure`: what is known of a worker that failed.

Which of several failures came first decides what the user is told, and whole seconds do not tell:
when one rank dies, the others fail within milliseconds in the collective that it left. So each
failure carries `failed_monotonic`, the best estimate of its moment on this host's monotonic
clock, from the most exact source there is:

1. the stamp that `regrow.workers.errors.record` wrote with the exception,
2. the modification time of an error file that somebody else wrote (torch's `record` stamps whole
   seconds of wall time; the file's own time is exact),
3. the process's exit,
4. now.

A process cannot fail after it ended, so the exit also bounds the first two from above.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

NOT_AVAILABLE = "<N/A>"
#: Of an error file; more than any message has, and little enough for an agent to hold.
MOST_BYTES = 4 << 20
#: Characters of a message that stand for it where there is room for a line.
LONGEST_LINE = 2000
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass
class ProcessFailure:
    """The end of a worker that did not succeed, with its error file where it left one."""

    local_rank: int
    """Of the worker, on this node."""
    pid: int
    """Of the worker's process, which is gone."""
    exitcode: int
    """What it exited with; negative is the signal that killed it."""
    error_file: str
    """Path of its error file; `<N/A>` when it left none."""
    _: KW_ONLY
    exited_monotonic: float | None = None
    """When the process ended, in seconds of this host's monotonic clock; None if unknown."""
    host: str = ""
    """Where it ran; empty for this host."""
    error_file_data: dict[str, Any] = field(init=False)
    """The content of the error file; `{"message": "<NONE>"}` without one."""
    message: str | dict[str, Any] = field(init=False)
    """The file's message: a text, or for an exception that `record` wrote a dict of `message` and
    `extraInfo`; made up from the exit code where there is no file. `summary` is always text."""
    timestamp: int = field(init=False)
    """When it failed, in whole seconds since the epoch."""
    failed_monotonic: float = field(init=False)
    """When it failed, in seconds of this host's monotonic clock, as exactly as is known."""

    def __post_init__(self) -> None:
        self.error_file_data = {"message": "<NONE>"}
        now, wall = time.monotonic(), time.time()
        failed = self.exited_monotonic if self.exited_monotonic is not None else now
        stamp: int | None = None
        if not os.path.isfile(self.error_file):
            self.error_file = NOT_AVAILABLE
            self.message = self._how_it_ended()
            if self.exitcode >= 0:
                self.error_file_data["errorTraits"] = {
                    "category": "system_terminated_error",
                    "retryability": "False",
                }
        else:
            data, fault, written = read_error_file(self.error_file)
            if written is not None:
                failed = min(failed, now - max(0.0, wall - written))
            if fault is not None:
                text = f"error file {self.error_file} {fault}"
                died = self.exitcode < 0
                self.message = f"{self._how_it_ended()}; {text}" if died else text
            else:
                self.error_file_data = data
                self.message = data["message"] or self._how_it_ended()
                stamp, precise = _stamps(data)
                if precise is not None and 0 <= precise <= now:
                    failed = min(precise, self.exited_monotonic or now)
        self.failed_monotonic = failed
        self.timestamp = stamp if stamp is not None else int(wall - (now - failed))

    @classmethod
    def elsewhere(
        cls,
        *,
        host: str,
        local_rank: int,
        pid: int,
        exitcode: int,
        message: str,
        traceback: str | None,
        error_file: str | None,
        timestamp: int,
    ) -> ProcessFailure:
        """The failure of a worker on another host, as its agent has told it.

        Args:
            host: where it ran.
            local_rank: of the worker there.
            pid: of its process there.
            exitcode: what it exited with; negative is the signal that killed it.
            message: how it failed, in one line.
            traceback: of the exception, where it left one.
            error_file: path of its error file there.
            timestamp: when it failed, in seconds since the epoch by that host's clock.
        """
        failure = cls(local_rank, pid, exitcode, "", host=host)
        if traceback is not None or message != failure.summary:
            stack = {"py_callstack": traceback} if traceback is not None else {}
            failure.message = {"message": message, "extraInfo": stack}
            failure.error_file_data = {"message": failure.message}
        failure.error_file = error_file or NOT_AVAILABLE
        failure.timestamp = min(max(timestamp, 0), 1 << 35)
        return failure

    @property
    def has_error_file(self) -> bool:
        """Whether the worker left an error file on this host."""
        return self.error_file != NOT_AVAILABLE and not self.host

    @property
    def summary(self) -> str:
        """The failure in one line, such as `ValueError: no such layer` or `exit code 3`."""
        made_up = not self.has_error_file and isinstance(self.message, str)
        if made_up and self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        text = self.message
        if isinstance(text, dict):
            text = str(text.get("message") or NOT_AVAILABLE)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            return self._how_it_ended()
        line = lines[-1] if lines[0].startswith("Traceback ") else lines[0]
        return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."

    @property
    def traceback(self) -> str | None:
        """The exception's traceback from the error file, if it has one."""
        extra = self.message.get("extraInfo") if isinstance(self.message, dict) else None
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        return stack if isinstance(stack, str) else None

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        """What a missed heartbeat that ended the worker told of: `kind`, `ranks`, ..."""
        extra = self.message.get("extraInfo") if isinstance(self.message, dict) else None
        told = extra.get("heartbeat") if isinstance(extra, dict) else None
        return told if isinstance(told, dict) else None

    @property
    def blames(self) -> frozenset[int]:
        """The global ranks that ended this worker by what they did, or did not do."""
        ranks = (self.heartbeat or {}).get("ranks")
        listed = ranks if isinstance(ranks, (list, tuple)) else ()
        return frozenset(rank for rank in listed if type(rank) is int)

    def signal_name(self) -> str:
        """The name of the signal that ended the process, such as SIGKILL; else `<N/A>`."""
        if self.exitcode >= 0:
            return NOT_AVAILABLE
        from regrow.utils import _signals

        return _signals.signal_name(-self.exitcode) or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """When it failed, in local time, as YYYY-MM-DD_HH:MM:SS."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def _how_it_ended(self) -> str:
        if self.exitcode >= 0:
            return NO_TRACEBACK
        return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"


def read_error_file(path: str) -> tuple[dict[str, Any], str | None, float | None]:
    """Read an error file, whatever a worker left there.

    Returns:
        its content, why that is of no use, and when it was written (seconds since the epoch).
    """
    import json

    try:
        with open(path, "rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}", None
    if len(text) > MOST_BYTES:
        return {}, f"is longer than {MOST_BYTES} bytes, so it is not read", written
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"is not valid JSON: {error}", written
    if not isinstance(data, dict) or not isinstance(data.get("message"), (str, dict)):
        return {}, "has no message", written
    return data, None, written


def tail(text: str, room: int) -> str:
    """A text of at most `room` characters, and of a longer one its end."""
    if len(text) <= room:
        return text
    return f"[... {len(text) - room} characters cut ...]\n{text[len(text) - room :]}"


def _stamps(data: dict[str, Any]) -> tuple[int | None, float | None]:
    """The stamps in an error file: (seconds since the epoch, seconds of the monotonic clock)."""
    message = data["message"]
    stamps = message.get("extraInfo") if isinstance(message, dict) else data
    if not isinstance(stamps, dict):
        return None, None
    monotonic = stamps.get("monotonic")
    try:
        # A wall time beyond what the platform's calendar knows is no time.
        wall = int(stamps["timestamp"])
        time.localtime(wall)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None, monotonic if isinstance(monotonic, float) else None
    return wall, monotonic if isinstance(monotonic, float) else None


def first_of(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose failure is the root cause.

    That is the earliest, unless it says itself that other workers were the reason: then it is the
    earliest of these, if they have failed too, and so on. A worker that is stopped, for instance,
    ends after those which have waited for it in vain.

    Args:
        failures: by global rank; at least one.
    """
    others = set(failures)
    candidates: Set[int] = failures.keys()
    while candidates:
        first = min(candidates, key=lambda rank: failures[rank].failed_monotonic)
        others.discard(first)
        candidates = failures[first].blames & others
    return first
