"""The event types under torch's module name."""

from __future__ import annotations

from ._types import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
