"""Automatic heartbeats: `import regrow` starts one in a worker of `regrow run --heartbeat`.

The agent sets REGROW_HEARTBEAT for its workers. Other processes inherit the environment: a data
loader's processes, a compiler that a library starts, any command of the script. Each of these has
the rank of its worker, and two heartbeats of one rank end the job. So the process that runs the
heartbeat of a rank claims the rank: it binds a name in the kernel's namespace of abstract sockets.
The name needs no file. The kernel frees it at any end of the process, and refuses it to any other
process. It contains the attempt's secret, so no other user of the host can take it.

The worker's own process binds the name when it imports regrow. A tool that the worker runs may
import regrow first. If the tool took the rank, the end of the tool would end the heartbeat. So a
process that another process of the worker started leaves the rank to the others for `DELAY`
seconds. If the rank is still free then, it takes the rank: the training may run below a shell
script, or below a launcher that never imports regrow.

A thread waits for the other workers, so the import does not wait. The wait has no limit: the agents
monitor the processes, and one worker may import regrow minutes after another. When all workers have
arrived, the heartbeat is as strict as that of `heartbeat.start`.

The thread imports modules. A forked child does not have this thread. If a module was in the middle
of its import during the fork, the child would wait for the import's lock without end. So a fork
waits until the imports are complete, and the threads of a heartbeat import nothing later (`_load`).
The end of the program waits too: Python may crash if it ends in the middle of a thread's import.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from regrow.heartbeat.terms import HEARTBEAT_ENV
from regrow.utils import get_logger

logger = get_logger(__name__)

DELAY = 10.0
"""Seconds for which a process below the worker's own process leaves the rank to the others."""
_WAIT = 10.0
"""Seconds that a fork, or the end of the program, waits for the imports of that thread."""

starting: threading.Thread | None = None
_asked = threading.Event()
"""Set when the script calls `heartbeat.start`, and when the script ends."""
_ended = False
_importing = threading.RLock()
"""Held by the importing thread, and by a thread that forks."""

_OF_AN_ATTEMPT = ("REGROW_STORE_TOKEN", "REGROW_STORE", "TORCHELASTIC_RUN_ID", "REGROW_ATTEMPT")


def begin() -> None:
    """Start the heartbeat of this worker, unless another process of the worker has it."""
    environ = os.environ
    try:
        period = float(environ[HEARTBEAT_ENV])
        name = claim(environ)
    except (KeyError, ValueError) as error:
        logger.warning(
            "heartbeat: this process sends no heartbeats, although %s=%r is set: %r. Do not set "
            "this variable yourself; use `regrow run --heartbeat PERIOD`, which sets it together "
            "with the rank",
            HEARTBEAT_ENV,
            environ.get(HEARTBEAT_ENV),
            error,
        )
        return
    if _is_below_worker(environ):
        taken = None
        if is_held(name):
            return
    else:
        taken = _take(name)
        if taken is None:
            return
    global starting
    # In a thread, because these imports take longer than the import of regrow itself.
    starting = threading.Thread(
        target=_start, args=(period, name, taken), name="regrow-heartbeat-start", daemon=True
    )
    atexit.register(_end)
    starting.start()


def wait(timeout: float | None = None) -> None:
    """Wait until the automatic heartbeat has started, if this process starts one.

    Args:
        timeout: seconds; None: no limit.
    """
    _asked.set()
    if starting is not None:
        starting.join(timeout)


def claim(environ: Mapping[str, str]) -> bytes:
    """Return the address of the abstract unix socket for a rank's heartbeat.

    The process that binds the address runs the heartbeat of the rank.

    Raises:
        KeyError: RANK is not set.
    """
    import hashlib

    parts = [environ["RANK"], *(environ.get(name, "") for name in _OF_AN_ATTEMPT)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return b"\0regrow-heartbeat-" + digest[:32].encode()


def is_held(name: bytes) -> bool:
    """Return whether a process holds an address of `claim`; this call does not take the address."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(name)
    except ConnectionRefusedError:
        return False
    except OSError:  # for example no descriptors are left: assume that a process holds it
        return True
    return True


def _take(name: bytes) -> socket.socket | None:
    """The socket that holds the rank; None: another process holds it, or bind failed."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        taken.bind(name)
    except OSError as error:
        taken.close()
        if error.errno != errno.EADDRINUSE:
            logger.warning(
                "heartbeat: this worker sends none, because it cannot claim its rank: %s", error
            )
        return None
    return taken


def _is_below_worker(environ: Mapping[str, str]) -> bool:
    """Return whether another process of the worker started this process."""
    from regrow.workers.guardian.procfs import WORKER_PID

    own = str(os.getpid())
    return environ.get(WORKER_PID, own) != own


def _start(period: float, name: bytes, taken: socket.socket | None) -> None:
    if taken is None:
        asked = _asked.wait(DELAY)
        taken = None if _ended else _take(name)
        if taken is None:
            return
        if not asked:
            logger.info(
                "heartbeat: process %d sends it for rank %s, because no other process of the "
                "worker imported regrow within %g s; the heartbeat ends with this process",
                os.getpid(),
                os.environ.get("RANK"),
                DELAY,
            )
    try:
        with _importing:
            _load()
            from regrow.heartbeat import api

            api.start_by_itself(period)
    except Exception:
        taken.close()
        logger.exception("heartbeat: this worker sends none")
        return
    taken.detach()  # the process holds the name until its end


def _load() -> None:
    """Import the modules that the threads of a heartbeat would import at their first use."""
    import regrow.store.client.client
    from regrow import _progress
    from regrow.store import STORE_TLS_ENV

    _progress.latest()  # opens the shared memory that the heartbeat's thread reads
    if os.environ.get(STORE_TLS_ENV):
        import encodings.idna  # noqa: F401 - `ssl` encodes the server's name with it
        import json  # noqa: F401 - the variable holds JSON

        import regrow.store.protocol.tls  # noqa: F401


def _end() -> None:
    """Wait, at the program's end, for the thread that starts the heartbeat; end the heartbeat."""
    global _ended
    _ended = True
    wait(_WAIT)
    leave = getattr(sys.modules.get("regrow.heartbeat.api"), "leave", None)
    if leave is not None and not hasattr(sys, "last_value"):
        leave()


def _before_fork() -> None:
    _importing.acquire(timeout=_WAIT)


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # `_before_fork` has timed out
        _importing.release()


def _after_fork_in_child() -> None:
    global _importing
    _importing = threading.RLock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
