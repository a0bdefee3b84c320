"""What finds out whether a rank is fit to go on."""

from __future__ import annotations

import abc
import sys
from datetime import timedelta

from ._generations import both_generations
from ._timed import run_timed
from .exception import RestartError
from .state import FrozenState

__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


class HealthCheck(abc.ABC):
    """Base of the wrapper's `health_check`: called as an iteration begins, and after `finalize`.

    It looks at its own rank only: others may be gone, or still in the function. An exception says
    that the rank is not fit; the rank then leaves, and the others go on. Several are chained by
    `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if the rank is fit, else raise."""


class CudaHealthCheck(HealthCheck):
    """Has the GPU finish what it was given, and looks whether the CUDA context survived that.

    The device is that of `LOCAL_RANK` where the variable names one that the process can see, else
    the caller's current one. A process that does not use CUDA, or cannot, is fit.

    Args:
        timeout: how long the device may take in all. Kernels that were launched cannot be
            cancelled, so a program that is far ahead of its device needs a long one. 30 s is the
            default of nvidia-resiliency-ext.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if the device answered.

        Raises:
            TimeoutError: the package's: the device was not through after `timeout`.
            RuntimeError: CUDA's error; the context is of no use any more.
        """
        if "torch" in sys.modules:
            from . import _torch_cuda

            check = _torch_cuda.check_of_device()
            if check is not None:
                run_timed(check, self.timeout, f"{type(self).__name__}-{state.rank}")
        return state


class FaultCounterExceeded(RestartError):
    """This rank's own faults are more than `FaultCounter` allows."""


class FaultCounter(HealthCheck):
    """Counts the faults that this rank caused, and finds it unfit when they are too many.

    Args:
        max_rank_faults: exceptions of the wrapped function that are allowed on this rank; None for
            no bound.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Count `state.fn_exception`, and return `state`.

        Raises:
            FaultCounterExceeded: it was one too many.
        """
        if state.fn_exception is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.rank} caused {self.faults_count} faults, of which "
                    f"max_rank_faults={self.max_rank_faults} are allowed; the last one was "
                    f"{state.fn_exception!r}"
                )
        return state
