"""What a rank does when it leaves the wrapper for good without having completed."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Base of the wrapper's `terminate`: called once on a rank that is about to leave.

    The rank has been counted out by then. What ended it is raised afterwards; if this raises an
    exception, that one is, with what ended the rank for its cause. Several are chained by
    `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Act on the end of this rank, and return `state`."""
