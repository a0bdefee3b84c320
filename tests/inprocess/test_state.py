"""The state of a rank, under the names of both generations."""

from __future__ import annotations

import copy
import dataclasses
import os
import threading

import pytest

from regrow.inprocess import FrozenState, Mode, State, Status
from regrow.store import launched_world_size


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("REGROW_WORLD_SIZE", "")  # so that it is removed after the test
    monkeypatch.delenv("REGROW_WORLD_SIZE")


def test_a_state_begins_with_the_values_of_the_environment() -> None:
    assert State() == State.from_env() == State(3, 8, initial_rank=3, initial_world_size=8)
    assert State().mode is Mode.INITIALIZED


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert (State().rank, State().world_size) == (0, 1)


def test_a_rank_in_the_environment_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "None")
    with pytest.raises(ValueError, match=r"RANK='None' in the environment is not a whole number"):
        State()


def test_a_terminated_rank_keeps_having_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "broken")
    assert State(None, 8).rank is None
    with pytest.raises(ValueError, match="this rank has left the group"):
        State(None, 8).set_distributed_vars()


def test_both_kinds_of_state_have_the_same_facts() -> None:
    of_state, of_frozen = (
        [(field.name, field.type) for field in dataclasses.fields(kind)]
        for kind in (State, FrozenState)
    )
    assert of_state == of_frozen


def test_a_frozen_state_is_a_read_only_copy_with_the_store() -> None:
    state, store = State(1, 2), object()
    state.store, state.fn_exception = store, ValueError("x")
    frozen = state.freeze()
    assert dataclasses.astuple(frozen)[:8] == dataclasses.astuple(state)[:8]
    assert (frozen.fn_exception, frozen.store) == (state.fn_exception, store)
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rank = 0  # type: ignore[misc]


def test_an_exception_that_cannot_be_copied_is_frozen_as_it_is() -> None:
    error = ValueError(threading.Lock())
    with pytest.raises(TypeError):
        copy.deepcopy(error)
    assert State(0, 1, fn_exception=error).freeze().fn_exception is error


def test_a_store_is_no_fact_and_is_not_copied_with_them() -> None:
    state = State(0, 1)
    state.store = threading.Lock()  # like a store, it cannot be copied
    assert State(**dataclasses.asdict(state)) == state


@pytest.mark.parametrize(
    ("status", "mode", "active_rank"),
    [
        (Status.INITIALIZED, Mode.INITIALIZED, None),
        (Status.ACTIVE, Mode.ACTIVE, 3),
        (Status.INACTIVE, Mode.INACTIVE, None),
        (Status.ABORTED, Mode.TERMINATED, None),
    ],
)
def test_the_older_status_and_the_mode_are_one(
    status: Status, mode: Mode, active_rank: int | None
) -> None:
    state = State()
    state.status = status
    assert (state.mode, state.active_rank, state.status) == (mode, active_rank, status)
    assert state.freeze().status is status


def test_a_rank_that_is_being_aborted_is_out() -> None:
    state = State()
    state.status = Status.ABORTING
    assert (state.mode, state.status) == (Mode.TERMINATED, Status.ABORTED)


def test_the_function_sees_the_active_rank_and_the_active_world_size() -> None:
    State(5, 8, active_rank=2, active_world_size=4).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")


def test_the_environment_of_a_rank_in_reserve_holds_numbers() -> None:
    State(5, 8, active_world_size=4, mode=Mode.INACTIVE).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("5", "4")


def test_the_world_size_of_the_launcher_is_kept_when_the_function_sees_another_one() -> None:
    for size in (4, 2):
        State(0, size).set_distributed_vars()
    assert (os.environ["WORLD_SIZE"], launched_world_size(os.environ)) == ("2", 8)


def test_an_advance_forgets_what_was_raised() -> None:
    state = State(0, 1, iteration=4, fn_exception=ValueError())
    state.advance()
    assert (state.iteration, state.fn_exception) == (5, None)


def test_a_copy_takes_over_the_facts_that_are_named() -> None:
    other = State(1, 2, iteration=7, mode=Mode.ACTIVE)
    state = State(0, 8)
    state.copy_from(other, fields=["iteration"])
    assert state == State(0, 8, iteration=7)
    state.copy_from(other)
    assert state == other
