"""Data loading helpers for elastic training; torch is loaded only by the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cycling_iterator import CyclingIterator

if TYPE_CHECKING:
    from ._torch_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    if name == "ElasticDistributedSampler":
        from ._torch_sampler import ElasticDistributedSampler

        return ElasticDistributedSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
