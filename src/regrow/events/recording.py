"""Events, and their recording through handlers that users choose by name, as in torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Self, TypeAlias

from regrow.events import handlers
from regrow.utils import to_json
from regrow.utils.logging import guard, level_from_env

EventMetadataValue: TypeAlias = Any
"""str, int, float, bool, None, or lists and dicts of these; other values are written as text."""


class EventSource(str, Enum):  # noqa: UP042 - its text is "EventSource.AGENT", as in torch
    """The component that reports an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042 - as above
    """State of a node in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _Serializable:
    """Conversion of an event to JSON and back; `_ENUMS` names the fields that are enums."""

    _ENUMS: ClassVar[Mapping[str, type[Enum]]]

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Serialize the event as a JSON object; values that JSON cannot express become text."""
        # Not asdict: its deep copy of the metadata fails for locks, sockets and similar objects.
        return to_json(vars(self))

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """Deserialize the output of `serialize`; an event is returned unchanged.

        Raises:
            ValueError: `data` is no JSON object with an event's fields.
        """
        if isinstance(data, cls):
            return data
        import json

        text = str(data)
        fields = json.loads(text)
        try:
            enums = {name: enum(fields[name]) for name, enum in cls._ENUMS.items()}
            return cls(**{**fields, **enums})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a serialized event ({error!r}): {text[:200]!r}") from error


@dataclass
class Event(_Serializable):
    """Something that happened in a job."""

    _ENUMS: ClassVar = {"source": EventSource}

    name: str
    """Dotted name of the event, for example `regrow.worker.failed`."""
    source: EventSource
    """The component that reports the event."""
    timestamp: int = 0
    """Wall time in milliseconds since the epoch; 0 means the time of writing."""
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)
    """All other details of the event."""


@dataclass
class RdzvEvent(_Serializable):
    """Something that happened to a node in its rendezvous."""

    _ENUMS: ClassVar = {"node_state": NodeState}

    name: str
    """The node's operation, as `file:function`."""
    run_id: str
    """Id of the job."""
    message: str
    """What happened, in words."""
    hostname: str
    """The node's host."""
    pid: int
    """The agent's process id."""
    node_state: NodeState
    """State of the node."""
    master_endpoint: str = ""
    """`host:port` of the store, if known."""
    rank: int | None = None
    """The node's rank in the round, if known."""
    local_id: int | None = None
    """Distinguishes several nodes in one process."""
    error_trace: str = ""
    """The traceback, if the event is an error."""


def record(event: Event, destination: str = "null") -> None:
    """Send `event` to the handler of `destination`.

    If the handler raises, the error is written to stderr and the caller continues.

    Raises:
        ValueError: there is no such handler; the text lists the known names.
    """
    _send(event, destination)


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send `event` to the handler for rendezvous events (`dynamic_rendezvous`)."""
    _send(event, "dynamic_rendezvous")


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Record an event of a node in its rendezvous; free if no handler is registered.

    The arguments are the fields of `RdzvEvent`. `hostname` and `pid` default to those of this
    process, and `name` to the calling function. The event of a FAILED node contains the traceback
    of the exception that is being handled.
    """
    # The handler is looked up on the module, because users replace it there.
    if isinstance(handlers.get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    import sys

    caller = sys._getframe(1).f_code
    trace = ""
    if node_state == NodeState.FAILED and sys.exc_info()[0] is not None:
        import traceback

        trace = traceback.format_exc()
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=trace,
        )
    )


def _send(event: Event | RdzvEvent, destination: str) -> None:
    handler = handlers.get_logging_handler(destination)
    if isinstance(handler, logging.NullHandler):
        return
    # A separate logger that does not propagate, so that an event is written once.
    logger = guard(logging.getLogger(f"torchelastic-events-{destination}"))
    if logger.handlers != [handler]:
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if destination == "file" else level_from_env("INFO"))
    logger.info("%s", event, extra={"event": event})
