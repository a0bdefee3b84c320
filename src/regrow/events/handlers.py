"""Destinations of recorded events: logging handlers by name.

To add a destination, put its handler into `_log_handlers`, as other projects do, or call
`register_logging_handler`.
"""

from __future__ import annotations

import logging
import os

from regrow.utils import JsonLinesFile

__all__ = ["EVENT_FILE_ENV", "get_logging_handler", "register_logging_handler"]

EVENT_FILE_ENV = "REGROW_EVENT_FILE"
"""Environment variable with the path of the file that the handler `file` appends to."""


class EventFileHandler(logging.Handler):
    """Appends each event to the file in REGROW_EVENT_FILE, one JSON object a line.

    The handler never raises. If the variable is not set, or the disk is full, it warns once and
    drops the events.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: JsonLinesFile | None = None
        self._owner: int | None = None
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Append the event that `record` carries."""
        event = getattr(record, "event", None)
        path = os.environ.get(EVENT_FILE_ENV)
        if not path:
            if not self._warned:
                self._warned = True
                logging.getLogger(__name__).warning(
                    "events for the handler 'file' are dropped: %s does not name a file",
                    EVENT_FILE_ENV,
                )
            return
        # A forked child inherits the file and its lock, which another thread may hold at the fork.
        if self._file is None or self._file.path != path or self._owner != os.getpid():
            self._file = JsonLinesFile(path, "events")
            self._owner = os.getpid()
        from regrow.events.log import as_record

        self._file.append(as_record(event) if event is not None else {"event": record.getMessage()})


_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "file": EventFileHandler(),
    "null": logging.NullHandler(),
}


def register_logging_handler(destination: str, handler: logging.Handler) -> None:
    """Register `handler` under the name `destination`; replaces an earlier handler of that name."""
    _log_handlers[destination] = handler


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of `destination`.

    Raises:
        ValueError: there is no such handler; the text lists the known names.
    """
    try:
        return _log_handlers[destination]
    except KeyError:
        known = ", ".join(sorted(_log_handlers))
        raise ValueError(
            f"unknown event log handler {destination!r}; known handlers: {known}"
        ) from None
