"""Worker processes: start, watch and stop them with all their descendants; their logs and errors.

Each name is imported at its first use. So an agent that runs programs never loads the modules for
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.workers.context import PContext
    from regrow.workers.errors import (
        ChildFailedError,
        ErrorHandler,
        ProcessFailure,
        get_error_handler,
        record,
    )
    from regrow.workers.guardian.client import Guardian
    from regrow.workers.guardian.procfs import process_states
    from regrow.workers.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
    from regrow.workers.multiprocess import MultiprocessContext
    from regrow.workers.numa import AffinityMode, NumaOptions, bound_cpus
    from regrow.workers.signals import (
        SignalException,
        StoppedEarly,
        raises_later,
        signals_handled,
    )
    from regrow.workers.start import SubprocessContext, start_processes
    from regrow.workers.worker_set import RunProcsResult, WorkerChange

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
    "StoppedEarly",
    "SubprocessContext",
    "WorkerChange",
    "get_error_handler",
    "process_states",
    "record",
    "start_processes",
    "to_map",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "context": "PContext",
        "multiprocess": "MultiprocessContext",
        "numa": "AffinityMode NumaOptions bound_cpus",
        "signals": "SignalException StoppedEarly raises_later signals_handled",
        "start": "SubprocessContext start_processes",
        "worker_set": "RunProcsResult WorkerChange",
        "errors": "ChildFailedError ErrorHandler ProcessFailure get_error_handler record",
        "guardian.client": "Guardian",
        "guardian.procfs": "process_states",
        "logs.specs": "DefaultLogsSpecs LogsDest LogsSpecs Std to_map",
    },
)
