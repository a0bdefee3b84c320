"""What a rank does before each call of the wrapped function, the first included."""

from __future__ import annotations

import abc

from .exception import RestartAbort
from .state import FrozenState

__all__ = ["Initialize", "RetryController"]


class Initialize(abc.ABC):
    """Base of the wrapper's `initialize`: called on each rank as an iteration begins.

    An `Exception` raised here restarts like one of the function's; any other `BaseException` ends
    the wrapper on this rank. Several are chained by `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Prepare the iteration, and return `state`."""


class RetryController(Initialize):
    """Bounds the restarts: ends the wrapper when too many were made or too few ranks are left.

    Args:
        max_iterations: calls of the function that may be made, the first included; None for no
            bound.
        min_world_size: living ranks needed, reserve included.
        min_active_world_size: ranks needed to call the function.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if this iteration may be.

        Raises:
            RestartAbort: it may not; each broken bound is named.
        """
        active = 0 if state.active_world_size is None else state.active_world_size
        broken = []
        if state.world_size < self.min_world_size:
            broken.append(f"{state.world_size=} is below {self.min_world_size=}")
        if active < self.min_active_world_size:
            broken.append(f"{state.active_world_size=} is below {self.min_active_world_size=}")
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            broken.append(f"{state.iteration=} (counted from 0) has reached {self.max_iterations=}")
        if broken:
            raise RestartAbort("no further restart: " + "; ".join(broken).replace("self.", ""))
        return state
