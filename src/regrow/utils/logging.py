"""Loggers with a level from the environment variable LOGLEVEL."""

from __future__ import annotations

import logging
import os
import sys

from regrow.utils.user_text import describe

__all__ = ["get_log_level", "get_logger", "guard", "level_from_env", "library_logger", "quieten"]

_quiet: tuple[str, ...] = ()
"""Name prefixes of loggers that write errors only."""


class _GuardedLogger(logging.Logger):
    """A logger that hides exceptions of the user's handlers and filters from its caller."""

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except Exception as error:  # noqa: BLE001 - written to stderr, with the lost line
            _complain(record, error)


def level_from_env(default: str) -> int:
    """Return the level that LOGLEVEL names (any case, or a number), else the level `default`.

    If LOGLEVEL names no level, the root logger warns and the variable counts as not set. A misspelt
    variable must not end a training job.
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


def get_log_level() -> str:
    """Return the name of the level that loggers have if LOGLEVEL is not set."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger `name` (default: the calling module's name), at LOGLEVEL or WARNING.

    If a handler raises, only the line is lost, and the calling module continues; see `guard`.
    """
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__")
    logger = logging.getLogger(name)
    _set_level(logger)
    return guard(logger) if logger.name.startswith("regrow.") else logger


def library_logger(name: str) -> logging.Logger:
    """Return the logger `name`, at LOGLEVEL if set, else at the level of its parent loggers.

    So the user's log handlers receive its lines, and a program without handlers shows warnings on
    stderr. If a handler raises, only the line is lost; see `guard`.
    """
    logger = guard(logging.getLogger(name))
    if os.environ.get("LOGLEVEL"):
        logger.setLevel(level_from_env("WARNING"))
    return logger


def quieten(names: tuple[str, ...]) -> None:
    """Make some of regrow's loggers write errors only; all others keep the level from LOGLEVEL.

    Args:
        names: prefixes of the logger names; empty: none. If LOGLEVEL is set, no logger is quiet.
    """
    global _quiet
    before, _quiet = _quiet, names
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.startswith((*before, *names)):
            _set_level(logger)


def _set_level(logger: logging.Logger) -> None:
    is_quiet = logger.name.startswith(_quiet) and not os.environ.get("LOGLEVEL", "").strip()
    logger.setLevel(logging.ERROR if is_quiet else level_from_env(get_log_level()))


def guard(logger: logging.Logger) -> logging.Logger:
    """Return the logger, protected from exceptions of its handlers and filters.

    An exception is written to stderr with the lost line, and the caller continues.
    """
    if type(logger) is logging.Logger:
        logger.__class__ = _GuardedLogger
    return logger


def _complain(record: logging.LogRecord, error: Exception) -> None:
    try:
        line = record.getMessage()
    except Exception:  # noqa: BLE001 - an argument of the user's
        line = str(record.msg)
    try:
        sys.stderr.write(
            f"regrow: a log handler raises {describe(error)}; the line that it lost:"
            f" {record.levelname} {record.name}: {line}\n"
        )
    except Exception:  # noqa: BLE001 - there is no stderr that takes it
        return
