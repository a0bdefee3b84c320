"""Writes the error file of a worker that an uncaught exception ends, if it does not use `record`.

The agent reads the file, so the report of the job names the exception. `import regrow` installs the
hook in the worker's own process only. A child process of the worker inherits the environment, and
its failure need not be a failure of the worker.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_next: Callable[[type[BaseException], BaseException, TracebackType | None], object] = sys.excepthook


def install() -> None:
    """Set `sys.excepthook` to a hook that writes the error file and then calls the current one."""
    global _next
    if sys.excepthook is not _record:
        _next, sys.excepthook = sys.excepthook, _record


def _record(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    try:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and not os.path.lexists(path):  # else `record` has written it
            from regrow.workers.errors import get_error_handler, record_error

            record_error(get_error_handler(), error)
    finally:
        _next(kind, error, traceback)
