"""What frees a rank that waits for others which will never answer.

An abort runs in a thread of the wrapper's while the main thread may be blocked in a collective.
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
    """Base of the wrapper's `abort`: called on each rank once a fault is known, in another thread.

    It makes the main thread's blocking calls return, in error or not. Several are chained by
    `Compose`.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Break off what may block the main thread, and return `state`."""


class AbortTorchDistributed(Abort):
    """Aborts the collectives of all process groups of torch.distributed, and destroys the groups.

    A process that has not loaded torch has none.

    Args:
        torch_fr_trace_path: a folder to which the collectives under way are written first, as
            torch's flight recorder has them (TORCH_FR_BUFFER_SIZE has to be set); default
            NVRX_FR_TRACE_PATH, else they are not written.
    """

    torch_fr_trace_path: str | None = None

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path or os.environ.get("NVRX_FR_TRACE_PATH")

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort and destroy every process group, and return `state`."""
        if "torch" in sys.modules:
            from . import _torch_abort

            if self.torch_fr_trace_path:
                from . import _torch_trace

                _torch_trace.write_trace(self.torch_fr_trace_path, state.iteration)
            _torch_abort.abort_process_groups()
        return state

    @staticmethod
    def groups() -> list[object]:
        """Return the process groups that there are, for the wrapper to hold over the abort."""
        if "torch" not in sys.modules:
            return []
        from . import _torch_abort

        return _torch_abort.process_groups()

    def waking(self, state: FrozenState) -> Callable[[], None]:
        """Return what wakes the calling thread where it waits in torch, but not in a collective.

        It is asked for when the function is about to be called, and called, by another thread,
        again and again until the function was left.
        """
        from . import _torch_waits

        return _torch_waits.waking(state.initial_world_size or state.world_size)


class AbortTransformerEngine(Abort):
    """Has Transformer Engine, where it is in use, let go of user buffers and process groups.

    It comes after `AbortTorchDistributed`, so before it in a `Compose`.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroy the buffers, reset the state of FP8 that has a group, and return `state`."""
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            engine.module.base.destroy_ub()
        fp8 = sys.modules.get("transformer_engine.pytorch.fp8")
        if fp8 is not None:
            fp8.FP8GlobalStateManager.reset()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the processes of nvidia-resiliency-ext's asynchronous checkpoints, if any."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """End them, and return `state`."""
        core = sys.modules.get("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        if core is not None:
            core.abort_nvrx_checkpoint()
        return state
