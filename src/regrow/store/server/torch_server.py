"""torch's own store server (`TCPStore`), in a process of its own.

A TCPStore has no token: any program that reaches the port can read and write its keys, as under
torchrun. The process is the only one of regrow's that imports torch.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import ExitStack
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING

from regrow.store.server.process import (
    FOR_WORKERS,
    ServerProcess,
    import_paths,
    open_child,
    open_pipe,
)
from regrow.store.server.serving import LISTENER
from regrow.utils import spawn_helper

if TYPE_CHECKING:
    import socket

_BOOT = (
    "import sys; sys.path += sys.argv[1:]; "
    "from regrow.store.server.torch_server import serve; serve()"
)


def start_torch_server(listener: socket.socket) -> ServerProcess:
    """Start a TCPStore on a listening socket, and do not wait for it.

    Clients may connect at once; they are served when the process has imported torch. The server
    ends with this process.

    Args:
        listener: the socket; the caller closes its own copy.

    Raises:
        OSError: no process can be started.
    """
    with ExitStack() as kept:
        with ExitStack() as passed:
            lifeline_read, lifeline = open_pipe(passed, kept)
            # The copy has a number that the child's descriptors do not get.
            listening = fcntl(listener.fileno(), F_DUPFD_CLOEXEC, LISTENER + 1)
            passed.callback(os.close, listening)
            pid = spawn_helper(
                # -P: torch is not a file beside a user's script.
                ["-P", "-c", _BOOT, *import_paths()],
                {name: value for name, value in os.environ.items() if name not in FOR_WORKERS},
                [
                    (os.POSIX_SPAWN_DUP2, lifeline_read, 0),
                    (os.POSIX_SPAWN_DUP2, listening, LISTENER),
                ],
            )
        pidfd = open_child(pid)
        kept.pop_all()
    address, port = listener.getsockname()[:2]
    return ServerProcess(pid, pidfd, lifeline, f"{address}:{port}", lingers=False)


def serve() -> None:
    """Serve on the inherited socket until the starter closes the pipe on standard input."""
    import socket

    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(LISTENER)) as listener:
        port = listener.getsockname()[1]
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    store = TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=LISTENER
    )
    os.read(0, 1)
    del store
    sys.exit(0)
