"""A DistributedSampler that can start in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_T_co = TypeVar("_T_co", covariant=True)

# The type checker does not see torch here, so the generic base class is only named.
_Base: Any = DistributedSampler


class ElasticDistributedSampler(_Base):  # type: ignore[misc]
    """Each replica's share of the dataset from `start_index` on, shuffled by epoch.

    The shuffle depends only on the epoch (`set_epoch`) and on `start_index`. So all replicas of an
    attempt use the same shuffle, whatever their number. If the remaining samples do not divide
    evenly among the replicas, the last samples are repeated.

    Args:
        dataset: a dataset of constant size.
        num_replicas: the number of training processes (default: the world size).
        rank: this process's rank among the replicas (default: its rank in the group).
        start_index: the first index of the dataset to sample from.

    Raises:
        TypeError: the dataset has no length.
        ValueError: `start_index` is outside the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError("Dataset must be an instance of collections.abc.Sized")
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        if not 0 <= start_index < len(dataset):
            raise ValueError(
                f"Start index {start_index} should be less than dataset size {len(dataset)}"
            )
        self.start_index = start_index
        self._rest = len(dataset) - start_index
        self.num_samples = math.ceil(self._rest / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        order: list[int] = torch.randperm(self._rest, generator=generator).tolist()
        # If fewer samples remain than replicas, one repetition does not give each replica a sample.
        repeats = math.ceil(self.total_size / self._rest)
        padded = (order * repeats)[: self.total_size]
        return iter([self.start_index + index for index in padded[self.rank :: self.num_replicas]])

    def __len__(self) -> int:
        return int(self.num_samples)
