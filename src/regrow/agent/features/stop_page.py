"""`StopPage`: the memory in which the workers of a node find out where they stop.

This is the agent's side of `regrow._stopping`, which has the layout and the protocol.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import ExitStack, suppress
from time import sleep
from typing import Final

from regrow._stopping import (
    DEADLINE,
    DECISION,
    HOLD,
    POSITION,
    RUN,
    SLOT_WORDS,
    SLOTS,
    STOP_ENV,
    STOPS,
    UNUSED,
    USE,
    USES_AND_DIES,
    latest,
)

_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}
"""Number of the system call."""
_GLOBAL: Final = 1
"""MEMBARRIER_CMD_GLOBAL: all running threads of the host pass a memory barrier."""
_DRAIN_S: Final = 0.05
"""Without that system call: seconds in which every processor has written its delayed stores."""


class StopPage:
    """The page of all attempts of one agent; thread-safe.

    Args:
        workers: number of workers of this node.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._workers = workers
        size = (SLOTS + workers * SLOT_WORDS) * 8
        with ExitStack() as resources:
            self._memory_fd = os.memfd_create("regrow-stop", os.MFD_CLOEXEC)
            resources.callback(os.close, self._memory_fd)
            os.posix_fallocate(self._memory_fd, 0, size)
            memory = resources.enter_context(mmap.mmap(self._memory_fd, size))
            self._words = resources.enter_context(memoryview(memory).cast("q"))
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            resources.callback(os.close, self._read_fd)
            resources.callback(os.close, self._write_fd)
            self._resources = resources.pop_all()
        self._closed = False

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variable for the worker of `local_rank`."""
        root = f"/proc/{os.getpid()}/fd"
        return {STOP_ENV: f"{root}/{self._memory_fd}|{root}/{self._read_fd}|{local_rank}"}

    def clear(self) -> None:
        """Clear the slots, for the workers of the next attempt."""
        with self._lock:
            for at in range(SLOTS, len(self._words)):
                self._words[at] = 0

    def hold(self, deadline: float) -> None:
        """Let each rank wait in its next call; `positions` then shows what no rank passes.

        Args:
            deadline: monotonic seconds at which the workers are killed.
        """
        with self._lock:
            self._words[DEADLINE] = int(deadline * 1e9)
            self._words[DECISION] = HOLD
        _let_pass_a_barrier()

    def decide(self, decision: int) -> None:
        """Let the ranks that wait go on.

        Args:
            decision: the position at which all ranks stop, or `RUN` or `END`.
        """
        with self._lock:
            if self._closed or self._words[DECISION] == decision:
                return
            self._words[DECISION] = decision
            with suppress(BlockingIOError):
                if decision == RUN:
                    os.read(self._read_fd, 64)
                else:
                    os.write(self._write_fd, b"\0")

    def set_deadline(self, deadline: float | None) -> None:
        """Show the workers when they are killed, in monotonic seconds; None: not known."""
        with self._lock:
            if not self._closed:
                self._words[DEADLINE] = int((deadline or 0) * 1e9)

    @property
    def decision(self) -> int:
        """The position at which all ranks stop, `RUN`, `HOLD` or `END`."""
        with self._lock:
            return RUN if self._closed else int(self._words[DECISION])

    def position(self) -> int:
        """Return the latest position of the ranks of this node that call `should_stop`."""
        uses, positions = self._column(USE), self._column(POSITION)
        return latest(at for use, at in zip(uses, positions, strict=True) if use != UNUSED)

    def using(self) -> int:
        """Return how many ranks of this node call `should_stop`."""
        return sum(use != UNUSED for use in self._column(USE))

    def die_of_sigterm(self) -> list[int]:
        """Return the local ranks that SIGTERM ends at once, if they can run its handler."""
        return [slot for slot, use in enumerate(self._column(USE)) if use == USES_AND_DIES]

    def stopped(self) -> int:
        """Return how many ranks of this node got True."""
        return sum(use == STOPS for use in self._column(USE))

    def _column(self, field: int) -> list[int]:
        with self._lock:
            slots = range(0 if self._closed else self._workers)
            return [self._words[SLOTS + slot * SLOT_WORDS + field] for slot in slots]

    def close(self) -> None:
        """Release the memory and the pipe; running workers keep their own mapping."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._resources.close()


def _let_pass_a_barrier() -> None:
    """Return when all threads of this host have passed a memory barrier."""
    import ctypes

    number = _MEMBARRIER.get(os.uname().machine)
    # The kernel, or a filter of the container, may not have the call.
    if number is None or ctypes.CDLL(None).syscall(number, _GLOBAL, 0) != 0:
        sleep(_DRAIN_S)
