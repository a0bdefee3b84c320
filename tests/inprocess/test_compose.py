"""Plug-ins of both generations: alone, in chains, and mixed."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest

from regrow.inprocess import Compose, FrozenState, Mode, State, Status
from regrow.inprocess.abort import Abort
from regrow.inprocess.exception import RestartError
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.health_check import FaultCounter, FaultCounterExceeded, HealthCheck
from regrow.inprocess.initialize import Initialize
from regrow.inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
)
from regrow.inprocess.rank_filter import RankFilter
from regrow.inprocess.ranks.assignment import assign, call_plugin

ERROR = ValueError("the function's")


def frozen(error: Exception | None = ERROR, store: object = None) -> FrozenState:
    state = State(2, 4, fn_exception=error)
    state.store = store
    return state.freeze()


class Noting:
    """Records the arguments of its calls."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []


class NewCheck(Noting, HealthCheck):
    def __call__(self, state: FrozenState) -> FrozenState:
        self.given.append((state,))
        return state


class OldCheck(Noting, HealthCheck):
    def __call__(  # type: ignore[override]
        self, state: FrozenState, train_ex: Exception | None = None
    ) -> tuple[FrozenState, Exception | None]:
        self.given.append((state, train_ex))
        return state, train_ex


class OldCheckThatReturnsNothing(Noting, HealthCheck):
    def __call__(self, state: FrozenState, train_ex: Exception | None) -> None:  # type: ignore[override]
        self.given.append((state, train_ex))


class OldCheckWithAnOption(OldCheck):
    def __call__(  # type: ignore[override]
        self, state: FrozenState, train_ex: Exception | None, verbose: bool = False
    ) -> tuple[FrozenState, Exception | None]:
        return super().__call__(state, train_ex)


class OldAssignment(Noting, RankAssignment):
    """Drops the last rank, in place, as the first generation's assignments worked."""

    def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:  # type: ignore[override]
        self.given.append((replace(state), set(terminated), state.store))
        state.world_size -= 1
        return state, set()


class OldFilter(RankFilter):
    def __call__(self, state: State) -> State:
        assert state.rank is not None
        state.status = Status.ACTIVE if state.rank < 2 else Status.INACTIVE
        state.active_world_size = 2
        return state


# ------------------------------------------------------------------ composition


def test_the_last_one_runs_first() -> None:
    assert Compose(lambda x: x + 1, lambda x: x * 2)(5) == 11


def test_several_values_are_passed_along_as_arguments() -> None:
    assert Compose(lambda x, y: x - y, lambda x, y: (y, x))(1, 10) == 9


def test_functions_without_arguments_are_called_one_after_the_other() -> None:
    called: list[int] = []
    assert Compose(lambda: called.append(1), lambda: called.append(2))() is None
    assert called == [2, 1]
    assert Compose(lambda: 7)() == 7


def test_none_is_passed_on_like_any_value_but_warned_of_where_it_comes_from_nothing() -> None:
    assert Compose(lambda x: x, lambda x: x)(None) is None
    with pytest.warns(UserWarning, match="returned nothing; None is passed on"):
        assert Compose(lambda x: [x], lambda x: None)(1) == [None]


def test_a_chain_is_what_its_parts_have_in_common() -> None:
    def is_a(kind: type, *parts: Any) -> bool:
        return isinstance(Compose(*parts), kind)

    assert is_a(HealthCheck, FaultCounter(1), NewCheck())
    assert is_a(Compose, FaultCounter(1), NewCheck())
    assert not is_a(FaultCounter, FaultCounter(1), NewCheck())
    assert not is_a(HealthCheck, NewCheck(), ShiftRanks())
    assert is_a(FaultCounter, FaultCounter(1), FaultCounter(2))


def test_chains_are_chained() -> None:
    inner = Compose(MaxActiveWorldSize(3), ShiftRanks())
    for chain in (Compose(inner, inner), Compose(inner, ShiftRanks()), Compose(inner)):
        assert isinstance(chain, RankAssignment)
    assert Compose(Compose(str), Compose(abs, Compose(int)))("-3") == "3"


def test_a_chain_is_copied_with_its_parts() -> None:
    chain = Compose(FaultCounter(1), NewCheck())
    copied = copy.deepcopy(chain)
    assert type(copied) is type(chain)
    assert list(map(type, copied.instances)) == list(map(type, chain.instances))
    assert copied.instances[0] is not chain.instances[0]


def test_a_chain_shows_its_parts() -> None:
    assert repr(Compose(Compose(str), abs)) == f"Compose(Compose({str!r}), {abs!r})"


def test_a_chain_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compose"):
        Compose()


def test_what_a_part_of_a_chain_raises_ends_it() -> None:
    late = NewCheck()
    with pytest.raises(FaultCounterExceeded):
        Compose(late, FaultCounter(0))(frozen())
    assert late.given == []


# ------------------------------------------------------------------ two generations


def test_a_plugin_of_today_gets_the_state() -> None:
    check, state = NewCheck(), frozen()
    assert call_plugin(check, state) is state
    assert check.given == [(state,)]


@pytest.mark.parametrize("make", [OldCheck, OldCheckWithAnOption, OldCheckThatReturnsNothing])
def test_an_older_plugin_gets_the_exception_too(make: type[Any]) -> None:
    check, state = make(), frozen()
    assert call_plugin(check, state) is state
    assert check.given == [(state, ERROR)]


def test_parts_of_both_generations_are_chained() -> None:
    new, old, state = NewCheck(), OldCheck(), frozen()
    assert call_plugin(Compose(new, old, new, old), state) is state
    assert new.given == [(state,)] * 2
    assert old.given == [(state, ERROR)] * 2


