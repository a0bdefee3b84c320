"""Where the package's log goes while a wrapper runs, and how exceptions are shown in it.

Training scripts attach files to loggers above ours, often one for all ranks. What a wrapper logs of
a restart is for the stream of its own process: while one runs, the package's logger has the stream
handlers of the nearest logger above that has some, and hands nothing up. Where there are none,
warnings still go to stderr, as `logging` does by itself for a program that set up nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["describe", "own_log"]

_PACKAGE = __name__.rpartition(".")[0]


@contextmanager
def own_log(name: str = _PACKAGE) -> Iterator[logging.Logger]:
    """Have the logger `name` write to streams only; on leaving it is as it was."""
    logger = logging.getLogger(name)
    propagate, handlers = logger.propagate, _streams_above(logger)
    for handler in handlers:
        logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)


def describe(exception: BaseException) -> str:
    """An exception in one line, with what it was raised from: `KeyError(3) <- ValueError('x')`."""
    chain = []
    link: BaseException | None = exception
    while link is not None and link not in chain:  # an exception may be its own cause's cause
        chain.append(link)
        link = link.__cause__
    return " <- ".join(map(repr, chain))


def _streams_above(logger: logging.Logger) -> list[logging.Handler]:
    above = logger.parent
    while above is not None:
        # A FileHandler is a StreamHandler, too.
        streams = [handler for handler in above.handlers if type(handler) is logging.StreamHandler]
        if streams:
            return [handler for handler in streams if handler not in logger.handlers]
        above = above.parent
    return []
