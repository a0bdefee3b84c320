"""Finalize plug-ins: clean up between the end of one iteration and the start of the next."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from regrow.inprocess.ranks.assignment import both_generations, duration, function, run_timed

from .state import FrozenState

__all__ = ["Finalize", "ThreadedFinalize"]


class Finalize(abc.ABC):
    """Base class of `finalize` plug-ins, called in the main thread after the function has ended.

    It returns the process to a state from which the function can be called again: for example, it
    resets global variables and ends asynchronous writers. It runs after the abort and before the
    health check. If it raises, this rank leaves, and the other ranks continue. `Compose` chains
    several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Clean up, and return `state`."""


class ThreadedFinalize(Finalize):
    """Call a function in a thread, and stop waiting when it exceeds a time limit.

    If CUDA is in use, the thread works on the caller's device.

    Args:
        timeout: how long the function may take.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: `timeout` is not a timedelta, or `fn` is not callable.
        ValueError: `timeout` is negative.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.timeout = duration("timeout", timeout)
        self.fn = function("fn", fn)
        self.args = args or ()
        self.kwargs = kwargs or {}

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Call the function, and return `state` when it has finished.

        Raises:
            TimeoutError: the function did not finish within `timeout` (the package's exception).
            BaseException: the exception of the function.
        """
        select = _device_of_caller()

        def call() -> None:
            select()
            self.fn(*self.args, **self.kwargs)

        run_timed(call, self.timeout, f"{type(self).__name__}-{state.rank}")
        return state


def _device_of_caller() -> Callable[[], None]:
    if "torch" not in sys.modules:  # so no device is in use
        return lambda: None
    from regrow.inprocess.torch import torch_adapter

    return torch_adapter.device_of_caller()
