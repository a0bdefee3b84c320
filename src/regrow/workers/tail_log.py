"""torch's `TailLog`, for programs that use it: copies the lines of growing files to a stream.

regrow's own workers do not need it: their output passes through the agent, which is notified of new
output. The class exists for programs that use torch's class of this name, and polls the files as
torch's class does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import BinaryIO, TextIO

from regrow.utils import start_thread
from regrow.workers.logs.lines import Lines

__all__ = ["TailLog"]

CHUNK = 32 * 1024
"""Bytes read at once."""


class TailLog:
    """Copies lines with a header; `start` begins, `stop` ends after all existing lines are copied.

    Args:
        name: lines start with `[<name><key>]:`.
        log_files: paths by key, the local rank; they need not exist yet.
        dst: the stream to copy to.
        log_line_prefixes: another start of the lines, by key.
        interval_sec: seconds between two polls of the files.
        log_line_filter: returns whether to copy a line, which includes its newline.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._name = name
        self._paths = log_files
        self._prefixes = {key: f"[{name}{key}]:" for key in log_files} | dict(
            log_line_prefixes or {}
        )
        self._dst = dst
        self._interval = interval_sec
        self._filter = log_line_filter
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> TailLog:
        """Start to copy; return this object."""
        if self._paths and self._dst:
            self._thread = start_thread(self._run, f"TailLog_{self._name}")
        return self

    def stop(self) -> None:
        """Copy the current content of the files, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stop.is_set()

    def _run(self) -> None:
        files: dict[int, BinaryIO] = {}
        lines = {key: Lines("") for key in self._paths}
        try:
            with ExitStack() as opened:
                stopping = False
                while not stopping:
                    stopping = self._stop.is_set()
                    for key, path in self._paths.items():
                        try:
                            file = files.get(key) or opened.enter_context(open(path, "rb", 0))
                        except OSError:  # the file does not exist yet
                            continue
                        files[key] = file
                        while data := file.read(CHUNK):
                            self._write(key, lines[key].feed(data))
                    self._stop.wait(self._interval)
                for key in self._paths:
                    self._write(key, lines[key].rest())
        except (OSError, ValueError) as error:  # the stream was closed, or its reader is gone
            from regrow.utils import get_logger

            get_logger(__name__).error("TailLog %s ends: %s", self._name, error)

    def _write(self, key: int, lines: bytes) -> None:
        for line in lines.decode(errors="replace").split("\n")[:-1]:
            if self._filter(line + "\n"):
                self._dst.write(f"{self._prefixes[key]}{line}\n")
