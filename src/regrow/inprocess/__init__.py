"""In-process restart: a fault ends the current call of a function on all ranks, and no process.

    @Wrapper(initialize=RetryController(max_iterations=10))
    def train(call: CallWrapper): ...

`Wrapper` decorates the function and takes plug-ins. Each family of plug-ins has a module with a
base class and the built-in plug-ins:

| module | when the wrapper calls the plug-in |
|---|---|
| `initialize` | before each call of the function |
| `abort` | after a fault is detected, in another thread, to wake the main thread |
| `finalize` | after the function has ended |
| `health_check` | before each call of the function, and after `finalize` |
| `rank_assignment` | after the living ranks have met: numbers them, chooses the active ones |
| `rank_filter` | after `rank_assignment`; chooses active ranks, as in the first generation |
| `completion` | on each rank, after the function has completed on all ranks |
| `terminate` | on a rank that leaves without completing |

`Compose` chains plug-ins. Names and meanings are those of `nvidia_resiliency_ext.inprocess`, in
its first and its current generation. Plug-ins of both generations work side by side.

Every name is loaded on first use, because the store server also uses a module of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from types import ModuleType

    from regrow.inprocess.call.call import CallWrapper
    from regrow.inprocess.call.wrapper import Wrapper

    from . import (
        abort,
        attribution,
        completion,
        exception,
        finalize,
        health_check,
        initialize,
        nested_restarter,
        rank_assignment,
        rank_filter,
        state,
        store,
        terminate,
    )
    from .compose import Compose
    from .state import FrozenState, Mode, State, Status

    monitor_thread: ModuleType
    wrap: ModuleType

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Status",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
    "wrap",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "call.call": "CallWrapper",
        "call.wrapper": "Wrapper",
        "compose": "Compose",
        "state": "FrozenState Mode State Status",
    },
    submodules={name for name in __all__ if name.islower()},
)
