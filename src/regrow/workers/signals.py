"""Signals that end the job: the exceptions that they raise, and the handlers that raise them."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any

from regrow.utils import (
    DEFAULT_SIGNALS,
    SIGNALS_ENV,
    SignalInterrupt,
    get_logger,
    split_signals,
)

if TYPE_CHECKING:
    from types import FrameType

logger = get_logger(__name__)

SENT_AGAIN_S = 0.01
"""Seconds until a signal comes again that arrived in a line in which it must not raise."""
_LOCKING = {threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__}
_HIDING = frozenset(
    {"logging", "weakref", "_weakrefset", "importlib._bootstrap", "multiprocessing.synchronize"}
)
"""Modules in which an exception is hidden, or leaves a lock held."""


class SignalException(SignalInterrupt):
    """This process received a signal that ends it; `sigval` is the signal.

    The handlers that `PContext.start` installs raise it in the main thread. The code that catches
    it closes the context with `sigval` and then ends. Under an agent, the loop raises it for a
    signal in its inbox (`signals_into`), and `SimpleElasticAgent._run` stops the workers.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class StoppedEarly(SignalException):
    """All ranks of the job stopped early at the same step (`regrow.should_stop`) and succeeded.

    To a program that handles SignalException, it is the end by SIGTERM that it would have been.

    Args:
        why: who asked the job to stop.
        return_values: the return value of each worker of this node, by global rank; empty if this
            node stood by.
    """

    def __init__(self, why: str, return_values: dict[int, Any]) -> None:
        super().__init__(f"all ranks stopped early, by {why}", signal.SIGTERM)
        self.why = why
        self.return_values = return_values


_agents = 0  # number of agents in this process that handle signals


@contextmanager
def signals_handled() -> Iterator[None]:
    """Context in which an agent handles the signals; groups of workers install no handlers."""
    global _agents
    _agents += 1
    try:
        yield
    finally:
        _agents -= 1


def install_signal_handlers(names: str | None) -> None:
    """Install signal handlers that raise `SignalException` in the main thread.

    Args:
        names: comma-separated names. None reads them from the environment, unless an agent of this
            process handles the signals. Empty installs no handler.
    """
    if names is None:
        if _agents:
            return
        names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
    known, unknown = split_signals(names)
    if unknown:
        logger.warning("ignored signals that cannot be handled: %s", ", ".join(unknown))
    if known and threading.current_thread() is not threading.main_thread():
        logger.warning(
            "no signal handlers are installed, because this is not the main thread: %s will end"
            " this process without notice to the workers, which end with it",
            ",".join(signum.name for signum in known),
        )
        return
    for signum in known:
        signal.signal(signum, _raise_signal_exception)


def _raise_signal_exception(signum: int, frame: FrameType | None) -> None:
    if raises_later(signum, frame):
        return
    sigval = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=sigval)


def raises_later(signum: int, frame: FrameType | None) -> bool:
    """Return whether a handler must not raise in this line; the signal then comes again.

    An exception between `Condition.__enter__` and the body of its `with` would leave the lock held
    for good, and all threads that need it blocked. The handlers of `logging` hide exceptions, and
    so does the interpreter for `__del__` and for callbacks of weak references.

    Args:
        signum: the signal.
        frame: what the main thread was executing.
    """
    while frame is not None:
        code = frame.f_code
        if (
            code in _LOCKING
            or code.co_name == "__del__"
            or frame.f_globals.get("__name__") in _HIDING
        ):
            # No `threading.Thread`: the main thread may hold the lock that its start takes.
            _thread.start_new_thread(_send_again, (signum,))
            return True
        frame = frame.f_back
    return False


def _send_again(signum: int) -> None:
    sleep(SENT_AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signum)
