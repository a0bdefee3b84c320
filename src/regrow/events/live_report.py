"""What an agent reports to views on other hosts: the steps of its workers, and its latest events.

A view asks each node of a round by a key in the store of the round (`regrow.views.remote_job`). The
agent answers in two other keys (`regrow.agent.features.live_reports`). The first holds a
`LiveReport`, which is short. The second holds the events, which change rarely.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from regrow.events.log import JOB_STARTED, as_record
from regrow.utils import to_json

if TYPE_CHECKING:
    from regrow.events.recording import Event

MOST_BYTES: Final = 64 << 10
"""Most bytes of the events that an agent reports."""
LONGEST: Final = 1 << 20
"""Longest answer that a view reads, in bytes."""
_ALWAYS: Final = (JOB_STARTED, "regrow.rendezvous.completed", "regrow.attempt.started")
"""Events of which the latest one is reported, however old it is."""
_LEFT_OUT: Final = "regrow.worker.accounts"  # long, and for the ledger only


class Keys(NamedTuple):
    """The keys of a node in the store of a round."""

    ask: str
    report: str
    events: str


def keys_of(rank: int) -> Keys:
    """Return the keys of the node with a group rank."""
    return Keys(f"view/ask/{rank}", f"view/report/{rank}", f"view/events/{rank}")


class LiveStep(NamedTuple):
    """What one worker has reported; times in monotonic seconds of its host."""

    first: int
    first_at: float
    last: int
    last_at: float
    phase: str
    heartbeat_at: float
    """0 if there was none."""


class LiveReport(NamedTuple):
    """The state of one node when it answered."""

    host: str
    pid: int
    """Process id of the agent."""
    start_ticks: int
    """Start of the agent, in clock ticks since the boot."""
    nodes: int
    """Number of nodes of the round."""
    attempt: int
    monotonic: float
    """Time of the answer, in monotonic seconds of the host."""
    events: int
    """Number of the latest event."""
    steps: Mapping[int, LiveStep]
    """By local rank."""


def encode(report: LiveReport) -> bytes:
    """Return a report as text."""
    return to_json(
        [*report[:-1], {str(rank): step for rank, step in report.steps.items()}]
    ).encode()


def decode(text: bytes) -> LiveReport:
    """Return the report that an agent has encoded.

    Raises:
        ValueError: the text is no report.
    """
    found = _parsed(text)
    if not isinstance(found, list) or len(found) != len(LiveReport._fields):
        raise ValueError(f"no report of an agent: {text[:100]!r}")
    *values, steps = found
    if not isinstance(steps, dict):
        raise ValueError(f"no steps: {steps!r:.100}")
    kinds = (str, int, int, int, int, float, int)
    checked = [_value(kind, value) for kind, value in zip(kinds, values, strict=True)]
    read = {int(rank): _step(step) for rank, step in steps.items() if rank.isdecimal()}
    return LiveReport._make([*checked, read])


def _step(found: Any) -> LiveStep:
    if not isinstance(found, list) or len(found) != len(LiveStep._fields):
        raise ValueError(f"no step: {found!r:.100}")
    kinds = (int, float, int, float, str, float)
    return LiveStep(*(_value(kind, value) for kind, value in zip(kinds, found, strict=True)))


def _value(kind: type, value: Any) -> Any:
    """Return a value of this type and of plausible size."""
    if kind is float and isinstance(value, int | float):
        sane = math.isfinite(found := float(value)) if abs(value) < 1 << 63 else False
        value = found if sane else None
    elif kind is int and isinstance(value, int):
        value = value if abs(value) < 1 << 63 else None
    elif kind is str and isinstance(value, str):  # a view prints it, and makes a path of a host
        value = value if len(value) <= 300 and value.isprintable() else None
    if type(value) is not kind:
        raise ValueError(f"not a {kind.__name__} of plausible size: {value!r:.100}")
    return value


def _parsed(text: bytes) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"an answer of {len(text)} bytes")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class RecentEvents:
    """Event sink that keeps the latest events of an agent, at most `MOST_BYTES`; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: deque[tuple[str, bytes]] = deque()
        self._always: dict[str, bytes] = {}  # those of `_ALWAYS` that are no longer in `_lines`
        self._bytes = 0
        self._count = 0

    def __call__(self, event: Event) -> None:
        """Keep an event."""
        if event.name == _LEFT_OUT:
            return
        with self._lock:
            self._count += 1
            line = f"{self._count} {to_json(as_record(event))}\n".encode()
            self._lines.append((event.name, line))
            self._bytes += len(line)
            while self._bytes > MOST_BYTES and len(self._lines) > 1:
                name, line = self._lines.popleft()
                self._bytes -= len(line)
                if name in _ALWAYS:
                    self._always[name] = line

    def text(self) -> tuple[int, bytes]:
        """Return the number of the latest event, counted from 1, and the events as text."""
        with self._lock:
            lines = [*self._always.values(), *(line for _, line in self._lines)]
            return self._count, b"".join(lines)


def read_events_after(text: bytes, number: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the events with a higher number than `number`, with their numbers.

    A line that is no event is left out.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for line in text[:LONGEST].split(b"\n"):
        start, _, rest = line.partition(b" ")
        if not start.isdigit() or len(start) > 15 or int(start) <= number:
            continue
        try:
            record = _parsed(rest)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append((int(start), record))
    return sorted(found, key=lambda each: each[0])
