"""Destinations of recorded events: logging handlers by name.

To add a destination, put its handler into `_log_handlers`, as other projects do, or call
`register_logging_handler`.
"""

from __future__ import annotations

import logging

__all__ = ["get_logging_handler", "register_logging_handler"]

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
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
