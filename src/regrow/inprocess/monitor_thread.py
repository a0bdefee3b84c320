"""What interrupts the wrapped function, where nvidia-resiliency-ext has it."""

from __future__ import annotations

from ._spared import RankShouldRestart

__all__ = ["RankShouldRestart"]
