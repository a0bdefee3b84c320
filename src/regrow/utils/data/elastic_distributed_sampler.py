"""The sampler under torch's module name; importing this loads torch."""

from __future__ import annotations

from ._torch_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
