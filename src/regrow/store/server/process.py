"""The store server as a separate process, and the handle that its starter holds.

`rendezvous.server.hosting` starts another one when the rendezvous server ends.

The process (`serving`) receives its configuration over a pipe. The starter keeps the other end of
this pipe, so the server ends with the starter, at any end of the starter. The server runs in a
process session of its own. It ignores signals that a terminal or a scheduler sends to all processes
of a job: the starter ends the server when its workers are gone.

The process first imports the standard library, and then only regrow and msgspec. So no file beside
a user's script can replace a module.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING

from regrow.store.errors import StoreConnectionError, StoreTimeout
from regrow.store.limits import DEFAULT_LIMITS, Limits
from regrow.store.protocol.sockets import (
    endpoint_of,
    endpoint_of_socket,
    listen_at,
    listen_unix,
)
from regrow.store.protocol.token import check_token_length
from regrow.store.server.journal import FILES
from regrow.store.server.serving import GOODBYE, LISTENER, STOP
from regrow.utils import (
    KILL_S,
    call_after_fork,
    end_process,
    end_text,
    ends_within,
    ready,
    reap,
    spawn_helper,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from regrow.store.protocol.tls import Tls

_BOOT = (
    "import sys; sys.path += sys.argv[1:]; from regrow.store.server.serving import serve; serve()"
)

FOR_WORKERS = ("REGROW_HEARTBEAT",)
"""Variables that `import regrow` reads in a worker; the server does not get them."""


class ServerProcess:
    """A running store server; use as a context manager, or call `close()`.

    The server ends with this process, at any end of this process. A lingering server also waits
    until its clients are gone. A forked child does not own the server.
    """

    def __init__(self, pid: int, pidfd: int, lifeline: int, endpoint: str, lingers: bool) -> None:
        self.pid = pid
        """The server's process id."""
        self.endpoint = endpoint
        """The endpoint for `connect`: "host:port" or "unix:path"."""
        self._pidfd = pidfd
        self._lifeline = lifeline
        self._lingers = lingers
        call_after_fork(self)

    def fileno(self) -> int:
        """Return a pidfd, readable when the server has ended; for a selector."""
        return self._pidfd

    def alive(self) -> bool:
        """Return whether the server runs."""
        return self._pidfd >= 0 and not ends_within(self._pidfd, 0)

    def reap(self) -> str:
        """Release a server that has ended.

        Returns:
            How the server ended, as text: "was killed by SIGKILL".
        """
        code = reap(self._pidfd)
        self._close_descriptors()
        return end_text(code)

    def close(self, timeout: float = 5.0, *, wait: float | None = None) -> None:
        """Stop the server, or leave it to its clients.

        Args:
            timeout: seconds within which the server must end; then it is killed.
            wait: only for a lingering server, which stays for its clients and ends after the last
                one: seconds to wait for its end, if no new client will come. With 0, the state of
                the other clients is unknown, and they have time to reconnect.
        """
        if self._pidfd < 0:
            return
        leave = self._lingers and wait is not None
        if wait != 0 or not leave:
            with suppress(BrokenPipeError):  # the server has already ended
                os.write(self._lifeline, GOODBYE if leave else STOP)
        self._close_lifeline()
        ended = ends_within(self._pidfd, timeout if wait is None else wait)
        if not ended and not leave:
            ended = _killed(self.pid, self._pidfd)
        pidfd, self._pidfd = self._pidfd, -1
        if ended:
            reap(pidfd)
            os.close(pidfd)
        else:
            _left.append(pidfd)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """Release a server that belongs to the parent process; send it no message."""
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._close_lifeline()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _close_lifeline(self) -> None:
        # First forgotten, then closed: in a child that is forked in between, the number may already
        # be that of another file.
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


_left: list[int] = []
"""Pidfds of servers that outlived their handles; the next start of a server reaps those that ended.

So this process keeps the zombie of the last server only, and not one of each server.
"""
os.register_at_fork(after_in_child=_left.clear)


