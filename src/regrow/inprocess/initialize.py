"""Initialize plug-ins: run on a rank before each call of the wrapped function."""

from __future__ import annotations

import abc

from regrow.inprocess.ranks.assignment import whole, whole_or_none

from .exception import RestartAbort
from .state import FrozenState

__all__ = ["Initialize", "RetryController"]


class Initialize(abc.ABC):
    """Base class of `initialize` plug-ins, called on each rank at the start of an iteration.

    An `Exception` from it causes a restart, like an `Exception` of the function. Any other
    `BaseException` ends the wrapper on this rank. `Compose` chains several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Prepare the iteration (also the first one), and return `state`."""


class RetryController(Initialize):
    """Limit the restarts: end the wrapper after too many calls or with too few ranks.

    Args:
        max_iterations: how many calls of the function are allowed, including the first; None for no
            limit.
        min_world_size: how many living ranks are required, including those in reserve.
        min_active_world_size: how many ranks are required to call the function.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is negative.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        self.max_iterations = whole_or_none("max_iterations", max_iterations)
        self.min_world_size = whole("min_world_size", min_world_size)
        self.min_active_world_size = whole("min_active_world_size", min_active_world_size)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if this iteration is allowed.

        Raises:
            RestartAbort: it is not allowed; the text names each limit that is violated.
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
