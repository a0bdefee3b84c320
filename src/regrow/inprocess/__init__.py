"""In-process restart: a fault ends the present call of a function on all ranks, and no process.

    @Wrapper(initialize=RetryController(max_iterations=10))
    def train(call: CallWrapper): ...

`Wrapper` decorates the function, and takes plug-ins. Their families, each a module with a base
class and its built-ins:

| module | called |
|---|---|
| `initialize` | before each call of the function |
| `abort` | once a fault is known, in another thread, to wake the main thread |
| `finalize` | when the function was left |
| `health_check` | before each call of the function, and after `finalize` |
| `rank_assignment` | when the living ranks have met, to number them and choose the active ones |
| `rank_filter` | after it; the first generation's choice of active ranks |
| `completion`, `terminate` | at the end, on each rank: of what is done, or of the rank |

`Compose` chains plug-ins. Names and meanings are those of `nvidia_resiliency_ext.inprocess`, of its
first generation and of today's; plug-ins of both work side by side.

Everything is loaded when it is first used: the store server, too, has a module of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from regrow._lazy import lazily

if TYPE_CHECKING:
    from . import (
        abort,
        attribution,
        completion,
        exception,
        finalize,
        health_check,
        initialize,
        monitor_thread,
        nested_restarter,
        rank_assignment,
        rank_filter,
        state,
        store,
        terminate,
        wrap,
    )
    from ._call import CallWrapper
    from ._wrapper import Wrapper
    from .compose import Compose
    from .state import FrozenState, Mode, State, Status

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

_NAMES = {
    "CallWrapper": "_call",
    "Compose": "compose",
    "FrozenState": "state",
    "Mode": "state",
    "State": "state",
    "Status": "state",
    "Wrapper": "_wrapper",
}
_named = lazily(globals(), _NAMES)


def __getattr__(name: str) -> object:
    if name in __all__ and name not in _NAMES:
        return import_module(f"{__name__}.{name}")
    return _named(name)
