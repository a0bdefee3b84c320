"""Records the exception that ends a worker, as `record` does, in a script that does not use it.

The agent reads the error file, so the report of the job names the exception. `import regrow`
installs the hook in the worker's own process only. A helper that the worker runs inherits the
environment, and its failure may be none of the worker's.
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
    """Call this module's hook before the current `sys.excepthook`, from now on."""
    global _next
    if sys.excepthook is not _record:
        _next, sys.excepthook = sys.excepthook, _record


def _record(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    try:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and not os.path.lexists(path):  # else `record` has written it
            from regrow.workers.errors import ErrorHandler, Recording

            Recording(ErrorHandler()).__exit__(kind, error, traceback)
    finally:
        _next(kind, error, traceback)
