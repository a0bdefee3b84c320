"""Tensors of torch as ranges of bytes, and the states of torch's random number generators."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from regrow.state.arrays import Spec
from regrow.state.choice import StateError


class TorchArray:
    """A tensor; of a DTensor, the shard of this rank."""

    def __init__(self, value: Any) -> None:
        self.value = value
        local, kind = value.detach(), "torch"
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(value, distributed.DTensor):
            local, kind = value.to_local().detach(), "dtensor"
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            raise TypeError(f"a tensor of {local.layout} on {local.device} has no plain bytes")
        self._local = local
        self.spec = Spec(kind, str(local.dtype).removeprefix("torch."), tuple(local.shape))
        self.nbytes = math.prod(local.shape) * local.element_size()
        self.writable = all(
            stride or size < 2 for size, stride in zip(local.shape, local.stride(), strict=True)
        )
        self._flat: Any = None
        self._written = False

    def _bytes(self) -> Any:
        if self._flat is None:
            plain = self._local.resolve_conj().resolve_neg()
            self._flat = plain.contiguous().reshape(-1).view(torch.uint8)
        return self._flat

    def read(self, start: int, into: memoryview) -> None:
        """See `Array`."""
        if into:
            size = len(into)
            torch.frombuffer(into, dtype=torch.uint8).copy_(self._bytes()[start : start + size])

    def write(self, start: int, data: memoryview) -> None:
        """See `Array`."""
        if data:
            size, self._written = len(data), True
            self._bytes()[start : start + size].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def close(self) -> None:
        """See `Array`."""
        flat, self._flat = self._flat, None
        written, self._written = self._written, False  # after a read, the tensor stays as it is
        if written and flat.data_ptr() != self._local.data_ptr():
            self._local.copy_(flat.view(self._local.dtype).reshape(self._local.shape))


def empty(spec: Spec) -> TorchArray:
    """Return a tensor with undefined content, in host memory.

    Raises:
        StateError: this release of torch has no such dtype.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"torch {torch.__version__} has no dtype {spec.dtype!r}")
    return TorchArray(torch.empty(spec.shape, dtype=dtype))


def generator_states() -> dict[str, Any]:
    """Return the states of torch's default generators, for the CPU and for CUDA if it is in use."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Set the states of torch's default generators from `generator_states`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
