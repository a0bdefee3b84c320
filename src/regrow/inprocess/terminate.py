"""Terminate plug-ins: run on a rank that leaves the wrapper for good without completing."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Base class of `terminate` plug-ins, called once on a rank that is about to leave.

    The other ranks already continue without this rank. Afterwards the wrapper raises the exception
    that ended the rank. If the plug-in raises an exception, the wrapper raises that one instead,
    with the first as its cause. `Compose` chains several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """React to the end of this rank, and return `state`."""
