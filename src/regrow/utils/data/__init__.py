"""Data loading helpers for elastic training; only the sampler loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

from .cycling_iterator import CyclingIterator

if TYPE_CHECKING:
    from ._torch_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__, __dir__ = lazily(globals(), {"_torch_sampler": "ElasticDistributedSampler"})
