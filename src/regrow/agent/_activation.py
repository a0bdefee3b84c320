"""A server that is started when somebody first connects to it.

Hardly any job uses the workers' store, and a process for each attempt is more than a job on one
node costs otherwise. So the agent only listens: the kernel accepts whoever connects, and keeps what
they say until there is a server, which is handed the socket. If the server ends, the socket is
still the agent's, and the next who connects is the reason for another one.

One thread waits, for the first connection or for the end of the server, and it alone starts and
stops it.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from regrow.store import StoreError
from regrow.store._fork import disown_in_children
from regrow.utils import get_logger

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from regrow.store import ServerProcess

logger = get_logger(__name__)


class Activation:
    """A socket that listens, and the server behind it once it is needed.

    Args:
        listener: the socket; it is closed here.
        start: starts the server on it.
    """

    def __init__(
        self, listener: socket.socket, start: Callable[[socket.socket], ServerProcess]
    ) -> None:
        self._listener = listener
        self._start = start
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        disown_in_children(self)
        self._thread = threading.Thread(target=self._run, name="regrow-workers-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and have the server end; `join` waits for that."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def join(self, timeout: float) -> None:
        """Wait until the server has ended, after `close`; for at most `timeout` seconds."""
        self._thread.join(timeout)

    def disown(self) -> None:
        """Leave it to the parent, in a forked child."""
        self._listener.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        try:
            while self._comes(self._listener.fileno()):
                with self._start(self._listener) as server:
                    if self._comes(server.fileno()):
                        logger.warning(
                            "the server of the workers' store (pid %s) has ended, and what it held "
                            "is lost; the next worker that connects has another one started",
                            server.pid,
                        )
        except (OSError, StoreError) as error:
            logger.error("no worker can use the workers' store: %s", error)
        finally:
            self._listener.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def _comes(self, fd: int) -> bool:
        """Wait until a descriptor is readable; return False if that is to end first."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        return all(ready != self._wake for ready, _ in poll.poll())
