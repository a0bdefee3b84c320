"""A standby: a process that runs the script up to its wrapped call, and waits there for a place.

`regrow run --standby K` keeps K of them on each node. When a rank is lost, one of them takes its
place (`workers.guardian.template`). It then has the rank's environment and standard streams, and
makes the wrapped call. On a node that waits for a place in a round, there is one
for each worker, and the first workers start from them.

Until then it has no rank, and must not take part in anything. So the variables with its rank are
missing, and a script that reads one gets `StandbyError`, even if it gives a default. On a node that
waits, the variables of the round are missing in the same way. If the script ends before
its wrapped call, the standby reports the reason, and the agent starts no other one.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

from regrow import _progress, _stopping

if TYPE_CHECKING:
    import socket
    from types import TracebackType

STANDBY_ENV = "REGROW_STANDBY"
"""The descriptor of the socket to the guardian; only in a standby."""
OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Variables that a standby does not have."""
OF_A_ROUND = (
    *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("REGROW_STORE", "REGROW_STORE_TOKEN", "REGROW_STORE_TLS"),
    *("REGROW_ATTEMPT", "REGROW_FENCING_TOKEN", "TORCHELASTIC_RESTART_COUNT"),
)
"""Variables that a standby of a node that waits for a place does not have either."""


class StandbyError(RuntimeError):
    """The script needs a rank before its wrapped call, so it cannot run as a standby."""


class _WithoutRank(os._Environ[str]):
    """The environment of a standby."""

    def __getitem__(self, name: str) -> str:
        if name in OF_A_RANK:
            raise StandbyError(
                f"the script reads {name} before its wrapped call, and a standby (--standby) has no"
                f" rank yet: read it in the wrapped function"
            )
        if name in OF_A_ROUND and _waits:
            reads = "uses worker_store()" if name == "REGROW_STORE" else f"reads {name}"
            raise StandbyError(
                f"the script {reads} before its wrapped call, and this host still waits for a place"
                f" in a round: do so in the wrapped function"
            )
        return super().__getitem__(name)


_waits = False
"""Whether this process is a standby of a node that waits for a place."""
_control: socket.socket | None = None
"""The socket to the guardian; None in a process that is no standby."""


def begin() -> None:
    """Begin as a standby; called at the first import of regrow."""
    global _control, _waits
    import socket

    _control = socket.socket(fileno=int(os.environ.pop(STANDBY_ENV)))
    _waits = "WORLD_SIZE" not in os.environ
    os.set_inheritable(_control.fileno(), False)
    os.environ.__class__ = _WithoutRank
    sys.excepthook = _report
    atexit.register(_end, "the script has ended without a call of a wrapped function")


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that ends the standby, and report it to the agent."""
    sys.__excepthook__(kind, error, trace)
    from regrow.utils import headline

    _end(headline(error))


def _end(why: str) -> None:
    """Report why this process is no standby any more; no effect in a worker."""
    global _control
    control, _control = _control, None
    if control is not None:
        from regrow.workers.guardian import template_process

        template_process.answer(control, b"unfit", why.encode(errors="replace")[:1000])


def take_place() -> None:
    """Wait for the place of a rank, if this process is a standby, and take it.

    The process ends with its attempt, if it gets no place.
    """
    global _control
    control, _control = _control, None
    if control is None:
        return
    from regrow.workers.guardian import procfs, spawn, template_process

    template_process.answer(control, b"ready", b"%d" % template_process.resident())
    _, env, directory, gate, mapping = template_process.receive(control)
    template_process.answer(control, b"forked", b"%d" % os.getpid())
    template_process.await_gate(gate)
    control.close()
    os.close(directory)
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    spawn.move(mapping)
    os.environ.__class__ = os._Environ
    os.environb.update(env)  # what the script has set stays
    os.environ[procfs.WORKER_PID] = str(os.getpid())
    os.environ[procfs.STARTED_FROM] = "standby"
    _progress.reopen()
    _stopping.reopen()
    import regrow

    regrow._start_worker()


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except Exception:  # noqa: BLE001 - the script may have put anything there
        return
