"""Countdown timers: a worker that does not come out of a block of code in time is reaped.

    with regrow.expires(after=60):
        train_step()

`expires` speaks to a `TimerClient`, which sends a `TimerRequest` at the begin and at the end of the
block to a `TimerServer` in another process. Two pairs are there: the file timer, over a named pipe,
which agents use (`regrow run --timers`), and the local timer, over a multiprocessing queue.

Both are loaded when first used, so that a script pays for the one that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow._lazy import lazily
from regrow.timer._api import RequestQueue, TimerClient, TimerRequest, TimerServer
from regrow.timer._expires import configure, expires

if TYPE_CHECKING:
    from regrow.timer._file_client import FileTimerClient
    from regrow.timer._file_request import FileTimerRequest
    from regrow.timer._file_server import FileTimerServer
    from regrow.timer._local import LocalTimerServer, MultiprocessingRequestQueue
    from regrow.timer._local_client import LocalTimerClient

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

__getattr__ = lazily(
    globals(),
    {
        "FileTimerClient": "_file_client",
        "FileTimerRequest": "_file_request",
        "FileTimerServer": "_file_server",
        "LocalTimerClient": "_local_client",
        "LocalTimerServer": "_local",
        "MultiprocessingRequestQueue": "_local",
    },
)
