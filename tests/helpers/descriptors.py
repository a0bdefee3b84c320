"""The descriptors and threads of this process, and how to leave few descriptors free."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Return every open descriptor with what it refers to.

    A test of code that closes what it opens asserts `open_files() <= before`. A count would not do:
    a thread or an object that an older test left behind may close its own descriptor at any time.
    For the same reason nothing that exists before a test is expected to exist after it.
    """
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the folder itself, already closed
            found.add((fd, str(Path("/proc/self/fd", fd).readlink())))
    return found


def in_use() -> set[object]:
    """Return every open descriptor and every thread; a test compares as with `open_files`."""
    return {*open_files(), *threading.enumerate()}


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
