"""Mappings and sets that never change, of which thousands of versions are made in a row.

The state of the rounds is a value: each node that comes makes a new one. If each were a copy of
the last, N nodes that come would cost N squared. What happens to these parts of the state is
nearly always the same, though: one is added at the end, or one is taken out of what there was at
the beginning. So all versions of a mapping share one dict, and each knows how many entries of it
are its own; who adds to the latest version adds to that dict, and whoever adds to an older one
copies it, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import TypeVar

V = TypeVar("V")


class Growing(Mapping[str, V]):
    """A mapping in order of arrival.

    Args:
        entries: what is in it.
    """

    __slots__ = ("_shared", "_size")

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        self._shared = {k: (i, v) for i, (k, v) in enumerate((entries or {}).items())}
        self._size = len(self._shared)

    def plus(self, key: str, value: V) -> Growing[V]:
        """Return a mapping with one entry more, at the end; the key must be new."""
        grown: Growing[V] = Growing.__new__(Growing)
        grown._shared = self._shared
        if len(self._shared) != self._size:
            grown._shared = dict(islice(self._shared.items(), self._size))
        grown._shared[key] = (self._size, value)
        grown._size = self._size + 1
        return grown

    def __getitem__(self, key: str) -> V:
        index, value = self._shared[key]
        if index >= self._size:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        entry = self._shared.get(key)  # type: ignore[call-overload]
        return entry is not None and entry[0] < self._size

    def __iter__(self) -> Iterator[str]:
        # A copy: while it is looked at, the dict may grow.
        return iter(tuple(islice(self._shared, self._size)))

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return repr(dict(self))


class Dwindling(Set[str]):
    """A set from which one after the other is taken.

    Args:
        first: what was in it at first; it must not change.
    """

    __slots__ = ("_first", "_taken")

    def __init__(self, first: Collection[str]) -> None:
        self._first = first
        self._taken: Growing[None] = Growing()

    def __sub__(self, other: Iterable[object]) -> Dwindling:
        left = Dwindling(self._first)
        left._taken = self._taken
        for id in other:
            if id in left and isinstance(id, str):
                left._taken = left._taken.plus(id, None)
        return left

    def __contains__(self, id: object) -> bool:
        return id in self._first and id not in self._taken

    def __iter__(self) -> Iterator[str]:
        return (id for id in self._first if id not in self._taken)

    def __len__(self) -> int:
        return len(self._first) - len(self._taken)

    def __repr__(self) -> str:
        return repr(set(self))

    @classmethod
    def _from_iterable(cls, it: Iterable[str]) -> frozenset[str]:  # type: ignore[override]
        return frozenset(it)