def test_a_chain_is_called_as_the_older_wrapper_did() -> None:
    new, old = NewCheck(), OldCheck()
    state, error = Compose(new, old)(frozen(error=None), ERROR)
    assert (state.fn_exception, error) == (ERROR, ERROR)
    assert new.given == [(state,)]
    assert old.given == [(state, ERROR)]


def test_a_built_in_answers_a_class_derived_from_it_in_kind() -> None:
    class OldCounter(FaultCounter):
        def __call__(  # type: ignore[override]
            self, state: FrozenState, train_ex: Exception | None = None
        ) -> tuple[FrozenState, Exception | None]:
            by_place: Any = super().__call__(state, None)  # type: ignore[call-arg]
            assert by_place == (replace(state, fn_exception=None), None)
            by_name: Any = super().__call__(state, train_ex=train_ex)  # type: ignore[call-arg]
            assert by_name == (state, train_ex)
            return state, train_ex

    counter = OldCounter(1)
    call_plugin(counter, frozen())
    assert counter.faults_count == 1
    with pytest.raises(FaultCounterExceeded):
        call_plugin(counter, frozen())


def test_the_state_of_an_older_plugin_has_the_store() -> None:
    class Changing(Initialize):
        def __call__(self, state: FrozenState) -> FrozenState:
            return replace(state, iteration=9)  # which has no store

    class OldInitialize(Noting, Initialize):
        def __call__(self, state: FrozenState) -> FrozenState:
            self.given.append((state.store, state.status, state.iteration))
            return state

    store, old = object(), OldInitialize()
    call_plugin(Compose(old, Changing()), frozen(store=store))
    assert old.given == [(store, Status.INITIALIZED, 9)]


def test_a_part_that_returns_nothing_passes_on_what_it_got_and_is_warned_of() -> None:
    class Forgetful(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            return None  # type: ignore[return-value]

    class After(Noting, Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            self.given.append((state,))
            return state

    after, state = After(), frozen()
    with pytest.warns(UserWarning, match=r"Forgetful object at .* returned nothing"):
        assert Compose(after, Forgetful())(state) is state
    assert after.given == [(state,)]


def test_a_plugin_that_is_silent_about_its_arguments_gets_todays() -> None:
    class Delegating(Noting, Finalize):
        def __call__(self, *args: Any) -> Any:
            self.given.append(args)
            return args[0]

    finalize, state = Delegating(), frozen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_plugin(finalize, state)
    assert finalize.given == [(state,)]
    assert Compose(max)([1, 3, 2]) == 3


# ------------------------------------------------------------------ rank assignments


def ctx(rank: int = 1, size: int = 4, terminated: set[int] | None = None) -> RankAssignmentCtx:
    return RankAssignmentCtx(State(rank, size), object(), terminated or set())


def test_an_older_assignment_gets_the_state_with_the_store_and_the_terminated_ranks() -> None:
    old, given = OldAssignment(), ctx(terminated={3})
    state = assign(old, given)
    assert old.given == [(State(1, 4), {3}, given.store)]
    assert state == State(1, 3, 1, 3, initial_world_size=4, mode=Mode.ACTIVE)


def test_all_ranks_are_active_after_an_older_assignment_also_the_second_time() -> None:
    first = assign(OldAssignment(), ctx(rank=0))
    again = assign(OldAssignment(), RankAssignmentCtx(first, None, set()))
    assert (again.active_rank, again.active_world_size, again.world_size) == (0, 2, 2)


@pytest.mark.parametrize(
    "chosen", [OldFilter(), Compose(OldFilter(), OldFilter()), MaxActiveWorldSize(2)]
)
@pytest.mark.parametrize(("rank", "mode"), [(1, Mode.ACTIVE), (2, Mode.INACTIVE)])
def test_a_filter_chooses_after_any_assignment(chosen: Any, rank: int, mode: Mode) -> None:
    for assignment in (OldAssignment(), ShiftRanks()):
        state = assign(assignment, ctx(rank), chosen)
        assert (state.mode, state.active_world_size) == (mode, 2)
        assert state.active_rank == (rank if mode is Mode.ACTIVE else None)


def test_assignments_and_filters_of_both_generations_are_chained() -> None:
    chain = Compose(
        ActiveWorldSizeDivisibleBy(2), OldFilter(), MaxActiveWorldSize(3), OldAssignment()
    )
    state = assign(chain, ctx(rank=0, size=9, terminated={8}))
    assert (state.world_size, state.active_world_size, state.active_rank) == (8, 2, 0)


def test_a_chain_of_assignments_is_called_as_the_older_wrapper_did() -> None:
    chain = Compose(ShiftRanks(), OldAssignment())
    state, terminated = chain(State(1, 4), {3})
    assert (state.rank, state.world_size, terminated) == (1, 3, set())
    state, terminated = ShiftRanks()(State(1, 4), {})  # type: ignore[call-arg, misc, arg-type]
    assert (state.rank, state.world_size, terminated) == (1, 4, set())
    state, terminated = ShiftRanks()(State(1, 4), {0})  # type: ignore[call-arg, misc, arg-type]
    assert (state.rank, state.world_size, terminated) == (0, 3, set())


def test_an_assignment_that_leaves_terminated_ranks_over_is_an_error() -> None:
    with pytest.raises(RestartError, match=r"Max.* did not remove terminated_ranks=\[2\]"):
        assign(MaxActiveWorldSize(4), ctx(terminated={2}))


def test_an_assignment_that_returns_nothing_has_changed_what_it_was_given() -> None:
    class InPlace(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            ctx.terminated_ranks = {0}
            return None  # type: ignore[return-value]

    with pytest.warns(UserWarning, match="returned nothing"):
        assert assign(Compose(ShiftRanks(), InPlace()), ctx()).rank == 0
