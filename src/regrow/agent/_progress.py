"""The agent's side of `regrow.step`: a page of memory that its workers write their steps into.

See `regrow._progress` for the layout and the reasons. The page is made anew for every attempt, so
that a worker of an old attempt which is slow to die cannot write into the new one's figures.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from regrow._progress import PROGRESS_ENV, SLOT


@dataclass(frozen=True, slots=True)
class Steps:
    """How far one worker came, with monotonic times in seconds."""

    first_step: int
    first_monotonic: float
    last_step: int
    last_monotonic: float


class ProgressBoard:
    """One attempt's page and the pipe by which a worker's first step is heard of.

    Args:
        slots: number of local ranks.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        size = slots * SLOT.size
        self._memory_fd = os.memfd_create("regrow-progress", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._memory_fd, 0, size)
            self._memory = mmap.mmap(self._memory_fd, size)
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            os.close(self._memory_fd)
            raise

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variable that tells the worker of `local_rank` where to report."""
        root = f"/proc/{os.getpid()}/fd"
        address = f"{root}/{self._memory_fd}|{root}/{self._write_fd}|{local_rank}"
        return {PROGRESS_ENV: address}

    @property
    def wake_fd(self) -> int:
        """Readable when a worker has reported its first step."""
        return self._read_fd

    def acknowledge(self) -> None:
        """Empty the pipe behind `wake_fd`."""
        try:
            while os.read(self._read_fd, 4096):
                pass
        except BlockingIOError:
            return

    def read(self) -> dict[int, Steps]:
        """The steps of every local rank that has reported any."""
        found = {}
        for slot in range(self._slots):
            steps = Steps(*SLOT.unpack_from(self._memory, slot * SLOT.size))
            if steps.first_monotonic > 0:
                found[slot] = steps
        return found

    def close(self) -> None:
        """Give the memory and the descriptors back; workers that still run keep their view."""
        self._memory.close()
        for fd in (self._memory_fd, self._read_fd, self._write_fd):
            os.close(fd)
