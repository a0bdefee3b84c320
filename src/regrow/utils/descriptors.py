"""Wait for file descriptors with `poll`, which unlike `select` takes descriptors of any number."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def ready(fds: Iterable[int], seconds: float | None = None, event: int = select.POLLIN) -> set[int]:
    """Wait until a descriptor is ready; return the ready ones, also those that are broken.

    Args:
        fds: the descriptors.
        seconds: longest wait; 0 or less does not wait, None waits without a limit.
        event: POLLIN for reading, POLLOUT for writing.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, event)
    return {fd for fd, _ in poll.poll(None if seconds is None else max(seconds, 0.0) * 1000)}
