"""The ranks of a job with rank assignment, each in a thread, over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from regrow.inprocess import State
from regrow.inprocess.rank_assignment import RankAssignmentCtx
from regrow.inprocess.ranks.assignment import assign
from regrow.inprocess.store import PrefixStore
from regrow.store import MemoryStore

PATIENCE = 30.0


class Ranks:
    """The state of each rank after each assignment, by its initial rank.

    Args:
        size: number of ranks.
        make: creates the rank assignment of an initial rank, as its process would.
    """

    def __init__(self, size: int, make: Callable[[int], Callable[..., Any]]) -> None:
        self.states = {rank: State(rank, size) for rank in range(size)}
        self.discarded: dict[int, Exception] = {}
        self.sent: dict[int, list[str]] = {}
        self._assignments = {rank: make(rank) for rank in range(size)}
        self._store = MemoryStore()
        self._round = 0

    def assign(self, lost: Iterable[int] = ()) -> None:
        """Remove the initial ranks in `lost`, and run the assignment of all other ranks."""
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
            assert not thread.is_alive(), "a rank waits forever"
        self._round += 1

    def ranks(self) -> dict[int, int | None]:
        """Return the ranks of the remaining processes, by initial rank."""
        return {initial: state.rank for initial, state in sorted(self.states.items())}

    def active(self) -> dict[int, int]:
        """Return the active ranks of active processes, by initial rank."""
        found = {initial: state.active_rank for initial, state in sorted(self.states.items())}
        return {initial: rank for initial, rank in found.items() if rank is not None}

    def _assign(self, initial: int, gone: set[Any]) -> None:
        store = _Counting(self._round, self._store)
        ctx = RankAssignmentCtx(self.states[initial], store, set(gone))
        try:
            self.states[initial] = assign(self._assignments[initial], ctx)
        except Exception as error:  # noqa: BLE001 - the test checks it
            del self.states[initial]
            self.discarded[initial] = error
        self.sent[initial] = store.calls


class _Counting(PrefixStore):
    """Records the methods that one rank calls on the store."""

    def __init__(self, prefix: int, store: MemoryStore) -> None:
        super().__init__(prefix, store)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "append", "check", "get", "multi_get", "set", "wait"):
            self.calls.append(name)
        return super().__getattribute__(name)
