"""Completion plug-ins: run on a rank after the wrapped function has completed on all ranks."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Base class of `completion` plug-ins, called once on every rank that stayed until the end.

    The wrapper calls it after the completion barrier. An exception is logged and has no other
    effect, because the work is done. `Compose` chains several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """React to the completion, and return `state`."""
