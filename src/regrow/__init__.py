"""The names a training script uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regrow._progress import step

if TYPE_CHECKING:
    from regrow.timer import expires

__version__ = "0.1.0"
__all__ = ["__version__", "expires", "step"]


def __getattr__(name: str) -> object:
    if name != "expires":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regrow.timer import expires

    globals()[name] = expires
    return expires


def _begin_heartbeat() -> None:
    """Begin to beat where `regrow run --heartbeat` has asked for it."""
    if os.environ.get("REGROW_HEARTBEAT"):
        from regrow.heartbeat._automatic import begin

        begin()


def _arm() -> None:
    """Let this process be asked where it stands, where `regrow run --timers` may do so.

    Whoever is compared with a worker that hangs need not have come to a timer of its own.
    """
    if os.environ.get("TORCHELASTIC_TIMER_FILE"):
        from regrow.timer._stacks import arm

        arm()


_begin_heartbeat()
_arm()