def start_server(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: bytes,
    path: str | None = None,
    listener: socket.socket | None = None,
    limits: Limits = DEFAULT_LIMITS,
    tls: Tls | None = None,
    services: Mapping[str, str] | None = None,
    on_demand: Mapping[str, str] | None = None,
    linger: bool = False,
    journal: tuple[int, int] | None = None,
    timeout: float = 30.0,
) -> ServerProcess:
    """Start a store server in a process of its own and wait until it listens.

    Args:
        host: the address to listen on, or a name that has an IPv4 address.
        port: the port; 0: a free port.
        token: the secret that clients must prove (`make_token`, `load_token`).
        path: listen on this unix socket instead of a port.
        listener: serve this listening socket instead of a port, including the clients that have
            already connected to it. The caller keeps its own copy, and removes the path of a unix
            socket.
        limits: limits that the store refuses to exceed.
        tls: certificates for clients.
        services: services besides keys: for each name the "module:function" that creates the
            `Service` in the server's process.
        on_demand: more services, each created at its first question. If one cannot be created, its
            questions are refused, and the other services continue.
        linger: whether the server outlives this process while sessions are open.
        journal: two files (`make_files`) in which services that support it keep the data that they
            need after the server was killed. A next server with these files continues from there.
        timeout: seconds within which the server must listen.

    Raises:
        StoreConnectionError: the server did not start; the text has the reason. If it could not
            listen, the cause is an OSError with the `errno`.
        StoreTimeout: the server did not start in time.
    """
    _reap_left()
    config = {
        "path": path,
        "token": check_token_length(token).hex(),
        "limits": asdict(limits),
        "tls": None if tls is None else asdict(tls),
        "services": dict(services or {}),
        "on_demand": dict(on_demand or {}),
        "linger": linger,
        "journal": journal is not None,
        "parent": os.getpid(),
    }
    listens = _listen(host, port, path) if listener is None else nullcontext(listener)
    with ExitStack() as kept, ExitStack() as reading:
        with listens as listening, ExitStack() as passed:
            endpoint = endpoint_of_socket(listening)
            if listener is None and path is None:
                endpoint = endpoint_of(host, listening.getsockname()[1])
            config_read, lifeline = open_pipe(passed, kept)
            answer, answer_write = open_pipe(reading, passed)
            inherited = [(config_read, 0), (answer_write, 1)]
            files = [] if journal is None else zip(journal, FILES, strict=True)
            for ours, its in [(listening.fileno(), LISTENER), *files]:
                # The copy has a number that no other descriptor gets.
                copy = fcntl(ours, F_DUPFD_CLOEXEC, FILES[-1] + 1)
                passed.callback(os.close, copy)
                inherited.append((copy, its))
            pid = spawn_helper(
                ["-I", "-S", "-c", _BOOT, *import_paths()],
                {name: value for name, value in os.environ.items() if name not in FOR_WORKERS},
                [(os.POSIX_SPAWN_DUP2, ours, its) for ours, its in inherited],
            )
        pidfd = open_child(pid)
        kept.callback(os.close, pidfd)
        try:
            os.write(lifeline, json.dumps(config).encode() + b"\n")
            _await_start(answer, timeout)
        except BaseException:
            if _killed(pid, pidfd):
                reap(pidfd)
            raise
        kept.pop_all()
    return ServerProcess(pid, pidfd, lifeline, endpoint, linger)


def open_pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """Open a pipe; return its two ends, which the two stacks close."""
    ends = os.pipe2(os.O_CLOEXEC)
    for end, stack in zip(ends, (reading, writing), strict=True):
        stack.callback(os.close, end)
    return ends


def open_child(pid: int) -> int:
    """Return a pidfd of a child that has just started.

    Raises:
        OSError: no descriptor is free; the child was killed.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _reap_left() -> None:
    running = []
    with suppress(IndexError):  # none is left; another thread may take some too
        while True:
            pidfd = _left.pop()
            if ends_within(pidfd, 0):
                reap(pidfd)
                os.close(pidfd)
            else:
                running.append(pidfd)
    _left.extend(running)


def _listen(host: str, port: int, path: str | None) -> socket.socket:
    try:
        return listen_at(host, port) if path is None else listen_unix(path)
    except OSError as error:
        where = endpoint_of(host, port) if path is None else path
        raise StoreConnectionError(
            f"the store server could not start: cannot listen on {where}: {error.strerror or error}"
        ) from error


def _await_start(answer: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    received = b""
    while not received.endswith(b"\n"):
        if not ready([answer], deadline - time.monotonic()):
            raise StoreTimeout(f"the store server did not start within {timeout:g} s")
        chunk = os.read(answer, 65536)
        if not chunk:
            raise StoreConnectionError(
                "the store server ended before it was ready; its output on stderr has the reason"
            )
        received += chunk
    if failure := json.loads(received):
        raise StoreConnectionError(f"the store server could not start: {failure}")


def import_paths() -> list[str]:
    """Return the folders from which a helper process imports regrow and msgspec."""
    from importlib.util import find_spec

    spec = find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    here = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
    return [here, os.path.dirname(os.path.dirname(spec.origin))]


def _killed(pid: int, pidfd: int) -> bool:
    """Kill a server; return whether it has ended. A server that is stuck in the kernel has not."""
    if end_process(pidfd):
        return True
    from regrow.utils import get_logger

    get_logger(__name__).warning(
        "the store server (pid %s) has not ended %g s after SIGKILL: it is stuck in the kernel "
        "(state D), and is left behind",
        pid,
        KILL_S,
    )
    return False
