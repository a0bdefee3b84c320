"""A log pump under test: the test writes to its streams and reads its console."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from regrow.workers.logs.follower import Follower
from regrow.workers.logs.lines import Sink
from regrow.workers.logs.pump import LogPump
from regrow.workers.logs.specs import LogsDest

Name = Literal["stdout", "stderr"]
NAMES: tuple[Name, Name] = ("stdout", "stderr")


def destinations(folder: Path, ranks: int = 2, *, tee: bool = True) -> LogsDest:
    """Send all streams to files under a folder; with `tee` also to the console."""
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


def follower(out: int, err: int) -> Follower:
    """Return a follower with these descriptors as its console."""
    return Follower(Sink(err), {"stdout": Sink(out), "stderr": Sink(err)})


class Rig:
    """A started pump; the test acts as the workers, and the console is two files.

    Args:
        folder: for all files.
        dest: destination of the streams; by default two ranks, all with tee.
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
        if "follower" not in options:
            out = self._fds[0] if stdout_fd is None else stdout_fd
            options["follower"] = follower(out, self._fds[1])
        self.pump = LogPump("worker", self.dest, **options)
        self.writers: dict[tuple[int, Name], int] = {}
        for rank in self.dest.stdouts:
            for number, fd in self.pump.writer_fds(rank).items():
                self.writers[rank, NAMES[number - 1]] = os.dup(fd)
        self.pump.close_writers()
        self.pump.start()

    def write(self, rank: int, data: bytes, name: Name = "stdout") -> None:
        """Write all data as a worker does; wait while the pipe is full."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.writers[rank, name], left) :]

    def close(self) -> None:
        """Let all workers end."""
        while self.writers:
            os.close(self.writers.popitem()[1])

    def stop(self, timeout: float = 30.0) -> None:
        """End the workers, then the pump."""
        self.close()
        self.pump.stop(timeout)

    def clear(self) -> None:
        """Close the console."""
        self.close()
        self.pump.stop(0)
        while self._fds:
            os.close(self._fds.pop())

    def stored(self, rank: int, name: Name = "stdout") -> bytes:
        """Return the content of the log file."""
        return Path(
            (self.dest.stdouts if name == "stdout" else self.dest.stderrs)[rank]
        ).read_bytes()

    def shown(self, name: Name = "stdout") -> bytes:
        """Return the console output."""
        return self._console[name].read_bytes()
