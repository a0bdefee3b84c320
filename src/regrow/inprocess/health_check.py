"""Health-check plug-ins: decide whether a rank can continue."""

from __future__ import annotations

import abc
import sys
from datetime import timedelta

from regrow.inprocess.ranks.assignment import both_generations, duration, run_timed, whole_or_none
from regrow.utils import describe

from .exception import RestartError
from .state import FrozenState

__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


class HealthCheck(abc.ABC):
    """Base class of `health_check` plug-ins, called before each iteration and after `finalize`.

    It checks its own rank only, because other ranks may be gone or still in the function. An
    exception means that the rank is unhealthy. This rank then leaves, and the other ranks continue.
    `Compose` chains several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if the rank is healthy, else raise an exception."""


class CudaHealthCheck(HealthCheck):
    """Wait for the GPU to finish its work, and check that the CUDA context still works.

    The device is number `LOCAL_RANK`, if the process can see a device with that number. Otherwise
    it is the caller's current device. A process that does not or cannot use CUDA is healthy.

    Args:
        timeout: total time limit for the device. Kernels that were launched cannot be cancelled, so
            a program that runs far ahead of its device needs a long limit. The default, 30 s, is
            that of nvidia-resiliency-ext.

    Raises:
        TypeError: `timeout` is not a timedelta.
        ValueError: `timeout` is negative.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = duration("timeout", timeout)

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state` if the device has finished its work.

        Raises:
            TimeoutError: the device did not finish within `timeout` (the package's exception).
            RuntimeError: CUDA's error; the context is no longer usable.
        """
        if "torch" in sys.modules:
            from regrow.inprocess.torch import torch_adapter

            check = torch_adapter.check_of_device()
            if check is not None:
                run_timed(check, self.timeout, f"{type(self).__name__}-{state.rank}")
        return state


class FaultCounterExceeded(RestartError):
    """This rank caused more faults than `FaultCounter` allows."""


class FaultCounter(HealthCheck):
    """Count the faults that this rank caused, and declare it unhealthy above a limit.

    Args:
        max_rank_faults: how many exceptions of the wrapped function this rank may raise; None for
            no limit.

    Raises:
        TypeError: `max_rank_faults` is not an integer.
        ValueError: `max_rank_faults` is negative.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = whole_or_none("max_rank_faults", max_rank_faults)
        self.faults_count = 0

    @both_generations
    def __call__(self, state: FrozenState) -> FrozenState:
        """Count `state.fn_exception`, if there is one, and return `state`.

        Raises:
            FaultCounterExceeded: the count is above the limit.
        """
        if state.fn_exception is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.rank} caused {self.faults_count} faults, of which "
                    f"max_rank_faults={self.max_rank_faults} are allowed; the last one was "
                    f"{describe(state.fn_exception)}"
                )
        return state
