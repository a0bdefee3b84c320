"""What interrupts the wrapped function, where nvidia-resiliency-ext has it."""

from __future__ import annotations

from ._interrupt import RankShouldRestart

__all__ = ["RankShouldRestart"]
