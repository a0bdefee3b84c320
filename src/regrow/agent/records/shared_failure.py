"""The failure of a worker as a document, for the other nodes of the job.

An agent with failed workers passes a report to the rendezvous. The rendezvous sends it to the other
agents and does not read it. Each agent decodes it and shows the failure to its user like one of its
own.

The report is part of the rendezvous's state, so its size is bounded. The oldest frames of the
traceback matter least and are cut first. The reader may run another release: each field may be
missing, new or of another type. A report that cannot be read at all is shown as text.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from regrow.agent.records.recorder import failure_fields
from regrow.workers import ProcessFailure
from regrow.workers.errors.failures import tail

MAX_BYTES = 64 << 10
_TEXT = 4 << 10  # characters of a message, a path or a host
_TRACEBACK = 48 << 10

T = TypeVar("T")


def encode(
    rank: int | None,
    failure: ProcessFailure,
    host: str,
    evidence: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the report of a failure, at most `MAX_BYTES` bytes long.

    Args:
        rank: global rank of the worker; None if the agent itself has failed.
        failure: the failure.
        host: host of the worker.
        evidence: further fields, as plain values of at most 16 KiB.
    """
    fields = failure_fields(rank, failure)
    fields |= {"host": host, "timestamp": failure.timestamp, **evidence}
    traceback, room, longest = failure.traceback, _TRACEBACK, _TEXT
    while True:
        for name in ("message", "error_file", "host"):
            fields[name] = fields[name][:longest]
        if traceback is not None:
            fields["traceback"] = tail(traceback, room)
        text = json.dumps(fields)
        if len(text) <= MAX_BYTES:
            return text
        # A character may take 12 bytes. A few halvings are enough.
        room //= 2
        longest = max(room // 8, 64)


def decode(report: str) -> tuple[int | None, ProcessFailure]:
    """Return the rank that failed, and its failure in the form of a local one.

    No report is refused: an unreadable report becomes a failure with a message about that.
    """
    fields = _fields(report)
    if fields is None:
        fields = {"message": f"a report that this release cannot read: {report[:_TEXT]}"}
    message = _of(fields, "message", str) or "the report gives no reason"
    failure = ProcessFailure(
        _number(fields, "local_rank", -1),
        _number(fields, "pid", 0),
        _exit_code(fields),
        "",
        host=_of(fields, "host", str) or "<unknown>",
        killed_with=(_of(fields, "killed_with", str) or "")[:_TEXT],
        was_stopped=_of(fields, "stopped", bool) is True,
    )
    failure.set_report(
        message[:_TEXT],
        _of(fields, "traceback", str),
        _of(fields, "error_file", str),
        _number(fields, "timestamp", 0),
    )
    rank = _of(fields, "rank", int)
    return rank if rank is not None and 0 <= rank < 1 << 31 else None, failure


def evidence(report: str, name: str) -> object:
    """Return a field of the report's evidence; None if the report does not have it."""
    return (_fields(report) or {}).get(name)


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
