"""Beating without a line of code: `import regrow` in a worker of `regrow run --heartbeat`.

The agent sets REGROW_HEARTBEAT for its workers, and an environment is inherited: by the processes
of a data loader, by a compiler that a library starts, by whatever the script calls. Each has the
rank of its worker, and a rank that beats twice is a reason to end the job. So the first process to
import regrow takes the rank by binding a name in the kernel's own namespace for sockets, which
takes no file, is free again when that process has ended, however it ends, and is refused to any
other. The name is made of the attempt's secret, so that no other user of the host can take it.
Whoever comes second is somebody's child, and does not beat.

The others are waited for as long as it takes, by a thread, and not by the import: the agents watch
over the processes, and one worker may import regrow minutes after another. When all are there, it
is as strict as `heartbeat.start`.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Mapping

from regrow.heartbeat._terms import HEARTBEAT_ENV
from regrow.utils import get_logger

logger = get_logger(__name__)

_starting: threading.Thread | None = None

_OF_AN_ATTEMPT = ("REGROW_STORE_TOKEN", "REGROW_STORE", "TORCHELASTIC_RUN_ID", "REGROW_ATTEMPT")


def begin() -> None:
    """Start to beat, if this is the worker's own process and not one that it has started."""
    environ = os.environ
    try:
        period = float(environ[HEARTBEAT_ENV])
        name = claim(environ)
    except (KeyError, ValueError) as error:
        logger.warning(
            "%s=%r is set, but this process does not beat: %r. The variable is set by `regrow run"
            " --heartbeat PERIOD`, with the rank",
            HEARTBEAT_ENV,
            environ.get(HEARTBEAT_ENV),
            error,
        )
        return
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        taken.bind(name)
    except OSError as error:
        taken.close()
        if error.errno != errno.EADDRINUSE:
            logger.warning("this worker does not beat, as it cannot take its rank: %s", error)
        return
    global _starting
    # In a thread, as what it imports costs more than regrow itself.
    _starting = threading.Thread(
        target=_start, args=(period, taken), name="regrow-heartbeat-start", daemon=True
    )
    _starting.start()


def wait() -> None:
    """Return when the heartbeat that begins by itself has begun, if there is to be one."""
    if _starting is not None:
        _starting.join()


def claim(environ: Mapping[str, str]) -> bytes:
    """Return the abstract address that the process which beats for a rank holds.

    Raises:
        KeyError: a variable is missing that every worker has.
    """
    import hashlib

    parts = [environ["RANK"], *(environ.get(name, "") for name in _OF_AN_ATTEMPT)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return b"\0regrow-heartbeat-" + digest[:32].encode()


def _start(period: float, taken: socket.socket) -> None:
    try:
        from regrow.heartbeat import _api

        _api.start_by_itself(period)
    except Exception:
        taken.close()
        logger.exception("this worker does not beat")
        return
    taken.detach()  # it is held as long as this process lives
