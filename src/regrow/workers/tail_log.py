"""`TailLog`: copy the lines of growing files, which others write, to a stream.

regrow's own workers do not need it: their output passes through the agent, which knows when
there is more. It is here for programs that use it as torch's. Nothing is polled: the kernel says
(inotify) when a file changes or appears, or a directory on the way to it.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, TextIO

from regrow.workers._lines import Lines

__all__ = ["TailLog"]

IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
CHUNK = 32 * 1024


class TailLog:
    """Copies lines with a header; `start` begins, `stop` ends when all that is there is copied.

    Args:
        name: lines start with `[<name><key>]:`.
        log_files: paths by key, the local rank; they need not exist yet.
        dst: where lines go.
        log_line_prefixes: another start of the lines, by key.
        interval_sec: unused; torch's, which polls.
        log_line_filter: whether a line, with its newline, is copied.
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
        prefixes = {key: f"[{name}{key}]:" for key in log_files} | dict(log_line_prefixes or {})
        self._files = [_Tail(path, prefixes[key]) for key, path in log_files.items()]
        self._dst = dst
        self._filter = log_line_filter
        self._stop = -1
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> TailLog:
        """Begin to copy; itself.

        Raises:
            OSError: the kernel gives no inotify instance.
        """
        if self._files and self._dst:
            watch = _Watch()
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(
                target=self._run, args=(watch,), name=f"TailLog_{self._name}", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Copy what is in the files by now, and end."""
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._thread = None
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def _run(self, watch: _Watch) -> None:
        poll = select.poll()
        poll.register(watch.fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        stopping = False
        try:
            while not stopping:
                # Watched first and read then, or what changes in between would not be noticed.
                while any(watch.add(tail.nearest()) for tail in self._files):
                    pass
                for tail in self._files:
                    self._copy(tail)
                stopping = any(fd == self._stop for fd, _ in poll.poll())
                watch.clear()
            for tail in self._files:
                self._copy(tail)
                self._write(tail.prefix, tail.lines.rest())
        except (OSError, ValueError) as error:  # the stream was closed, or its reader is gone
            from regrow.utils import get_logger

            get_logger(__name__).error("TailLog %s ends: %s", self._name, error)
        finally:
            watch.close()
            for tail in self._files:
                tail.close()

    def _copy(self, tail: _Tail) -> None:
        while data := tail.read():
            self._write(tail.prefix, tail.lines.feed(data))

    def _write(self, prefix: str, lines: bytes) -> None:
        for line in lines.decode(errors="replace").split("\n")[:-1]:
            if self._filter(line + "\n"):
                self._dst.write(f"{prefix}{line}\n")


class _Tail:
    """One file."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = os.path.realpath(path)
        self.prefix = prefix
        self.lines = Lines("")
        self.file: BinaryIO | None = None

    def read(self) -> bytes:
        """What it has grown by, a piece of it; nothing if it is not there yet."""
        if self.file is None:
            try:
                self.file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - until `close`
            except OSError:
                return b""
        return self.file.read(CHUNK)

    def nearest(self) -> str:
        """The innermost directory on the way to the file that exists."""
        directory = os.path.dirname(self._path)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        return directory

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Watch:
    """An inotify instance that tells of changes in directories."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(
                number,
                f"no inotify instance: {os.strerror(number)}; see fs.inotify.max_user_instances",
            )
        self._watched: set[str] = set()

    def add(self, directory: str) -> bool:
        """Watch a directory; whether that is new."""
        if directory in self._watched:
            return False
        self._watched.add(directory)
        mask = IN_MODIFY | IN_CREATE | IN_MOVED_TO
        if self._libc.inotify_add_watch(self.fd, os.fsencode(directory), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(
                number,
                f"cannot be watched: {os.strerror(number)}; see fs.inotify.max_user_watches",
                directory,
            )
        return True

    def clear(self) -> None:
        """Forget what was told."""
        try:
            while os.read(self.fd, 65536):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
