"""torch's FileStore, with what the wrapper's users expect of a store."""

from __future__ import annotations

import torch.distributed as dist

from .store import StoreMixin


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[misc] # torch is not followed by mypy
    """A store in one file, which all ranks see.

    Args:
        file_name: its path; a fresh one for each job.
        world_size: how many use it; the last one to close it deletes it. Default: it stays.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__(file_name, world_size)
