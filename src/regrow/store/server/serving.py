"""The process of a store server: it serves as its starter configured, and ends at the right time.

The server ends with its starter. It watches a pidfd of the starter and a pipe: when the starter
ends, or closes the pipe, the server stops. (PDEATHSIG would be wrong here: it fires when the
*thread* that started the server ends.)

A lingering server also serves other processes, which must keep their store when the starter is
killed. So the server continues while a session is open, and ends by itself soon after the last
session has ended. It does not end at once, because a client may reconnect with a new session. It
also gives clients that waited for the server the time to connect. A starter with a job that ended
well sends a goodbye. Then no new client comes, and the server ends with the last session. A server
whose services hold nothing that a client needs (`Service.needed`) ends with its starter, so that
the next one can listen at its address. After the end of its starter, the server writes no output,
so that it keeps no terminal open.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from regrow.store.limits import FIRST_CLIENTS_S, LOG_CLOSE_S, QUIET_S, Limits
from regrow.store.server.journal import FILES, Journal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from regrow.store.server.services import Service

STOP: Final = b"stop\n"
"""Message of the starter that stops the server at once."""
GOODBYE: Final = b"bye\n"
"""Message of the starter that leaves the server to its clients, if no new clients will come.

If the starter cannot know this, it only closes the pipe.
"""
LISTENER: Final = 3
"""The descriptor of the listening socket."""


def serve() -> None:
    """Run a server as configured on standard input, until it is no longer needed."""
    import asyncio

    with open(0, "rb", buffering=0, closefd=False) as settings:
        line = settings.readline()
    if not line.endswith(b"\n"):
        sys.exit("regrow.store: the starter of the server ended before it sent the settings")
    asyncio.run(_serve(json.loads(line)))


async def _serve(config: dict[str, Any]) -> None:
    import asyncio
    import gc
    import resource
    import socket

    from regrow.store.server.log import write_log
    from regrow.store.server.server import StoreServer
    from regrow.store.server.services import load
    from regrow.utils import BackgroundWriter

    try:
        starter = os.pidfd_open(config["parent"])
    except ProcessLookupError:
        return
    end = _End(asyncio.get_running_loop(), starter, config["linger"])
    if os.getppid() != config["parent"]:
        return
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    os.umask(0o077)
    tls = None
    if config["tls"] is not None:
        from regrow.store.protocol.tls import Tls

        tls = Tls(**config["tls"])
    log, failure = BackgroundWriter(write_log, "regrow-log"), ""
    try:
        services: dict[str, Service] = {
            name: load(where) for name, where in config["services"].items()
        }
        for service in services.values():
            remember = getattr(service, "remember", None)
            if config["journal"] and remember is not None:
                remember(Journal(FILES), time.monotonic(), log.add)
        server = StoreServer(
            bytes.fromhex(config["token"]),
            Limits(**config["limits"]),
            tls,
            log.add,
            services=services,
            on_demand=config["on_demand"],
            on_sessions=end.on_sessions,
        )
        end.is_needed = lambda: all(getattr(each, "needed", True) for each in services.values())
        await server.listen_on(socket.socket(fileno=LISTENER), config["path"])
    except OSError as error:
        failure = f"cannot serve with {tls}: {error.strerror or error}"
    except ValueError as error:
        failure = str(error)
    os.write(1, json.dumps(failure).encode() + b"\n")
    os.dup2(2, 1)
    if failure:
        return
    # All objects so far live as long as the process, so the collector need not scan them.
    gc.freeze()
    await end.over
    await server.close()
    log.close(LOG_CLOSE_S)


class _End:
    """Decides when the server ends.

    Args:
        loop: the server's event loop.
        starter: pidfd of the process that started the server.
        lingers: whether the server outlives its starter.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, starter: int, lingers: bool) -> None:
        self._loop = loop
        self._lingers = lingers
        self._sessions = 0
        self._not_before = loop.time() + FIRST_CLIENTS_S
        """Earliest time at which the server may end for lack of sessions; on the loop's clock."""
        self._alone = False
        """Whether the starter is gone, or has sent a goodbye."""
        self._quiet = QUIET_S
        self._timer: asyncio.TimerHandle | None = None
        self.is_needed: Callable[[], bool] = lambda: True
        """Returns whether the server outlives its starter, if it lingers."""
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when the server must end."""
        loop.add_reader(0, self._receive)
        loop.add_reader(starter, self._orphaned, starter)

    def on_sessions(self, sessions: int) -> None:
        """Update the number of sessions."""
        self._sessions = sessions
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._alone and not self.is_needed():
            self._end()
        elif self._alone and sessions == 0:
            at = max(self._not_before, self._loop.time() + self._quiet)
            self._timer = self._loop.call_at(at, self._end)

    def _receive(self) -> None:
        message = os.read(0, 64)
        if message.startswith(GOODBYE):
            self._quiet, self._not_before = 0.0, 0.0
        elif message:
            self._end()
        self._orphaned(0)

    def _orphaned(self, watched: int) -> None:
        self._loop.remove_reader(watched)
        if not self._lingers:
            self._end()
        elif not self._alone:
            self._alone = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.close(null)
            self.on_sessions(self._sessions)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
