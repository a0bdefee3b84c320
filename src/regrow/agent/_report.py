"""The failure of a worker as a document, for the other nodes of its job.

An agent whose workers have failed gives the rendezvous a report, which hands it on unread; every
other agent makes of it what it shows its user, as if the failure were its own. It travels in the
state of the rendezvous, so it is bounded, and what is cut first is what matters least: the oldest
frames of the traceback. Whoever reads it may be of another release: every field may be missing, of
another type or new, and what cannot be read at all is at least shown.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any, TypeVar

from regrow.workers import ProcessFailure
from regrow.workers.errors._failure import tail

if TYPE_CHECKING:
    from regrow.agent._standing import Standing

FORMAT = "regrow.failure"
MAX_BYTES = 64 << 10
_MESSAGE = 4 << 10  # characters
_PATH = 4 << 10
_TRACEBACK = 48 << 10

T = TypeVar("T")


def encode(
    rank: int | None, failure: ProcessFailure, host: str, standing: Standing | None = None
) -> str:
    """The report of a failure, of at most `MAX_BYTES` bytes.

    Args:
        rank: the worker's global rank; None where the agent itself has failed.
        failure: what is known of it.
        host: where it ran.
        standing: where that host's workers stood, if they were asked because it hung.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        "host": host[:_PATH],
        "rank": rank,
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exit_code": failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else None,
        "message": failure.summary[:_MESSAGE],
        "error_file": failure.error_file[:_PATH],
        "timestamp": failure.timestamp,
    }
    if standing is not None:
        from regrow.agent import _standing

        fields["standing"] = _standing.encode(standing)
    traceback = failure.traceback
    room = _TRACEBACK
    while True:
        if traceback is not None:
            fields["traceback"] = tail(traceback, room)
        text = json.dumps(fields)
        if len(text) <= MAX_BYTES:
            return text
        # A character may take twelve bytes. Half as much and half as much again is enough soon.
        room //= 2
        for name in ("message", "error_file", "host"):
            fields[name] = fields[name][: max(room // 8, 64)]


def decode(report: str) -> tuple[int | None, ProcessFailure]:
    """The rank that failed, and its failure as if it were one of this host's.

    A report that says nothing makes a failure that says so; no report is refused.
    """
    fields = _fields(report)
    if fields is None:
        fields = {"message": f"a report that this release cannot read: {report[:_MESSAGE]}"}
    message = _of(fields, "message", str) or "it did not say how"
    failure = ProcessFailure.elsewhere(
        host=_of(fields, "host", str) or "<unknown>",
        local_rank=_number(fields, "local_rank", -1),
        pid=_number(fields, "pid", 0),
        exitcode=_exit_code(fields),
        message=message[:_MESSAGE],
        traceback=_of(fields, "traceback", str),
        error_file=_of(fields, "error_file", str),
        timestamp=_number(fields, "timestamp", 0),
    )
    rank = _of(fields, "rank", int)
    return rank if rank is not None and 0 <= rank < 1 << 31 else None, failure


def standing(report: str) -> Standing | None:
    """Where the workers of the failed one's host stood; None where it does not say."""
    from regrow.agent import _standing

    return _standing.decode((_fields(report) or {}).get("standing"))


def _fields(report: str) -> dict[str, Any] | None:
    try:
        fields: Any = json.loads(report)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _of(fields: dict[str, Any], name: str, kind: type[T]) -> T | None:
    value = fields.get(name)
    return value if type(value) is kind else None


def _number(fields: dict[str, Any], name: str, default: int) -> int:
    value = _of(fields, name, int)
    return value if value is not None and abs(value) < 1 << 40 else default


def _exit_code(fields: dict[str, Any]) -> int:
    code = _number(fields, "exit_code", 1)
    return code if -signal.NSIG < code < 256 else 1
