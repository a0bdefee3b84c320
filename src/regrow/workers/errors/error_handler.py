"""`ErrorHandler`: writes the error file that a worker leaves for its agent.

The file must never do harm: it appears whole or not at all (written beside, then renamed), and
where it cannot be written, on a full disk or in a directory that is gone, the worker says so in
one line and the exception that is under way goes on undisturbed.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

__all__ = ["ErrorHandler"]

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"


class ErrorHandler:
    """Records exceptions as JSON in the file that `TORCHELASTIC_ERROR_FILE` names.

    Where the variable is unset or empty nothing is written. Subclasses may replace `initialize`,
    `record_exception` and `_get_error_file_path`.
    """

    def _get_error_file_path(self) -> str | None:
        """Where to write; None or an empty string for nowhere."""
        return os.environ.get(ERROR_FILE_ENV)

    def initialize(self) -> None:
        """Called before the code whose errors are recorded: dump all stacks on a fatal signal."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError, AttributeError):  # sys.stderr is no file
            faulthandler.enable(file=2, all_threads=True)

    def record_exception(self, e: BaseException) -> None:
        """Write the error file for an exception: its text, traceback, and when it was recorded.

        `extraInfo.timestamp` is in whole seconds since the epoch, as text; `extraInfo.monotonic`
        is of this host's monotonic clock, in seconds, and orders failures within the host.
        """
        monotonic = time.monotonic()
        path = self._get_error_file_path()
        if not path:
            return
        from traceback import TracebackException

        shown = TracebackException.from_exception(e)  # survives a __str__ that raises
        data = {
            "message": {
                "message": f"{type(e).__name__}: {shown}",
                "extraInfo": {
                    "py_callstack": "".join(shown.format()),
                    "timestamp": str(int(time.time())),
                    "monotonic": monotonic,
                },
            }
        }
        self._write_json(path, data)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set `errorCode` in a child's error, which could not know it (a SIGSEGV, for one).

        Args:
            rootcause_error_file: where the error was read, for the message if it has no place
                for the code: an error of the flat format has none.
            rootcause_error: changed in place.
            error_code: how the child exited.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _complain(
                f"the error in {rootcause_error_file} is of the flat format; its exit code"
                f" {error_code} is not added to it"
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Make a child's error this process's own.

        Args:
            rootcause_error_file: of the child. One that cannot be read is reported in a line,
                and nothing is written.
            error_code: how the child exited; other than 0 it is set as `errorCode`.
        """
        path = self._get_error_file_path()
        if not path:
            return
        from regrow.workers.errors._failure import read_error_file

        error, fault, _ = read_error_file(rootcause_error_file)
        if fault is not None:
            _complain(f"the child's error file {rootcause_error_file} is not passed on: it {fault}")
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, error, error_code)
        self._write_json(path, error)

    def _write_json(self, path: str, data: object) -> None:
        from regrow.utils import to_json

        self._write_error_file(path, to_json(data))

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Put the text in place of whatever the file had; a failure is one line on stderr."""
        beside = f"{file_path}.{os.getpid()}.tmp"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(error_msg)
            os.replace(beside, file_path)  # noqa: PTH105 - workers start sooner without pathlib
        except OSError as error:
            with suppress(OSError):  # it was never made, or is as stuck as the write
                os.unlink(beside)
            why = f"[Errno {error.errno}] {error.strerror}"
            _complain(f"the error file {file_path} cannot be written: {why}")


def _complain(text: str) -> None:
    """One line on stderr, if there is one that takes it: the caller has an error to pass on."""
    try:
        sys.stderr.write(f"regrow: {text}\n")
    except (OSError, ValueError, AttributeError):
        return
