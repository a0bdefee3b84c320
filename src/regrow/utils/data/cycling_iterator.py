"""Iterator over several epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import Self

__all__ = ["CyclingIterator"]

_T = TypeVar("_T")


class CyclingIterator(Iterator[_T]):
    """Iterates over `generator_fn(epoch)` for epoch = `start_epoch`, ..., `n` - 1.

    Args:
        n: the number of epochs, counted from epoch 0.
        generator_fn: returns the iterator of an epoch; called when the previous epoch has ended.
        start_epoch: the first epoch, for a training that continues from a checkpoint. This epoch is
            iterated over even if it is not below `n`.
    """

    def __init__(
        self, n: int, generator_fn: Callable[[int], Iterator[_T]], start_epoch: int = 0
    ) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._iter = generator_fn(start_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        # A loop instead of a recursion, so that a thousand consecutive empty epochs cause no error.
        while True:
            try:
                return next(self._iter)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            self._epoch += 1
            self._iter = self._generator_fn(self._epoch)
