"""Parts that load torch: the CUDA device of this rank, and torch's FileStore.

Work in another thread must run on this device. No function here initializes CUDA, because a
process that has not used CUDA has no context that could be broken. A machine without GPUs counts
as healthy.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from regrow.inprocess.store import StoreMixin


def device_of_caller() -> Callable[[], None]:
    """Return a function that selects this thread's CUDA device in the thread that calls it."""
    device = _device()
    return (lambda: None) if device is None else (lambda: torch.cuda.set_device(device))


def check_of_device() -> Callable[[], None] | None:
    """Return a function that checks the device in use; None if no device is in use.

    If the device is broken, the function raises, or never returns. It synchronizes twice. The first
    synchronization waits for the kernels that were launched, and each kernel may still break the
    context. The second one shows whether a kernel did.
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
    # A worker with a single visible device sees it as number 0, for every local rank.
    if local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return int(local_rank)
    return int(torch.cuda.current_device())


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[misc] # torch is not followed by mypy
    """Store in one file that all ranks can access.

    Args:
        file_name: path of the file; use a new file for each job.
        world_size: number of users; the last user that closes the store deletes the file. By
            default the file stays.
    """
