"""Plug-ins that are called without a wrapper, over stores of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from regrow.inprocess import Compose, FrozenState, Mode, State
from regrow.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded
from regrow.inprocess.rank_assignment import (
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    Layer,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
)
from regrow.store import MemoryStore, PrefixStore

LONG = timedelta(seconds=30)


class Slotted:
    """A c10d store that takes no attribute and cannot append, as the FileStore of torch."""

    __slots__ = ("__weakref__", "_store")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def append(self, key: str, value: str) -> None:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def plain(store: MemoryStore) -> PrefixStore:
    return PrefixStore("all", store)


Make = Callable[[MemoryStore], Any]
STORES: tuple[Make, ...] = (Slotted, plain)


def on_ranks(ranks: list[int], act: Callable[[int], Any]) -> list[Any]:
    """Call a function on all these ranks at once; return the results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


def state_of(rank: int, store: Any, size: int = 8) -> State:
    state = State(rank, size)
    state.store = store
    return state


@pytest.mark.parametrize("make", STORES)
def test_a_filter_of_groups_is_called_as_in_the_first_generation(make: Make) -> None:
    shared, terminated = MemoryStore(), {1, 4, 5, 6}

    def act(rank: int) -> Any:
        two: Any = FilterGroupedByKey(
            lambda rank, _: str(rank // 2), lambda count: count == 2, LONG
        )
        return two(state_of(rank, make(shared)), terminated)[1]

    assert on_ranks([0, 2, 3, 7], act) == [{0, 1, 4, 5, 6, 7}] * 4
    assert terminated == {1, 4, 5, 6}


@pytest.mark.parametrize("make", STORES)
def test_a_chain_of_assignments_is_called_with_a_context(make: Make) -> None:
    shared = MemoryStore()
    chain = Compose(
        ShiftRanks(),
        FilterCountGroupedByKey(
            lambda state: str((state.rank or 0) // 2), lambda count: count == 2, LONG
        ),
    )

    def act(rank: int) -> Any:
        try:
            ctx = chain(RankAssignmentCtx(State(rank, 8), make(shared), {1, 6}))
        except RankDiscarded:
            return None
        return ctx.state.rank, ctx.state.world_size, ctx.terminated_ranks

    expected: list[Any] = [None, (0, 4, set()), (1, 4, set()), (2, 4, set()), (3, 4, set()), None]
    assert on_ranks([0, 2, 3, 4, 5, 7], act) == expected


@pytest.mark.parametrize("make", STORES)
def test_a_tree_is_called_with_a_context(make: Make) -> None:
    shared = MemoryStore()
    layers = [
        Layer(key_or_fn="job"),
        Layer(max_ranks=1, key_or_fn=lambda state: str((state.rank or 0) % 2)),
    ]

    def act(rank: int) -> Any:
        return Tree(layers)(RankAssignmentCtx(State(rank, 4), make(shared), set())).state

    with pytest.warns(UserWarning, match="not in the order of the tree"):
        states = on_ranks([0, 1, 2, 3], act)
    assert [state.active_rank for state in states] == [0, 1, None, None]
    assert [state.mode for state in states] == [Mode.ACTIVE] * 2 + [Mode.INACTIVE] * 2


def test_a_filter_may_be_used_again_over_the_same_store() -> None:
    shared = MemoryStore()

    def act(rank: int) -> Any:
        found, store = [], Slotted(shared)
        for size in (2, 4):
            ctx = RankAssignmentCtx(State(rank, 4), store, set())
            check = FilterCountGroupedByKey("all", size.__eq__, LONG)
            found.append(check(ctx).terminated_ranks)
        return found

    assert on_ranks([0, 1, 2, 3], act) == [[{0, 1, 2, 3}, set()]] * 4


@pytest.mark.parametrize("state", [State(0, 1), State(0, 1).freeze(), None])
def test_health_checks_are_called_as_in_both_generations(state: Any) -> None:
    error = ValueError("x")
    check: Any = CudaHealthCheck()
    counter: Any = FaultCounter(1)
    assert check(state, None) == (state, None)
    assert counter(state, error)[1] is error
    with pytest.raises(FaultCounterExceeded):
        counter(state, error)


def test_a_chain_of_health_checks_is_called_with_a_state() -> None:
    given = FrozenState(0, 1, fn_exception=ValueError("x"))
    counter = FaultCounter()
    assert Compose(counter, CudaHealthCheck())(given) is given
    assert counter.faults_count == 1


def test_a_layer_can_be_changed() -> None:
    layer = Layer()
    layer.min_ranks = 4
    assert layer == Layer(min_ranks=4)
