"""Loggers with a level from the environment variable LOGLEVEL."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from regrow.utils.process import SignalInterrupt
from regrow.utils.stamps import stamped
from regrow.utils.user_text import describe

__all__ = ["get_log_level", "get_logger", "guard", "level_from_env", "library_logger", "quieten"]

_quiet: tuple[str, ...] = ()
"""Name prefixes of loggers that write errors only."""


class _Guarded(logging.Logger):
    """A logger that hides exceptions of the user's logging from its caller.

    They come from handlers, filters, the factory of the records, or the user's class of loggers.
    A SystemExit ends the program if it is raised in the main thread. In another thread it would
    only end that thread, so it is hidden there, too.
    """

    def _log(self, level: int, msg: object, args: Any, *more: Any, **options: Any) -> None:
        # This frame is between the caller and the code that looks for the caller's line.
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        try:
            super()._log(level, msg, args, *more, **options)
        except SignalInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 - written to stderr, with the lost line
            _complain(self.name, level, msg, args, error)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                raise
            _complain(self.name, level, msg, args, error)


@cache
def _guarded(logger_class: type[logging.Logger]) -> type[logging.Logger]:
    return type(f"Guarded{logger_class.__name__}", (_Guarded, logger_class), {})


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


class OwnLines(logging.Formatter):
    """Formats lines on stderr of a program that has configured no logging: those of regrow.

    They have the time of day and regrow's name at their start. Other lines stay as they are.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = super().format(record)
        if not record.name.startswith("regrow."):
            return text
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} regrow: {text}"


class StampedFormatter(logging.Formatter):
    """Formats the lines on stderr of `regrow run`, if no logging is configured there."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, with the time; a line of regrow has its name."""
        text = super().format(record)
        return stamped(f"regrow: {text}" if record.name.startswith("regrow.") else text)


@contextmanager
def stamped_lines() -> Iterator[None]:
    """Context in which all lines of loggers without a handler have the time at their start."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    before = handler.formatter
    handler.setFormatter(StampedFormatter())
    try:
        yield
    finally:
        handler.setFormatter(before)


def guard(logger: logging.Logger) -> logging.Logger:
    """Return the logger, protected from exceptions of the user's logging.

    An exception is written to stderr with the lost line, and the caller continues. Without a
    handler of the user, regrow's lines have the time (`OwnLines`).
    """
    last = logging.lastResort
    if last is not None and last.formatter is None:
        last.setFormatter(OwnLines())
    if not isinstance(logger, _Guarded):
        with suppress(TypeError):  # a class of loggers with __slots__ keeps its loggers
            logger.__class__ = _guarded(type(logger))  # type: ignore[arg-type]
    return logger


def _complain(name: str, level: int, msg: object, args: Any, error: BaseException) -> None:
    try:
        line = str(msg) % args if args else str(msg)
    except Exception:  # noqa: BLE001 - an argument of the user's
        line = str(msg)
    try:
        sys.stderr.write(
            f"regrow: a log handler raises {describe(error)}; the line that it lost:"
            f" {logging.getLevelName(level)} {name}: {line}\n"
        )
    except Exception:  # noqa: BLE001 - there is no stderr that takes it
        return
