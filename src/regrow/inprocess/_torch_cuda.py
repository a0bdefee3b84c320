"""The CUDA device of this rank: where work in another thread belongs, and whether it is alive.

Nothing here initializes CUDA: a process that has not used it has no context that could be broken,
and a machine without GPUs is as healthy as it gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

__all__ = ["check_of_device", "device_of_caller"]


def device_of_caller() -> Callable[[], None]:
    """A function that has the thread that calls it work on the present thread's device."""
    device = _device()
    return (lambda: None) if device is None else (lambda: torch.cuda.set_device(device))


def check_of_device() -> Callable[[], None] | None:
    """A function that raises, or never returns, if the device is broken; None if none is in use.

    The first synchronization waits for the kernels that were launched, any of which may yet ruin
    the context; the second tells whether one did.
    """
    device = _device()
    if device is None:
        return None

    def check() -> None:
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)

    return check


def _device() -> int | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    # A worker that was given one device sees it as number 0, whatever its local rank.
    if local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return int(local_rank)
    return int(torch.cuda.current_device())
