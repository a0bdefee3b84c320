"""`ErrorHandler`: writes the error file that a worker leaves for its agent.

The file must never do harm. It is written beside its path and then renamed, so it appears whole or
not at all. If it cannot be written, because the disk is full or the directory is gone, the worker
reports this in one line. The current exception continues unchanged.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

from regrow.utils import describe, get_traceback, headline

__all__ = ["ErrorHandler", "print_problem"]

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"


class ErrorHandler:
    """Records exceptions as JSON in the file that `TORCHELASTIC_ERROR_FILE` names.

    If the variable is unset or empty, nothing is written. Subclasses may replace `initialize`,
    `record_exception` and `_get_error_file_path`.
    """

    def _get_error_file_path(self) -> str | None:
        """Return the path of the error file; None or an empty string disables it."""
        return os.environ.get(ERROR_FILE_ENV)

    def initialize(self) -> None:
        """Dump all stacks on a fatal signal; called before the code that may raise."""
        import faulthandler

        # sys.stderr may be any object of the user's code, and descriptor 2 may be closed.
        with suppress(Exception):
            faulthandler.enable(all_threads=True)
            return
        try:
            faulthandler.enable(file=2, all_threads=True)
        except Exception as error:  # noqa: BLE001 - the program runs without it
            print_problem(f"a fatal signal will print no stacks: {type(error).__name__}: {error}")

    def record_exception(self, e: BaseException) -> None:
        """Write the error file for an exception: its text, its traceback, and the time.

        `extraInfo.timestamp` is a text with whole seconds since the epoch. `extraInfo.monotonic` is
        in seconds of this host's monotonic clock; it orders failures within the host.
        """
        monotonic = time.monotonic()
        path = self._get_error_file_path()
        if not path:
            return
        data = {
            "message": {
                "message": headline(e),
                "extraInfo": {
                    "py_callstack": _traceback(e),
                    "timestamp": str(int(time.time())),
                    "monotonic": monotonic,
                },
            }
        }
        self._write_json(path, data)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set `errorCode` in a child's error, which could not know the code (for example SIGSEGV).

        Args:
            rootcause_error_file: path of the error, for the message if the error has no field for
                the code. An error of the flat format has none.
            rootcause_error: the error; changed in place.
            error_code: exit code of the child.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            print_problem(
                f"the error in {rootcause_error_file} has the flat format; its exit code"
                f" {error_code} is not added"
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error into this process's own error file.

        Args:
            rootcause_error_file: error file of the child. An unreadable file is reported in one
                line, and nothing is written.
            error_code: exit code of the child; a code other than 0 is set as `errorCode`.
        """
        path = self._get_error_file_path()
        if not path:
            return
        from regrow.workers.errors.failures import read_error_file

        error, fault, _ = read_error_file(rootcause_error_file)
        if fault is not None:
            print_problem(
                f"cannot pass on the child's error file {rootcause_error_file}: it {fault}"
            )
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, error, error_code)
        self._write_json(path, error)

    def _write_json(self, path: str, data: object) -> None:
        from regrow.utils import to_json

        self._write_error_file(path, to_json(data))

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Replace the content of the file; report a failure in one line on stderr."""
        beside = f"{file_path}.{os.getpid()}.tmp"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(error_msg)
            os.replace(beside, file_path)  # noqa: PTH105 - workers start sooner without pathlib
        except OSError as error:
            with suppress(OSError):  # the file was never created, or is as stuck as the write
                os.unlink(beside)
            why = f"[Errno {error.errno}] {error.strerror}"
            print_problem(f"cannot write the error file {file_path}: {why}")


def _traceback(error: BaseException) -> str:
    from traceback import TracebackException, format_tb

    try:  # a `__str__` that raises is shown as such; other attributes of the class may raise, too
        return "".join(TracebackException.from_exception(error).format())
    except Exception:  # noqa: BLE001
        frames = "".join(format_tb(get_traceback(error)))
        return f"Traceback (most recent call last):\n{frames}{describe(error)}\n"


def print_problem(text: str) -> None:
    """Write one line to stderr if possible; never raises."""
    try:
        sys.stderr.write(f"regrow: {text}\n")
    except Exception:  # noqa: BLE001 - sys.stderr may be any object of the user's
        return
