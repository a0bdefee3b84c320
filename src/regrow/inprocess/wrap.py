"""The wrapper, where nvidia-resiliency-ext has it."""

from __future__ import annotations

from ._call import CallWrapper
from ._wrapper import Wrapper

__all__ = ["CallWrapper", "Wrapper"]
