"""Runs when the Python of a worker starts: the exception that ends the worker is recorded.

Python imports a module of this name at its start. The guardian puts the folder of this file first
in PYTHONPATH of a worker that is a Python program. This module takes the folder away again before
the program begins, from PYTHONPATH and from `sys.path`, and imports the module of the same name
that Python would have found without it. So the program and its children see nothing of it.

The interpreter of the worker may have no regrow, so only the standard library is used, and that as
late as possible: the start of a worker takes no longer.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_next = sys.excepthook
_TEMPLATE = "/guardian/template_process.py"  # runs the program in the place of the interpreter
_MOST = 256 * 1024  # characters of a text; the agent reads no file of more than 4 MiB


def _record(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Write the error file, unless the program has written it; then print the exception."""
    try:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        ends = issubclass(kind, Exception) and _is_worker() and _ends_program(error)
        if ends and path and not os.path.lexists(path):
            _write(path, kind, error, traceback)
    except Exception:  # noqa: BLE001 - the exception itself is printed in any case
        return
    finally:
        _next(kind, error, traceback)


def _ends_program(error: BaseException) -> bool:
    """Return whether the interpreter reports the exception, because the program has ended by it.

    A framework may report an exception that it handles. The program is then still on the stack, or
    the call is on another thread. `regrow._uncaught` has the same rule.
    """
    import _thread

    frame = sys._getframe()
    while frame.f_back is not None and not frame.f_code.co_filename.endswith(_TEMPLATE):
        frame = frame.f_back
    is_main = _thread.get_native_id() == os.getpid()
    is_last = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is error
    return is_main and is_last and frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _write(
    path: str, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    import json
    import time
    from traceback import format_exception

    monotonic = time.monotonic()
    lines = format_exception(kind, error, traceback)
    extra = {
        "py_callstack": "".join(lines)[-_MOST:],
        "timestamp": str(int(time.time())),
        "monotonic": monotonic,
    }
    message = {"message": f"{kind.__name__}: {error}"[:_MOST], "extraInfo": extra}
    # Under another name first: the agent must never read half of it.
    with open(f"{path}.new", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump({"message": message}, file)
    os.replace(f"{path}.new", path)  # noqa: PTH105 - pathlib takes a while to import


def _is_worker() -> bool:
    """Return whether this process is the worker, and no child of it."""
    return os.environ.get("REGROW_WORKER_PID") == str(os.getpid())


def _leave_no_trace() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    first, separator, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder and separator:
        os.environ["PYTHONPATH"] = others
    elif first == folder:
        del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    this = sys.modules.pop(__name__, None)
    try:
        __import__("sitecustomize")  # the one that the program would have without this file
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this is not None:
            sys.modules.setdefault(__name__, this)


if _is_worker():
    sys.excepthook = _record
if __name__ == "sitecustomize":  # a worker that a template forks runs this file under another name
    _leave_no_trace()
