"""What a rank tidies up between the end of one iteration and the begin of the next."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ._generations import both_generations
from ._timed import run_timed
from .state import FrozenState

__all__ = ["Finalize", "ThreadedFinalize"]


class Finalize(abc.ABC):
    """Base of the wrapper's `finalize`: called in the main thread once the function was left.

    It brings the process into a state from which the function can be called again: global
    variables, asynchronous writers. It comes after the abort and before the health check. What it
    raises ends this rank, and the others go on. Several are chained by `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Tidy up, and return `state`."""


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, and gives it up when it takes too long.

    Where CUDA is in use, the thread works on the caller's device.

    Args:
        timeout: how long the function may take.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = args or ()
        self.kwargs = kwargs or {}

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Call the function, and return `state` when it is through.

        Raises:
            TimeoutError: the package's: it was not through after `timeout`.
            BaseException: what the function raised.
        """
        select = _device_of_caller()

        def call() -> None:
            select()
            self.fn(*self.args, **self.kwargs)

        run_timed(call, self.timeout, f"{type(self).__name__}-{state.rank}")
        return state


def _device_of_caller() -> Callable[[], None]:
    if "torch" not in sys.modules:  # then there is no device in use
        return lambda: None
    from . import _torch_cuda

    return _torch_cuda.device_of_caller()
