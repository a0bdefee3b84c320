"""What an event is, under torch's names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from regrow.utils import to_json

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue: TypeAlias = Any
"""str, int, float, bool, None, or lists and dicts of these; anything else is written as text."""


class EventSource(str, Enum):  # noqa: UP042 - its text is "EventSource.AGENT", as in torch
    """Who speaks."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042 - as above
    """What a node is doing in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened in a job."""

    name: str
    """What happened, dotted: `regrow.worker.failed`."""
    source: EventSource
    """Who says so."""
    timestamp: int = 0
    """Wall time in milliseconds since the epoch; 0 means the time at which it is written."""
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)
    """Everything else there is to say."""

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """The event as a JSON object; values that JSON has no form for become text."""
        return to_json(_fields(self))

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event that `serialize` wrote; an event is given back as it is.

        Raises:
            ValueError: no JSON object with an event's fields.
        """
        if isinstance(data, Event):
            return data
        fields = _load(data)
        try:
            return Event(**{**fields, "source": EventSource(fields["source"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an event: {data[:200]!r} ({error!r})") from error


@dataclass
class RdzvEvent:
    """Something that happened to a node in its rendezvous."""

    name: str
    """What the node was doing, as `file:function`."""
    run_id: str
    """The job."""
    message: str
    """What happened, in words."""
    hostname: str
    """The node's host."""
    pid: int
    """The agent's process id."""
    node_state: NodeState
    """What the node is doing."""
    master_endpoint: str = ""
    """`host:port` of the store, where known."""
    rank: int | None = None
    """The node's rank in the round, where known."""
    local_id: int | None = None
    """Tells the nodes of one process apart, where there are several."""
    error_trace: str = ""
    """The traceback, where this is an error."""

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """The event as a JSON object; values that JSON has no form for become text."""
        return to_json(asdict(self))

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """The event that `serialize` wrote; an event is given back as it is.

        Raises:
            ValueError: no JSON object with an event's fields.
        """
        if isinstance(data, RdzvEvent):
            return data
        fields = _load(data)
        try:
            return RdzvEvent(**{**fields, "node_state": NodeState(fields["node_state"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a rendezvous event: {data[:200]!r} ({error!r})") from error


def _fields(event: Event) -> dict[str, Any]:
    # Not asdict: it copies the metadata deeply, which fails for locks, sockets and their like.
    return {
        "name": event.name,
        "source": event.source,
        "timestamp": event.timestamp,
        "metadata": event.metadata,
    }


def _load(data: str) -> dict[str, Any]:
    import json

    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"not an event: {data[:200]!r} is no JSON object")
    return fields
