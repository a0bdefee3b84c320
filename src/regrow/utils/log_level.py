"""The level loggers start with where LOGLEVEL says nothing."""

from __future__ import annotations

__all__ = ["get_log_level"]


def get_log_level() -> str:
    """The default log level's name."""
    return "WARNING"
