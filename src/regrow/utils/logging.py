"""Loggers whose level the environment variable LOGLEVEL sets."""

from __future__ import annotations

import logging
import os
import sys

from .log_level import get_log_level

__all__ = ["get_logger", "level_from_env"]


def level_from_env(default: str) -> int:
    """The level that LOGLEVEL names (any case, or a number), else that of the name `default`.

    A LOGLEVEL that names no level is reported by a warning of the root logger and counts
    as not set: a misspelt variable may not take a training job down.
    """
    text = os.environ.get("LOGLEVEL", "").strip()
    levels = logging.getLevelNamesMapping()
    if not text:
        return levels[default]
    if text.upper() in levels:
        return levels[text.upper()]
    if text.isdecimal():
        return int(text)
    logging.getLogger().warning(
        "LOGLEVEL=%r names no level; using %s (known: %s)", text, default, ", ".join(levels)
    )
    return levels[default]


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger `name` (default: the calling module's name), at LOGLEVEL or WARNING."""
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__")
    logger = logging.getLogger(name)
    logger.setLevel(level_from_env(get_log_level()))
    return logger
