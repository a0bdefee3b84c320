"""What a rank does when the wrapped function has completed on all ranks."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Base of the wrapper's `completion`: called once on every rank that took part to the end.

    It is called after the completion barrier. What it raises is logged and changes nothing: the
    work is done. Several are chained by `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Act on the completion, and return `state`."""
