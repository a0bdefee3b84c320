"""Public names for training scripts, such as `step`, `should_stop`, `State` and `expires`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from regrow import compat
from regrow._progress import phase, step
from regrow._stopping import deadline, should_stop
from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.state import State, rng
    from regrow.timer import expires

compat.install()

__version__ = "0.1.0"
__all__ = [
    "State",
    "__version__",
    "deadline",
    "expires",
    "phase",
    "rng",
    "should_stop",
    "step",
]

__getattr__, __dir__ = lazily(globals(), {"state": "State rng", "timer": "expires"})


def _begin_heartbeat() -> None:
    """Start the heartbeats of this worker if the job runs with `regrow run --heartbeat`."""
    if os.environ.get("REGROW_HEARTBEAT"):
        from regrow.heartbeat.automatic import begin

        begin()


def _end_heartbeat() -> None:
    """Leave the heartbeats of the job because this process has finished its work."""
    api = sys.modules.get("regrow.heartbeat.api")
    leave = getattr(api, "leave", None)  # another thread may be importing it
    if leave is not None:
        leave()


def _arm() -> None:
    """Let the agent request this process's stacks if `--timers` or `--heartbeat` was given.

    The agent compares a hung worker with the other workers. Those need the stack handler too,
    also if they have not started a timer of their own yet.
    """
    if os.environ.get("TORCHELASTIC_TIMER_FILE"):
        from regrow.timer.stacks.answering import arm

        arm()


def _arm_chaos() -> None:
    """Let the agent inject faults into this worker if the job runs with `regrow run --chaos`."""
    if os.environ.get("REGROW_CHAOS") and _is_worker():
        from regrow._chaos import arm

        arm()


def _is_worker() -> bool:
    """Return whether this process is a worker itself, and not a child process of one."""
    return os.environ.get("REGROW_WORKER_PID") == str(os.getpid())


def _record_exceptions() -> None:
    """Let the report of the job name an exception that ends this worker."""
    if _is_worker():
        from regrow._uncaught import install

        install()


def _start_worker() -> None:
    """Do what a worker needs at its first import of this package.

    In a worker that started from a template or a standby, the package was imported before it became
    a worker. So such a worker calls this itself.
    """
    _record_exceptions()
    _arm()
    _arm_chaos()
    _begin_heartbeat()  # last, because it starts a thread that imports modules of this package


if os.environ.get("REGROW_STANDBY"):
    from regrow import _standby

    _standby.begin()
else:
    _start_worker()
