"""Bytes from one rank to another, point to point over torch's default process group.

The time-out of the process group limits each message. An abort of the group wakes both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def group_rank() -> int | None:
    """Return this process's rank in the default process group; None without such a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


class TorchTransport:
    """Transport over the default process group.

    Args:
        group_ranks: rank in the default process group, by initial rank.
    """

    def __init__(self, group_ranks: Mapping[int, int]) -> None:
        self._group_ranks = group_ranks
        backends = dist.get_backend_config()
        self._device = "cpu" if "cpu" in backends else f"cuda:{torch.cuda.current_device()}"

    def send(self, rank: int, data: memoryview) -> None:
        """See `Transport`."""
        tensor: Any = torch.frombuffer(data, dtype=torch.uint8)
        dist.send(tensor.to(self._device), self._group_ranks[rank])

    def receive(self, rank: int, into: memoryview) -> None:
        """See `Transport`."""
        here: Any = torch.frombuffer(into, dtype=torch.uint8)
        tensor = here if self._device == "cpu" else torch.empty_like(here, device=self._device)
        dist.recv(tensor, self._group_ranks[rank])
        if tensor is not here:
            here.copy_(tensor)
