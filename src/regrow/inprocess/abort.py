"""Abort plug-ins: unblock a rank that waits for ranks which will never answer.

An abort runs in a thread of the wrapper. The main thread may be blocked in a collective meanwhile.
"""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Callable

from .state import FrozenState

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
]


class Abort(abc.ABC):
    """Base class of `abort` plug-ins, called on each rank after a fault is detected.

    The wrapper calls it in another thread. It makes the blocking calls of the main thread return,
    with or without an error. `Compose` chains several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Interrupt the calls that may block the main thread, and return `state`."""


class AbortTorchDistributed(Abort):
    """Abort the collectives of all torch.distributed process groups, and destroy the groups.

    It does nothing in a process that has not loaded torch.

    Args:
        torch_fr_trace_path: folder for a trace of the running collectives, from torch's flight
            recorder. The trace is written before the abort and needs TORCH_FR_BUFFER_SIZE. The
            default is NVRX_FR_TRACE_PATH. Without either, no trace is written.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self._trace_path = torch_fr_trace_path

    @property
    def torch_fr_trace_path(self) -> str | None:
        """Folder for the trace of torch's flight recorder; None if no trace is written."""
        return self._trace_path or os.environ.get("NVRX_FR_TRACE_PATH")

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort and destroy every process group, and return `state`."""
        if "torch" in sys.modules:
            from regrow.inprocess.torch import torch_abort

            if self.torch_fr_trace_path:
                torch_abort.write_trace(self.torch_fr_trace_path, state.iteration)
            torch_abort.abort_process_groups()
        return state

    @staticmethod
    def groups() -> list[object]:
        """Return the existing process groups, for the wrapper to hold during the abort."""
        if "torch" not in sys.modules:
            return []
        from regrow.inprocess.torch import torch_abort

        return torch_abort.process_groups()

    @staticmethod
    def waking() -> Callable[[], None]:
        """Return a function `wake`, which ends a wait of the main thread in torch.

        It wakes the main thread if that thread waits in a call of torch that is not a collective.
        The wrapper calls `waking` just before it calls the wrapped function. After an interrupt,
        another thread calls `wake` repeatedly until the wrapped function has ended.
        """
        from regrow.inprocess.torch import torch_abort

        return torch_abort.store_waking()


class AbortTransformerEngine(Abort):
    """Make Transformer Engine release its user buffers and process groups, if it is in use.

    Put it before `AbortTorchDistributed` in a `Compose`. A `Compose` calls its last part first, and
    this plug-in must run after `AbortTorchDistributed`.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroy the buffers, reset the FP8 state that refers to a group, and return `state`."""
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            engine.module.base.destroy_ub()
        fp8 = sys.modules.get("transformer_engine.pytorch.fp8")
        if fp8 is not None:
            fp8.FP8GlobalStateManager.reset()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """End the asynchronous checkpoint processes of nvidia-resiliency-ext, if there are any."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """End the checkpoint processes, and return `state`."""
        core = sys.modules.get("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        if core is not None:
            core.abort_nvrx_checkpoint()
        return state
