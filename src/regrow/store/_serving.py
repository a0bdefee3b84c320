"""The store server's own process: it serves as its starter told it, and knows when to end.

It ends with its starter, of which it watches a pidfd and a pipe: when the starter is gone, or
closes the pipe, the server stops. (PDEATHSIG would not do: it fires when the *thread* that started
the server ends.)

A server that lingers serves others as well as its starter, and a starter that was killed must
not cost them their store. So it goes on while a session is open, and ends by itself soon after
the last one has: not at once, since a client may be about to come back with a new session, and
not before those who were waiting for the server had the time to connect. A starter whose job has
ended well says goodbye: nobody is to come, and the end of the last session is the server's. Once
its starter is gone nobody reads what it writes, and it holds nobody's terminal open.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from regrow.store._limits import Limits

if TYPE_CHECKING:
    import asyncio

STOP: Final = b"stop\n"
"""What the starter writes to have the server stop at once."""
GOODBYE: Final = b"bye\n"
"""What it writes to leave the server to its clients, when no others are to come. If it cannot know
that, it only closes the pipe."""
LISTENER: Final = 3
"""The descriptor under which it finds the socket that its starter listens on, if there is one."""
_CHANCE = 2.0  # seconds from the start of a server in which its first clients may come
_QUIET = 1.0  # seconds without a session after which nobody will come back


def serve() -> None:
    """Run a server as told on standard input, until it is not needed any more."""
    import asyncio

    with open(0, "rb", buffering=0, closefd=False) as config_file:
        config = json.loads(_read_line(config_file.fileno()))
    asyncio.run(_serve(config))


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            sys.exit("regrow.store: the server's parent ended before it had told what to serve")
        line += chunk
    return line


async def _serve(config: dict[str, Any]) -> None:
    import asyncio
    import gc
    import socket

    from regrow.store._log import Log
    from regrow.store._on_demand import OnDemand
    from regrow.store._server import StoreServer
    from regrow.store._service import Service, load

    end = _End(asyncio.get_running_loop(), config["linger"])
    try:
        parent = os.pidfd_open(config["parent"])
    except ProcessLookupError:
        return
    end.watch(parent)
    if os.getppid() != config["parent"]:
        return
    _allow_many_files()
    os.umask(0o077)
    tls = None
    if config["tls"] is not None:
        from regrow.store._tls import Tls

        tls = Tls(**config["tls"])
    log, report = Log(), dict[str, str | int | None]()
    try:
        services: dict[str, Service] = {
            name: load(where) for name, where in config["services"].items()
        }
        services |= {name: OnDemand(where) for name, where in config["on_demand"].items()}
        server = StoreServer(
            bytes.fromhex(config["token"]),
            Limits(**config["limits"]),
            tls,
            log,
            services=services,
            on_sessions=end.look,
        )
        if config["listener"]:
            where = "the socket that its starter listens on"
            report["endpoint"] = await server.listen_on(socket.socket(fileno=LISTENER))
        elif config["path"] is not None:
            where = config["path"]
            report["endpoint"] = await server.listen_unix(where)
        else:
            where = f"{config['host']}:{config['port']}"
            report["endpoint"] = await server.listen(config["host"], config["port"])
    except OSError as error:
        report["error"] = f"cannot listen on {where}: {error.strerror or error}"
        report["errno"] = error.errno
    except ValueError as error:
        report["error"] = str(error)
    os.write(1, json.dumps(report).encode() + b"\n")
    os.dup2(2, 1)
    if "error" in report:
        return
    # What was made until now lives as long as the process: keep the collector off it.
    gc.freeze()
    await end.come()
    await server.close()
    log.close()


class _End:
    """Decides when the server ends.

    Args:
        loop: the server's.
        lingers: whether the starter's end is not the server's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lingers: bool) -> None:
        self._loop = loop
        self._lingers = lingers
        self._sessions = 0
        self._not_before = loop.time() + _CHANCE
        """When the last session has ended for certain; on the loop's clock."""
        self._alone = False
        """The starter is gone, or has said goodbye."""
        self._quiet = _QUIET
        self._timer: asyncio.TimerHandle | None = None
        self._now: asyncio.Future[None] = loop.create_future()
        loop.add_reader(0, self._heard)

    async def come(self) -> None:
        """Wait for it."""
        await self._now

    def watch(self, parent: int) -> None:
        """Take a pidfd of the starter."""
        self._loop.add_reader(parent, self._orphaned, parent)

    def look(self, sessions: int) -> None:
        """Take in how many sessions there are now."""
        self._sessions = sessions
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._alone and sessions == 0:
            at = max(self._not_before, self._loop.time() + self._quiet)
            self._timer = self._loop.call_at(at, self._end)

    def _heard(self) -> None:
        said = os.read(0, 64)
        if said.startswith(GOODBYE):
            self._quiet, self._not_before = 0.0, 0.0
        elif said:
            self._end()
        self._orphaned(0)

    def _orphaned(self, watched: int) -> None:
        self._loop.remove_reader(watched)
        if not self._lingers:
            self._end()
        elif not self._alone:
            self._alone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            self.look(self._sessions)

    def _end(self) -> None:
        if not self._now.done():
            self._now.set_result(None)


def _allow_many_files() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
