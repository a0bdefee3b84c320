"""End workers that SIGTERM would end at once if they did not wait in native code.

`regrow.should_stop` installs a handler of SIGTERM, which runs only in Python. Without it, SIGTERM
ends such a worker at once: the other ranks of a failed one wait in a collective of NCCL. So they
get SIGKILL soon after the SIGTERM. It ends the process of the worker alone. What the worker leaves
behind has its whole grace.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from regrow.workers import PContext

NATIVE_S: Final = 0.5
"""Seconds after SIGTERM in which a worker that runs Python has handled it."""


def kill_soon(context: PContext, local_ranks: Iterable[int]) -> None:
    """Kill the processes of workers after `NATIVE_S`; do not wait.

    Args:
        context: the workers, which get SIGTERM at about this time.
        local_ranks: those to kill.
    """
    pids = context.pids()
    processes = []
    for local_rank in local_ranks:
        with suppress(KeyError, OSError):  # it has not started, or has ended
            processes.append(os.pidfd_open(pids[local_rank]))
            if context.ended(local_rank) is not None:  # the number may be of another process
                os.close(processes.pop())

    def kill() -> None:
        for process in processes:
            with suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)

    if processes:
        timer = threading.Timer(NATIVE_S, kill)
        timer.daemon = True
        timer.start()
