"""The ranks of a job whose ranks are assigned, each in a thread, over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from regrow.inprocess import State
from regrow.inprocess._generations import assign
from regrow.inprocess.rank_assignment import RankAssignmentCtx
from regrow.inprocess.store import PrefixStore
from regrow.store import MemoryStore

PATIENCE = 30.0


class Ranks:
    """What each rank is told it is, by the initial rank.

    Args:
        size: how many there are.
        make: makes the rank assignment of an initial rank, as its process would.
    """

    def __init__(self, size: int, make: Callable[[int], Callable[..., Any]]) -> None:
        self.states = {rank: State(rank, size) for rank in range(size)}
        self.discarded: dict[int, Exception] = {}
        self.sent: dict[int, list[str]] = {}
        self._assignments = {rank: make(rank) for rank in range(size)}
        self._store = MemoryStore()
        self._round = 0

    def assign(self, lost: Iterable[int] = ()) -> None:
        """Have all but `lost`, by initial rank, find their ranks; ask those that are left."""
        gone = {self.states.pop(initial).rank for initial in lost}
        self.sent = {}
        threads = [
            threading.Thread(target=self._assign, args=(initial, gone), daemon=True)
            for initial in list(self.states)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a rank waits for ever"
        self._round += 1

    def ranks(self) -> dict[int, int | None]:
        """The ranks of the living, by initial rank."""
        return {initial: state.rank for initial, state in sorted(self.states.items())}

    def active(self) -> dict[int, int]:
        """The active ranks of those that are active, by initial rank."""
        found = {initial: state.active_rank for initial, state in sorted(self.states.items())}
        return {initial: rank for initial, rank in found.items() if rank is not None}

    def _assign(self, initial: int, gone: set[Any]) -> None:
        store = _Counting(self._round, self._store)
        ctx = RankAssignmentCtx(self.states[initial], store, set(gone))
        try:
            self.states[initial] = assign(self._assignments[initial], ctx)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            del self.states[initial]
            self.discarded[initial] = error
        self.sent[initial] = store.calls


class _Counting(PrefixStore):
    """Notes what one rank asks of the store: the method."""

    def __init__(self, prefix: int, store: MemoryStore) -> None:
        super().__init__(prefix, store)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "append", "check", "get", "multi_get", "set", "wait"):
            self.calls.append(name)
        return super().__getattribute__(name)
