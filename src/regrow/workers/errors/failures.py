"""`ProcessFailure`: the known facts of one failed worker; `ChildFailedError`: the report of all.

The report depends on which failure came first. Whole seconds are too coarse for this order: when
one rank dies, the others fail within milliseconds in the collective that it left. So each failure
carries `failed_monotonic`, the best estimate of its time on this host's monotonic clock. The
sources, from the most exact one:

1. the stamp that `regrow.workers.errors.record` wrote with the exception,
2. the modification time of an error file that other code wrote (torch's `record` stamps whole
   seconds of wall time; the time of the file itself is exact),
3. the end of the process,
4. the current time.

A process cannot fail after it ended. So the end of the process is the upper limit for the first two
sources.

When a process dies, its connections are closed before the agent can see its end. So another worker
may stamp its exception about the lost connection first. Therefore such an exception gives way to a
process that ended without an error file at most `LOST_CONNECTION_S` later, by the guardian's clock
reading (`earliest`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from regrow.utils import is_lost_connection, signal_name, str_of

if TYPE_CHECKING:
    from regrow.events import Cause

NOT_AVAILABLE = "<N/A>"
MAX_MESSAGE = 64 << 10  # most characters of each failure in the report
MAX_RULE_WIDTH = 60
#: Most bytes of an error file: more than any message needs, and little enough for an agent.
MOST_BYTES = 4 << 20
#: Most characters of a message in a summary of one line.
LONGEST_LINE = 2000
#: Longest time, in seconds, from such an exception to the end of the process that caused it. One
#: case was observed, with 0.9 ms; the value leaves room for a busy machine.
LOST_CONNECTION_S = 0.05
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass
class ProcessFailure:
    """The end of a worker that did not succeed, with its error file, if any."""

    local_rank: int
    """The worker's local rank on its node."""
    pid: int
    """The worker's process id; the process is gone."""
    exitcode: int
    """Exit code of the worker; a negative code is the signal that killed it."""
    error_file: str
    """Path of the worker's error file; `<N/A>` if there is none."""
    _: KW_ONLY
    exited_monotonic: float | None = None
    """End of the process, in seconds of this host's monotonic clock; None if unknown."""
    host: str = ""
    """The worker's host; empty for this host."""
    noticed_late: bool = False
    """Whether the worker may have failed earlier, because the guardian was suspended."""
    killed_with: str = ""
    """How the guardian ended, if its end killed the worker."""
    was_stopped: bool = False
    """Whether the agent stopped the process, which had raised an exception before."""
    cause: Cause | None = None
    """The cause that the worker itself wrote to stderr, if it left no error file."""
    error_file_data: dict[str, Any] = field(init=False)
    """Content of the error file; `{"message": "<NONE>"}` without a file."""
    message: str | dict[str, Any] = field(init=False)
    """Message of the failure; `summary` is always text.

    A text, or for an exception that `record` wrote, a dict of `message` and `extraInfo`. Without an
    error file, it is derived from the exit code.
    """
    timestamp: int = field(init=False)
    """Time of the failure, in whole seconds since the epoch."""
    failed_monotonic: float = field(init=False)
    """Best known time of the failure, in seconds of this host's monotonic clock."""

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
        self.noticed_late = self.noticed_late and failed == self.exited_monotonic
        self.failed_monotonic = failed
        self.timestamp = stamp if stamp is not None else int(wall - (now - failed))

    def set_report(
        self, message: str, traceback: str | None, error_file: str | None, timestamp: int
    ) -> None:
        """Set the facts of a worker on another host, as reported by its agent.

        Args:
            message: the failure in one line.
            traceback: traceback of the exception, if any.
            error_file: path of the error file there.
            timestamp: time of the failure, in seconds since the epoch by that host's clock.
        """
        if traceback is not None or message != self.summary:
            stack = {"py_callstack": traceback} if traceback is not None else {}
            self.message = {"message": message, "extraInfo": stack}
            self.error_file_data = {"message": self.message}
        self.error_file = error_file or NOT_AVAILABLE
        self.timestamp = min(max(timestamp, 0), 1 << 35)

    @property
    def lost_a_connection(self) -> bool:
        """Whether the worker's exception is about a lost connection, by its text."""
        return self.has_error_file and is_lost_connection(self.summary)

    @property
    def has_error_file(self) -> bool:
        """Whether the worker left an error file on this host."""
        return self.error_file != NOT_AVAILABLE and not self.host

    @property
    def summary(self) -> str:
        """The failure in one line, such as `ValueError: no such layer` or `exit code 3`."""
        if self.cause is not None:
            return self.cause.summary[:LONGEST_LINE]
        made_up = not self.has_error_file and isinstance(self.message, str)
        if made_up and self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        text = self.message
        if isinstance(text, dict):
            text = _text_of(text)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            return self._how_it_ended()
        line = lines[-1] if lines[0].startswith("Traceback ") else lines[0]
        return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."

    @property
    def traceback(self) -> str | None:
        """The exception's traceback, from the error file or from stderr; None if there is none."""
        if self.cause is not None:
            return self.cause.text if self.cause.is_traceback else None
        stack = _extra_info(self.message).get("py_callstack")
        return stack if isinstance(stack, str) else None

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        """The report of the missed heartbeat that ended the worker: `kind`, `ranks`, ..."""
        report = _extra_info(self.message).get("heartbeat")
        return report if isinstance(report, dict) else None

    @property
    def blames(self) -> frozenset[int]:
        """The global ranks that caused this worker's end, by an action or a missing heartbeat."""
        ranks = (self.heartbeat or {}).get("ranks")
        listed = ranks if isinstance(ranks, (list, tuple)) else ()
        return frozenset(rank for rank in listed if type(rank) is int)

    def signal_name(self) -> str:
        """Name of the signal that ended the process, such as SIGKILL; else `<N/A>`."""
        if self.exitcode >= 0:
            return NOT_AVAILABLE
        return signal_name(-self.exitcode) or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Time of the failure in local time, as YYYY-MM-DD_HH:MM:SS."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def _how_it_ended(self) -> str:
        if self.killed_with:
            return f"{self.killed_with}, and its end killed this worker"
        if self.exitcode >= 0:
            return NO_TRACEBACK
        return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"


