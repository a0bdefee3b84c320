"""The agent's side of `regrow._progress`: a page of memory and a pipe that its workers write into.

See `regrow._progress` for the layout and the reasons. The page is made anew for every attempt, so
that a worker of an old attempt which is slow to die cannot write into the new one's figures.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from regrow._progress import PROGRESS_ENV, SLOT, STANDS_ALONE

_CLOSE = b"q"
_FIRST_STEP = b"\0"


@dataclass(frozen=True, slots=True)
class Steps:
    """How far one worker came, with monotonic times in seconds."""

    first_step: int
    first_monotonic: float
    last_step: int
    last_monotonic: float


class ProgressBoard:
    """One attempt's page, and the thread that hears of its workers' first steps.

    Args:
        slots: number of local ranks.
        on_first_step: called from the thread when a worker has reported its first step.
        on_told: called from the thread with what a worker has told for an event: a line of JSON.
    """

    def __init__(
        self,
        slots: int,
        on_first_step: Callable[[], None],
        on_told: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        self._slots = slots
        self._on_first_step = on_first_step
        self._on_told = on_told
        self._lock = threading.Lock()  # read and close are called from different threads
        size = slots * SLOT.size + 1
        self._memory_fd = os.memfd_create("regrow-progress", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._memory_fd, 0, size)
            self._memory = mmap.mmap(self._memory_fd, size)
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._memory_fd)
            raise
        self._thread = threading.Thread(target=self._listen, name="regrow-first-steps", daemon=True)
        self._thread.start()

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variable that tells the worker of `local_rank` where to report."""
        root = f"/proc/{os.getpid()}/fd"
        address = f"{root}/{self._memory_fd}|{root}/{self._write_fd}|{local_rank}"
        return {PROGRESS_ENV: address}

    def read(self) -> dict[int, Steps]:
        """The steps of every local rank that has reported any; none after `close`."""
        found = {}
        with self._lock:
            for slot in range(0 if self._memory.closed else self._slots):
                steps = Steps(*SLOT.unpack_from(self._memory, slot * SLOT.size)[:4])
                if steps.first_monotonic > 0:
                    found[slot] = steps
        return found

    def replaceable(self, local_rank: int) -> bool:
        """Whether the others go on when the worker of this local rank ends, or has ended."""
        with self._lock:
            if self._memory.closed:
                return False
            standing = SLOT.unpack_from(self._memory, local_rank * SLOT.size)[4]
        return bool(standing != STANDS_ALONE)

    def stop(self) -> None:
        """Let the workers know that they are being stopped."""
        with self._lock:
            if not self._memory.closed:
                self._memory[-1] = 1

    def close(self) -> None:
        """End the thread and give everything back; workers that still run keep their own view."""
        os.write(self._write_fd, _CLOSE)
        self._thread.join()
        with self._lock:
            self._memory.close()
        for fd in (self._memory_fd, self._read_fd, self._write_fd):
            os.close(fd)

    def _listen(self) -> None:
        unread = b""
        while True:
            unread += os.read(self._read_fd, 4096)
            while unread:
                first, rest = unread[:1], unread[1:]
                if first == _CLOSE:
                    return
                if first == _FIRST_STEP:
                    self._on_first_step()
                else:
                    line, end, rest = unread.partition(b"\n")
                    if not end:
                        break
                    self._on_told(line)
                unread = rest
