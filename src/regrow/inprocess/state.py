"""State of a rank: its place among the ranks, the iteration, its last failure.

The wrapper keeps a `State`, and rank assignments change it. Every other plug-in receives a
`FrozenState` with the same data, read-only.

User code of two generations of nvidia_resiliency_ext.inprocess reads these classes. The first had a
`status` and a single rank, which the function also saw. The current generation has a `mode`, a rank
among all ranks and a rank among the active ones. Both interfaces share the same data: setting
`status` also sets `mode` and the active rank.

Plug-ins of the first generation read the store from the state. The store is an attribute and no
field of the dataclass, because `dataclasses.asdict` must not copy it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from regrow.store import LAUNCHED_SIZE_ENV

__all__ = ["FrozenState", "Mode", "State", "Status"]


class Mode(enum.Enum):
    """Role of a rank in an iteration.

    Attributes:
        INITIALIZED: no rank assignment has run yet.
        ACTIVE: the rank calls the wrapped function.
        INACTIVE: the rank waits in reserve.
        TERMINATED: the process has left; it has no rank.
    """

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


class Status(enum.Enum):
    """First generation's name for `Mode`; a terminated rank is ABORTED (or ABORTING)."""

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
    """Read-only `State`, given to plug-ins.

    Attributes:
        rank: index among all living ranks, 0 to `world_size - 1`; None for a terminated rank.
        world_size: number of living ranks, including those in reserve.
        active_rank: the rank that the wrapped function sees; None if this rank does not call it.
        active_world_size: the world size that the wrapped function sees.
        initial_rank: `rank` when the wrapper was called; a replacing process has the same.
        initial_world_size: `world_size` when the wrapper was called.
        iteration: number of the call of the wrapped function, from 0; grows with each restart.
        mode: role of the rank in this iteration.
        fn_exception: exception of the wrapped function on this rank in this iteration, or None.
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
        """`mode` as a `Status` of the first generation."""
        return _STATUS[self.mode]

    @property
    def store(self) -> Any:
        """The store of the iteration, or None; first-generation plug-ins find it here."""
        return getattr(self, "_store", None)


@dataclass
class State:
    """Mutable state of a rank, changed by the wrapper and rank assignments.

    Args:
        rank: as in `FrozenState`; default: the environment variable `RANK`, else 0.
        world_size: default: the environment variable `WORLD_SIZE`, else 1.
        initial_rank: default: `rank`.
        initial_world_size: default: `world_size`.

    Raises:
        ValueError: `RANK` or `WORLD_SIZE` is needed and is not a number.
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
        """Return the state of a process that calls the wrapper, from `RANK` and `WORLD_SIZE`."""
        return cls()

    @property
    def status(self) -> Status:
        """`mode` as a `Status` of the first generation."""
        return _STATUS[self.mode]

    @status.setter
    def status(self, status: Status) -> None:
        self.mode = _MODE[status]
        self.active_rank = self.rank if self.mode is Mode.ACTIVE else None

    @property
    def store(self) -> Any:
        """The store of the iteration, or None; first-generation plug-ins find it here."""
        return getattr(self, "_store", None)

    @store.setter
    def store(self, store: Any) -> None:
        self._store = store

    def activate_all_ranks(self) -> None:
        """Make every living rank active, with its own rank as the active rank."""
        self.mode = Mode.ACTIVE
        self.active_rank, self.active_world_size = self.rank, self.world_size

    def set_distributed_vars(self) -> None:
        """Set `RANK` and `WORLD_SIZE` in the environment to the values that the function sees.

        A rank in reserve has no active rank. Its `RANK` is its rank among all ranks, so that the
        variable is a number on every rank. `REGROW_WORLD_SIZE` keeps the `WORLD_SIZE` of the
        launcher.

        Raises:
            ValueError: this rank is terminated, so it has no number.
        """
        rank = self.rank if self.active_rank is None else self.active_rank
        size = self.world_size if self.active_world_size is None else self.active_world_size
        if rank is None:
            raise ValueError(
                f"cannot set RANK: this rank has left the group (terminated), so it has no rank "
                f"number: {self}"
            )
        if "WORLD_SIZE" in os.environ:
            os.environ.setdefault(LAUNCHED_SIZE_ENV, os.environ["WORLD_SIZE"])
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)

    def advance(self) -> None:
        """Go to the next iteration: increment its number, and clear the last exception."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """Return a read-only copy of this state, for plug-ins."""
        frozen = FrozenState(**{entry.name: getattr(self, entry.name) for entry in fields(self)})
        object.__setattr__(frozen, "_store", self.store)
        return frozen

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Copy fields from another state.

        Args:
            other: the state to read.
            fields: names of the fields; None for all fields.
        """
        for name in self.__dataclass_fields__ if fields is None else fields:
            setattr(self, name, getattr(other, name))


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} in the environment is not a whole number: correct it, or pass rank "
            "and world_size to State"
        ) from None
