"""Take the file descriptors of this process, for tests of code that finds none free."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def few_descriptors(free: int = 0) -> Iterator[None]:
    """Context manager: this process can open `free` descriptors, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
