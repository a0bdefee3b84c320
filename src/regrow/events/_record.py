"""Recording of single events through the handlers that users choose by name."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from regrow.utils.logging import level_from_env

from . import handlers
from ._types import NodeState, RdzvEvent

if TYPE_CHECKING:
    from ._types import Event

__all__ = ["construct_and_record_rdzv_event", "record", "record_rdzv_event"]


def record(event: Event, destination: str = "null") -> None:
    """Send `event` to the handler known as `destination`.

    Raises:
        ValueError: there is no such handler; the text names the known ones.
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
    """Record what happens to a node in its rendezvous; costs nothing where nobody listens.

    The arguments are the fields of `RdzvEvent`. `hostname` and `pid` default to this
    process's, `name` to the calling function's; a FAILED node's event takes the traceback of
    the exception that is being handled.
    """
    # Looked up on the module, where users replace it.
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
    # A logger of its own that no other logger hears, so that an event is written once.
    logger = logging.getLogger(f"torchelastic-events-{destination}")
    if logger.handlers != [handler]:
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if destination == "file" else level_from_env("INFO"))
    logger.info("%s", event, extra={"event": event})
