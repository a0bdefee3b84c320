"""Countdown timers: a worker that does not leave a block of code in time is reaped.

    with regrow.expires(after=60):
        train_step()

`expires` uses a `TimerClient`. The client sends a `TimerRequest` at the start and at the end of the
block to a `TimerServer` in another process. There are two pairs of client and server. The file
timer works over a named pipe; agents use it (`regrow run --timers`). The local timer works over a
multiprocessing queue.

Both are loaded at their first use, so a script pays only for the one that it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
from regrow.timer.timed_block import configure, expires
from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.timer.fifo.client import FileTimerClient
    from regrow.timer.fifo.request import FileTimerRequest
    from regrow.timer.fifo.server import FileTimerServer
    from regrow.timer.local_timer import (
        LocalTimerClient,
        LocalTimerServer,
        MultiprocessingRequestQueue,
    )

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "fifo.client": "FileTimerClient",
        "fifo.request": "FileTimerRequest",
        "fifo.server": "FileTimerServer",
        "local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    },
)
