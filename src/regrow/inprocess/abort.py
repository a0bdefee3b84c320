"""What frees a rank that waits for others which will never answer.

An abort runs in a thread of the wrapper's while the main thread may be blocked in a collective.
"""

from __future__ import annotations

import abc
import sys

from .state import FrozenState

__all__ = ["Abort", "AbortTransformerEngine"]


class Abort(abc.ABC):
    """Base of the wrapper's `abort`: called on each rank once a fault is known, in another thread.

    It makes the main thread's blocking calls return, in error or not. Several are chained by
    `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Break off what may block the main thread, and return `state`."""


class AbortTransformerEngine(Abort):
    """Destroys the user buffers of Transformer Engine, where it is in use."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroy them, and return `state`."""
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            engine.module.base.destroy_ub()
        return state
