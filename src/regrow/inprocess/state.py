"""What a rank knows of itself: its place among the ranks, the iteration, its last failure.

The wrapper keeps a `State`; rank assignments change it. Every other plug-in gets a `FrozenState`,
the same facts, read only.

Two generations of code read this class. The first had one kind of rank, which the function saw too,
and a `status`; today there are the rank among all, the rank among the active ones, and a `mode`.
Both names are kept on one set of facts: setting `status` sets `mode` and the active rank with it.
The store, which the first generation found in the state, is carried beside the fields: it is no
fact of the rank's, and a copy of the fields (`dataclasses.asdict`) must not try to copy it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["FrozenState", "Mode", "State", "Status"]


class Mode(enum.Enum):
    """What a rank does in an iteration.

    Attributes:
        INITIALIZED: no rank assignment was made yet.
        ACTIVE: it calls the wrapped function.
        INACTIVE: it waits, in reserve.
        TERMINATED: it is out; it has no rank.
    """

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


class Status(enum.Enum):
    """The first generation's name for `Mode`; a rank that is out is ABORTED (or ABORTING)."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    ABORTING = enum.auto()
    ABORTED = enum.auto()


_STATUS = {
    Mode.INITIALIZED: Status.INITIALIZED,
    Mode.ACTIVE: Status.ACTIVE,
    Mode.INACTIVE: Status.INACTIVE,
    Mode.TERMINATED: Status.ABORTED,
}
_MODE = {status: mode for mode, status in _STATUS.items()} | {Status.ABORTING: Mode.TERMINATED}


@dataclass(frozen=True)
class FrozenState:
    """A `State` that nobody can change; what plug-ins get.

    Attributes:
        rank: index among all living ranks, 0 to `world_size - 1`; None for a terminated one.
        world_size: number of living ranks, reserve included.
        active_rank: the rank that the wrapped function sees; None where it is not called.
        active_world_size: the world size that the wrapped function sees.
        initial_rank: `rank` when the wrapper was called; names this process for good.
        initial_world_size: `world_size` when the wrapper was called.
        iteration: number of the call of the wrapped function, from 0; grows with each restart.
        mode: what the rank does in this iteration.
        fn_exception: what the wrapped function raised on this rank in this iteration, if anything.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    @property
    def status(self) -> Status:
        """`mode`, in the words of the first generation."""
        return _STATUS[self.mode]

    @property
    def store(self) -> Any:
        """The iteration's store, or None; the first generation's place for it."""
        return getattr(self, "_store", None)


@dataclass
class State:
    """The facts of a `FrozenState`, as the wrapper and rank assignments change them.

    Args:
        rank: as in `FrozenState`; unless given, `RANK` of the environment, else 0.
        world_size: unless given, `WORLD_SIZE` of the environment, else 1.
        initial_rank: unless given, `rank`.
        initial_world_size: unless given, `world_size`.

    Raises:
        ValueError: `RANK` or `WORLD_SIZE` is needed and is no number.
    """

    rank: int | None = field(default_factory=lambda: _from_env("RANK", 0))
    world_size: int = field(default_factory=lambda: _from_env("WORLD_SIZE", 1))
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        """The state of a process at the wrapper's call, from `RANK` and `WORLD_SIZE`."""
        return cls()

    @property
    def status(self) -> Status:
        """`mode`, in the words of the first generation."""
        return _STATUS[self.mode]

    @status.setter
    def status(self, status: Status) -> None:
        self.mode = _MODE[status]
        self.active_rank = self.rank if self.mode is Mode.ACTIVE else None

    @property
    def store(self) -> Any:
        """The iteration's store, or None; the first generation's place for it."""
        return getattr(self, "_store", None)

    @store.setter
    def store(self, store: Any) -> None:
        self._store = store

    def activate_all_ranks(self) -> None:
        """Have every living rank call the function, under its own rank."""
        self.mode = Mode.ACTIVE
        self.active_rank, self.active_world_size = self.rank, self.world_size

    def set_distributed_vars(self) -> None:
        """Put what the function is to see into the environment: `RANK`, `WORLD_SIZE`.

        A rank in reserve has no active rank; its `RANK` is the one among all ranks, so that the
        variable is a number everywhere.
        """
        rank = self.rank if self.active_rank is None else self.active_rank
        size = self.world_size if self.active_world_size is None else self.active_world_size
        if rank is None:
            raise ValueError(f"a terminated rank has none to set: {self}")
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)

    def advance(self) -> None:
        """Go on to the next iteration: what was raised in the last one is over."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """These facts as they are now, for plug-ins."""
        frozen = FrozenState(**{entry.name: getattr(self, entry.name) for entry in fields(self)})
        object.__setattr__(frozen, "_store", self.store)
        return frozen

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Take over `fields` of `other`; all of them unless given."""
        for name in self.__dataclass_fields__ if fields is None else fields:
            setattr(self, name, getattr(other, name))


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} in the environment is no number; a launcher sets it, or State(...) "
            "is given rank and world_size"
        ) from None
