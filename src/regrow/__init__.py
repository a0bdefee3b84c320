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


_begin_heartbeat()
