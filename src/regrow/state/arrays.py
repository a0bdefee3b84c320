"""Arrays as ranges of bytes: of numpy here, of torch in `torch_arrays`.

A library is imported only if the state has an array of this library.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from regrow.state.choice import StateError

if TYPE_CHECKING:
    import numpy as np


class Spec(NamedTuple):
    """Type and size of an array."""

    kind: str
    """"numpy", "torch", or "dtensor" for the local shard of a DTensor."""
    dtype: str
    """For example "<f4" or "bfloat16" (numpy), "float32" (torch)."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {list(self.shape)}"


class Array(Protocol):
    """An array whose bytes can be read and written; `close` ends a series of either."""

    value: Any
    """The array itself."""
    spec: Spec
    nbytes: int
    writable: bool
    """False for a read-only array, and for a tensor whose elements share memory (`expand`)."""

    def read(self, start: int, into: memoryview) -> None:
        """Copy bytes from `start` on into a buffer, as many as fit there."""

    def write(self, start: int, data: memoryview) -> None:
        """Overwrite bytes from `start` on."""

    def close(self) -> None:
        """Complete the writes, and free what the reads and writes needed."""


def array_of(value: object) -> Array | None:
    """Return a value as an `Array`; None if it is none.

    Raises:
        TypeError: it is an array without plain bytes: of objects, sparse, quantized, on "meta".
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        from regrow.state.torch_arrays import TorchArray

        return TorchArray(value)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return NumpyArray(value)
    return None


def new_array(spec: Spec) -> Array:
    """Return an array with undefined content, in host memory.

    Raises:
        StateError: no such array can be made here.
    """
    if any(size < 0 for size in spec.shape):
        raise StateError(f"an array cannot have the shape {list(spec.shape)}")
    if spec.kind == "torch":
        from regrow.state.torch_arrays import empty

        return empty(spec)
    if spec.kind == "dtensor":
        raise StateError(
            "this rank has no DTensor here yet, and cannot know how it is sharded: create it "
            "before recover(); for an optimizer, call step() once with gradients of zero"
        )
    import numpy as np

    try:
        return NumpyArray(np.empty(spec.shape, np.dtype(spec.dtype)))
    except (TypeError, ValueError) as error:
        raise StateError(f"an array of {spec} cannot be made: {error}") from error


class NumpyArray:
    """An array of numpy."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.hasobject or value.dtype.names:
            raise TypeError(f"an array of dtype {value.dtype} has no plain bytes")
        self.value = value
        extension = value.dtype.isbuiltin == 2  # such as bfloat16, whose str is that of plain bytes
        self.spec = Spec("numpy", value.dtype.name if extension else value.dtype.str, value.shape)
        self.nbytes = math.prod(value.shape) * value.dtype.itemsize
        self.writable = bool(value.flags.writeable)
        self._flat: Any = None
        self._written = False

    def _bytes(self) -> Any:
        if self._flat is None:
            import numpy as np

            self._flat = np.ascontiguousarray(self.value).reshape(-1).view(np.uint8)
        return self._flat

    def read(self, start: int, into: memoryview) -> None:
        """See `Array`."""
        into[:] = self._bytes()[start : start + len(into)].data

    def write(self, start: int, data: memoryview) -> None:
        """See `Array`."""
        flat, self._written = self._bytes(), True
        flat.data[start : start + len(data)] = data

    def close(self) -> None:
        """See `Array`."""
        flat, self._flat = self._flat, None
        written, self._written = self._written, False
        if written and not self.value.flags.c_contiguous:
            self.value[...] = flat.view(self.value.dtype).reshape(self.value.shape)
