"""Signals: what they are called, and which of them end an agent."""

from __future__ import annotations

import signal

SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def signal_name(number: int) -> str | None:
    """Return what a signal is called, such as SIGKILL or SIGRTMIN+3; None: it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        after_first = number - signal.SIGRTMIN
        return f"SIGRTMIN+{after_first}" if 0 < after_first < 30 else None
