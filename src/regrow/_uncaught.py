"""Writes the error file of a worker that an uncaught exception ends, if it does not use `record`.

The agent reads the file, so the report of the job names the exception. `import regrow` installs the
hook in the worker's own process only. A child process of the worker inherits the environment, and
its failure need not be a failure of the worker.
"""

from __future__ import annotations

import os
import sys
from _thread import get_native_id  # the import of `threading` costs more
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_next: Callable[[type[BaseException], BaseException, TracebackType | None], object] = sys.excepthook
_TEMPLATE = "/guardian/template_process.py"
"""Runs the program of a worker in the place of the interpreter."""


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
        # Else `record` has written it.
        if path and not os.path.lexists(path) and _ends_program(error):
            from regrow.workers.errors import get_error_handler, record_error

            record_error(get_error_handler(), error)
    finally:
        _next(kind, error, traceback)


def _ends_program(error: BaseException) -> bool:
    """Return whether the interpreter reports the exception, because the program has ended by it.

    A framework may report an exception that it handles. The program is then still on the stack, or
    the call is on another thread. `workers/hook/sitecustomize.py` cannot import this function.
    """
    frame = sys._getframe()
    while frame.f_back is not None and not frame.f_code.co_filename.endswith(_TEMPLATE):
        frame = frame.f_back
    is_main = get_native_id() == os.getpid()
    is_last = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is error
    return is_main and is_last and frame.f_code.co_name not in ("<module>", "_run_module_as_main")
