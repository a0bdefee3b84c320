"""What wakes a thread that waits in torch while it is interrupted, and not in a collective.

A collective ends with its group, which the abort sees to, but for what gloo forgets then
(`_torch_buffers`). Making a group is waiting, too, for ranks that may never come: in a store, and
then for their connections. The thread may begin with that just when the abort is through. So what
frees it is done again and again until the function was left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def waking(size: int) -> Callable[[], None]:
    """Return what wakes the calling thread where it waits in torch, for another one to call.

    Args:
        size: the ranks that a group has at most.

    Raises:
        OSError: `/proc/self` cannot be read; what is returned raises it, too.
    """
    from regrow.inprocess._torch_buffers import end_gloo_waits
    from regrow.inprocess._torch_connecting import complete_connections
    from regrow.inprocess._torch_store_wait import end_store_wait, sockets

    thread, outside, done = threading.get_native_id(), sockets(), set[int]()

    def wake() -> None:
        if "torch" in sys.modules:
            complete_connections(size, done)
            end_store_wait(thread, outside)
            end_gloo_waits()

    return wake
