"""Workers: start them, watch them, stop them, with all that they started; their logs and errors.

What is imported is imported at its first use: an agent that runs commands never loads what
functions need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.workers._context import PContext
    from regrow.workers._guardian_client import Guardian
    from regrow.workers._logs import DefaultLogsSpecs, LogsDest, LogsSpecs
    from regrow.workers._multiprocess import MultiprocessContext
    from regrow.workers._numa import AffinityMode, NumaOptions
    from regrow.workers._procfs import process_states
    from regrow.workers._result import RunProcsResult, WorkerChange
    from regrow.workers._signals import SignalException
    from regrow.workers._start import start_processes
    from regrow.workers._std import Std, to_map
    from regrow.workers._subprocess import SubprocessContext
    from regrow.workers.errors import (
        ChildFailedError,
        ErrorHandler,
        ProcessFailure,
        get_error_handler,
        record,
    )

__all__ = [
    "AffinityMode",
    "ChildFailedError",
    "DefaultLogsSpecs",
    "ErrorHandler",
    "Guardian",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "NumaOptions",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "WorkerChange",
    "get_error_handler",
    "process_states",
    "record",
    "start_processes",
    "to_map",
]

_HOMES = {
    "_context": ("PContext",),
    "_guardian_client": ("Guardian",),
    "_logs": ("DefaultLogsSpecs", "LogsDest", "LogsSpecs"),
    "_multiprocess": ("MultiprocessContext",),
    "_numa": ("AffinityMode", "NumaOptions"),
    "_procfs": ("process_states",),
    "_result": ("RunProcsResult", "WorkerChange"),
    "_signals": ("SignalException",),
    "_start": ("start_processes",),
    "_std": ("Std", "to_map"),
    "_subprocess": ("SubprocessContext",),
    "errors": ("ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
