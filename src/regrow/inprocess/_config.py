"""What a wrapper is told by its arguments: types, defaults, and what must hold between them.

Names, defaults and inequalities are those of nvidia-resiliency-ext, of both generations. Intervals
are accepted and checked as there; here they bound fallbacks, since whatever can be told is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from . import rank_assignment as assignments
from . import rank_filter as filters
from ._link import Timeouts
from .abort import Abort, AbortTorchDistributed
from .completion import Completion
from .finalize import Finalize
from .health_check import HealthCheck
from .initialize import Initialize
from .store import TCPStore
from .terminate import Terminate


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The arguments of `Wrapper`, checked.

    Attributes:
        store_factory: makes the store over which the ranks meet: `inprocess.store.TCPStore`, or
            anything that returns a c10d store.
        store_kwargs: the keyword arguments it is called with.
        initialize: called on each rank before each call of the function.
        abort: called in another thread when a fault is known, to free the main thread.
        finalize: called when the function was left.
        health_check: says whether this rank is fit to go on.
        rank_assignment: numbers the living ranks, and may choose the active ones.
        rank_filter: chooses the active ones; the first generation's.
        completion: called at the end, when all ranks are done.
        terminate: called on a rank that leaves for good.
        monitor_thread_interval: bound for what the rank itself would look for.
        monitor_process_interval: bound for what the process that watches it would look for.
        heartbeat_interval: bound for the pause between signs of life.
        progress_watchdog_interval: pause between two looks at automatic progress.
        soft_timeout: a rank without progress for so long restarts, with all others.
        hard_timeout: a rank without progress for so long is ended.
        heartbeat_timeout: a rank that nothing is heard of for so long is given up, where no
            connection tells.
        barrier_timeout: how long ranks wait for the last one to begin an iteration.
        completion_timeout: how long ranks that are done wait for the others.
        last_call_wait: how long the ranks wait at most for each other's concurrent faults.
        termination_grace_time: from SIGTERM to SIGKILL when a rank is ended.
        monitor_process_logfile: absolute path; "{rank}" stands for the initial rank.
        monitor_process_pidfile: absolute path; "{rank}" stands for the initial rank.
        enabled: False: the function is left as it is.

    Raises:
        TypeError: an argument is of the wrong type; says which and what it should be.
        ValueError: two of them contradict each other; says which inequality is broken.
    """

    store_factory: Callable[..., Any] = TCPStore
    store_kwargs: dict[str, Any] | None = None
    initialize: Initialize | None = None
    abort: Abort | None = field(default_factory=AbortTorchDistributed)
    finalize: Finalize | None = None
    health_check: HealthCheck | None = None
    rank_assignment: assignments.RankAssignment = field(default_factory=assignments.ShiftRanks)
    rank_filter: filters.RankFilter | assignments.RankFilter | None = None
    completion: Completion | None = None
    terminate: Terminate | None = None
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _check_values(self)

    @property
    def timeouts(self) -> Timeouts:
        """What the ranks' link has to know."""
        return Timeouts(
            barrier=self.barrier_timeout.total_seconds(),
            completion=self.completion_timeout.total_seconds(),
            last_call=self.last_call_wait.total_seconds(),
            heartbeat=self.heartbeat_timeout.total_seconds(),
        )


_PLUGINS: Final[dict[str, tuple[type, ...]]] = {
    "initialize": (Initialize,),
    "abort": (Abort,),
    "finalize": (Finalize,),
    "health_check": (HealthCheck,),
    "rank_filter": (filters.RankFilter, assignments.RankFilter),
    "completion": (Completion,),
    "terminate": (Terminate,),
}
_DURATIONS: Final = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
)
_PATHS: Final = ("monitor_process_logfile", "monitor_process_pidfile")
_LESS: Final = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""Each first one has to be less than its second."""


def _check_types(config: Config) -> None:
    wanted: dict[str, tuple[type, ...]] = {
        "store_kwargs": (dict, type(None)),
        "rank_assignment": (assignments.RankAssignment,),
        "enabled": (bool,),
        **{name: (*families, type(None)) for name, families in _PLUGINS.items()},
        **dict.fromkeys(_DURATIONS, (timedelta,)),
        **dict.fromkeys(_PATHS, (str, type(None))),
    }
    for name, types in wanted.items():
        value = getattr(config, name)
        if not isinstance(value, types):
            names = [kind.__qualname__ for kind in types if kind is not type(None)]
            or_none = " or None" if type(None) in types else ""
            raise TypeError(f"{name}={value!r} is no {' or '.join(names)}{or_none}")
    if not callable(config.store_factory):
        raise TypeError(
            f"store_factory={config.store_factory!r} cannot be called: give a class of stores, as "
            f"inprocess.store.TCPStore"
        )


def _check_values(config: Config) -> None:
    for name in _DURATIONS:
        if getattr(config, name) < timedelta(0):
            raise ValueError(f"{name}={getattr(config, name)} is negative")
    for less, more in _LESS:
        first, second = getattr(config, less), getattr(config, more)
        if not first < second:
            raise ValueError(
                f"{less} < {more} does not hold: {first.total_seconds():g} s is not less than "
                f"{second.total_seconds():g} s"
            )
    for name in _PATHS:
        path = getattr(config, name)
        if path is not None and not Path(path).is_absolute():
            raise ValueError(f"{name}={path!r} is no absolute path")
