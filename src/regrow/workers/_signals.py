"""Signals that end the agent, raised as an exception where its main thread is."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from regrow.utils import get_logger
from regrow.utils._signals import DEFAULT_SIGNALS, SIGNALS_ENV

if TYPE_CHECKING:
    from types import FrameType

logger = get_logger(__name__)


class SignalException(Exception):
    """This process got a signal that ends it; `sigval` is which.

    Raised in the main thread by the handlers that `PContext.start` installs. Whoever catches it
    closes the context with `sigval` and then ends.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def install_signal_handlers(names: str | None) -> None:
    """Let signals raise `SignalException` in the main thread.

    Args:
        names: comma-separated; None takes them from the environment; empty installs none.
    """
    if names is None:
        names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted and threading.current_thread() is not threading.main_thread():
        logger.warning(
            "no signal handlers are installed, as this is not the main thread: %s will end this"
            " process without notice to the workers (which do not outlive it)",
            ",".join(wanted),
        )
        return
    for name in wanted:
        try:
            signal.signal(signal.Signals[name], _raise_signal_exception)
        except (KeyError, OSError, ValueError) as error:
            logger.warning("no signal handler can be installed for %r: %s", name, error)


def _raise_signal_exception(signum: int, frame: FrameType | None) -> None:
    sigval = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=sigval)