def read_error_file(path: str) -> tuple[dict[str, Any], str | None, float | None]:
    """Read an error file; its content is not trusted.

    Returns:
        the content, the reason if it is unusable, and the time of writing (seconds since the
        epoch).
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
    """Return the end of a text, at most `room` characters."""
    if len(text) <= room:
        return text
    return f"[... {len(text) - room} characters cut ...]\n{text[len(text) - room :]}"


def _text_of(message: dict[str, Any]) -> str:
    text = message.get("message") or NOT_AVAILABLE
    # `str` of a deeply nested list raises RecursionError. `str_of` does not, but it cuts a text.
    return text if isinstance(text, str) else str_of(text)


def _extra_info(message: str | dict[str, Any]) -> dict[str, Any]:
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def _stamps(data: dict[str, Any]) -> tuple[int | None, float | None]:
    """Return an error file's stamps: (seconds since the epoch, seconds of the monotonic clock)."""
    message = data["message"]
    stamps = _extra_info(message) if isinstance(message, dict) else data
    monotonic = stamps.get("monotonic")
    precise = monotonic if isinstance(monotonic, float) else None
    try:
        # A wall time outside the platform's calendar is ignored.
        wall = int(stamps["timestamp"])
        time.localtime(wall)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None, precise
    return wall, precise


def earliest(failures: Iterable[ProcessFailure]) -> ProcessFailure | None:
    """Return the first of some failures; None if there are none.

    That is the failure with the smallest `failed_monotonic`. But if this is an exception about a
    lost connection, the first process without an error file that ended at most `LOST_CONNECTION_S`
    later takes precedence.
    """
    in_order = sorted(failures, key=lambda failure: failure.failed_monotonic)
    if in_order and in_order[0].lost_a_connection:
        until = in_order[0].failed_monotonic + LOST_CONNECTION_S
        for failure in in_order:
            if not failure.has_error_file and failure.failed_monotonic <= until:
                return failure
    return next(iter(in_order), None)


def first_of(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank with the failure that is the root cause.

    It is the `earliest` failure, unless that failure's error file names other workers as the
    reason. Then it is the earliest failure of these workers, if they have failed too, and so on.
    For example, a suspended worker ends after the workers that waited for it without success.

    Args:
        failures: by global rank; at least one.
    """
    others = set(failures)
    candidates: Set[int] = failures.keys()
    while candidates:
        found = earliest(failures[rank] for rank in candidates)
        first = next(rank for rank in candidates if failures[rank] is found)
        others.discard(first)
        candidates = failures[first].blames & others
    return first


class ChildFailedError(Exception):
    """Workers failed.

    If it is raised through a function under `record`, the error file of the first failed worker is
    passed on, instead of a traceback of this exception.

    Args:
        name: the script or function that failed.
        failures: by global rank; at least one.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError("a ChildFailedError needs at least one failure; got none")
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the root cause and its global rank; see `first_of`."""
        rank = first_of(self.failures)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Format the report.

        Args:
            boarder_delim: character of the lines above and below the report.
            section_delim: character of the lines between sections.
        """
        root, _ = self.get_first_failure()
        entries = {
            rank: _entry(index, rank, failure)
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        title = f"{self.name} FAILED"
        lines = [title, *(line for entry in entries.values() for line in entry.splitlines())]
        width = min(MAX_RULE_WIDTH, max(len(line) for line in lines))
        border, section = boarder_delim * width, section_delim * width
        others = [entry for rank, entry in entries.items() if rank != root]
        return "\n".join(
            [
                "",
                border,
                title,
                section,
                "Failures:",
                *(others or ["  <NO_OTHER_FAILURES>"]),
                section,
                "Root Cause (first observed failure):",
                entries[root],
                border,
            ]
        )


def _entry(index: int, rank: int, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    by_signal = f" ({name})" if name != NOT_AVAILABLE else ""
    message = failure.message
    if failure.cause is not None:
        message = failure.cause.text
    elif isinstance(message, dict):
        message = failure.traceback or _text_of(message)
    message = tail(message, MAX_MESSAGE).replace("\n", "\n  ")
    return (
        f"[{index}]:\n"
        f"  time      : {failure.timestamp_isoformat()}\n"
        f"  host      : {failure.host or os.uname().nodename}\n"
        f"  rank      : {rank} (local_rank: {failure.local_rank})\n"
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}){by_signal}\n"
        f"  error_file: {failure.error_file}\n"
        f"  traceback : {message}"
    )
