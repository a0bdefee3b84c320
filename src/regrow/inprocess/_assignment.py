"""What a rank assignment is, what it is given, and how it says that a rank is out."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Any

from .exception import RestartError
from .state import Mode, State

__all__ = ["RankAssignment", "RankAssignmentCtx", "RankDiscarded", "with_active", "without_active"]


class RankDiscarded(RestartError):
    """This rank has no place in the next iteration."""


@dataclass
class RankAssignmentCtx:
    """What goes into a rank assignment and comes out of it.

    Attributes:
        state: this rank's; its `rank` counts the ranks of the iteration that ended.
        store: shared by all living ranks and by nothing else; in it a key is used once.
        terminated_ranks: those that do not go on, numbered as `state.rank` is; the same set on all
            ranks. Empty when an assignment has dealt with it.
    """

    state: State
    store: Any
    terminated_ranks: set[int]

    def __post_init__(self) -> None:
        self.given = self.state


class RankAssignment(abc.ABC):
    """Base of the wrapper's `rank_assignment`: numbers the living ranks, chooses the active ones.

    It is called on every living rank with the same terminated ranks, and has to come to the same
    result everywhere. Active ranks call the wrapped function; the others wait, in reserve. Several
    are chained by `Compose`, those that number the ranks first. If none of them chooses, all ranks
    are active.
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx`, changed.

        Raises:
            RankDiscarded: this rank is out.
        """


def with_active(state: State, size: int) -> State:
    """`state` with the first `size` of the living ranks active."""
    assert state.rank is not None  # a rank that is out was discarded before
    active = state.rank < size
    return _keeping_store(
        state,
        replace(
            state,
            mode=Mode.ACTIVE if active else Mode.INACTIVE,
            active_rank=state.rank if active else None,
            active_world_size=size,
        ),
    )


def without_active(state: State) -> State:
    """`state` with nothing said about which ranks are active."""
    return _keeping_store(
        state, replace(state, mode=Mode.INITIALIZED, active_rank=None, active_world_size=None)
    )


def _keeping_store(old: State, new: State) -> State:
    new.store = old.store
    return new
