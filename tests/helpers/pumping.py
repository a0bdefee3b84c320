"""A pump under test: streams that the test writes to, and a console that it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from regrow.workers._console import Follower
from regrow.workers._logs import LogsDest
from regrow.workers._pump import LogPump
from regrow.workers._sink import Sink

Name = Literal["stdout", "stderr"]
NAMES: tuple[Name, Name] = ("stdout", "stderr")


def destinations(folder: Path, ranks: int = 2, *, tee: bool = True) -> LogsDest:
    """All streams to files under a folder, and shown if `tee`."""
    dest = LogsDest(
        filtered_stdout=str(folder / "filtered_stdout.log"),
        filtered_stderr=str(folder / "filtered_stderr.log"),
    )
    for rank in range(ranks):
        (folder / str(rank)).mkdir(parents=True)
        dest.stdouts[rank] = str(folder / str(rank) / "stdout.log")
        dest.stderrs[rank] = str(folder / str(rank) / "stderr.log")
    if tee:
        dest.tee_stdouts, dest.tee_stderrs = dict(dest.stdouts), dict(dest.stderrs)
    return dest


class Rig:
    """A started pump with the test in the workers' place; its console is two files.

    Args:
        folder: for all files.
        dest: where streams go; by default two ranks, all tee'd.
        stdout_fd: another console than a file.
        options: of the pump.
    """

    def __init__(
        self,
        folder: Path,
        dest: LogsDest | None = None,
        *,
        stdout_fd: int | None = None,
        **options: Any,
    ) -> None:
        self.dest = dest if dest is not None else destinations(folder / "logs")
        self._console = {name: folder / f"console_{name}" for name in NAMES}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fds = [os.open(path, flags) for path in self._console.values()]
        options.setdefault("follower", Follower(Sink(self._fds[1])))
        if stdout_fd is None:
            stdout_fd = self._fds[0]
        self.pump = LogPump(
            "worker", self.dest, stdout_fd=stdout_fd, stderr_fd=self._fds[1], **options
        )
        self._writers: dict[tuple[int, Name], int] = {}
        for rank in self.dest.stdouts:
            for name in NAMES:
                fd = self.pump.writer_fd(rank, name)
                if fd is not None:
                    self._writers[rank, name] = os.dup(fd)
        self.pump.close_writers()
        self.pump.start()

    def write(self, rank: int, data: bytes, name: Name = "stdout") -> None:
        """Print as a worker does: to the end, however long the pipe is full."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._writers[rank, name], left) :]

    def close(self) -> None:
        """Let all workers end."""
        while self._writers:
            os.close(self._writers.popitem()[1])

    def stop(self, timeout: float = 30.0) -> None:
        """End the workers, then the pump."""
        self.close()
        self.pump.stop(timeout)

    def clear(self) -> None:
        """Give back the console."""
        self.close()
        self.pump.stop(0)
        while self._fds:
            os.close(self._fds.pop())

    def stored(self, rank: int, name: Name = "stdout") -> bytes:
        """What the log file has."""
        return Path(
            (self.dest.stdouts if name == "stdout" else self.dest.stderrs)[rank]
        ).read_bytes()

    def shown(self, name: Name = "stdout") -> bytes:
        """What the console has."""
        return self._console[name].read_bytes()
