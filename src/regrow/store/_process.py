"""The store server as a process of its own, and the handle its starter holds.

The process (`_serving`) is told what to serve over a pipe whose other end the starter keeps, so
that the server ends with the starter however that ends. It runs in a session of its own: Ctrl-C on
the terminal reaches the starter alone, which ends the server when its workers are gone.

The process imports the standard library first and only regrow and msgspec besides, so no
file beside a user's script can take the place of a module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING, Any

from regrow.store._errors import StoreConnectionError, StoreTimeout
from regrow.store._fork import disown_in_children
from regrow.store._limits import DEFAULT_LIMITS, Limits
from regrow.store._serving import GOODBYE, LISTENER, STOP
from regrow.store._token import check_token

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from regrow.store._tls import Tls

_BOOT = "import sys; sys.path += sys.argv[1:]; from regrow.store._serving import serve; serve()"

_FOR_WORKERS = ("REGROW_HEARTBEAT",)
"""What `import regrow` heeds in a worker, whose server is none."""
_RESET_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE]


class ServerProcess:
    """A running store server; use as a context manager, or `close()` it.

    It ends with this process, however this process ends, or lingers until its clients are
    gone as well, if it was started so. A forked child does not own it.
    """

    def __init__(self, pid: int, pidfd: int, lifeline: int, endpoint: str, lingers: bool) -> None:
        self.pid = pid
        """The server's process id."""
        self.endpoint = endpoint
        """What to `connect` to: "host:port" or "unix:path"."""
        self._pidfd = pidfd
        self._lifeline = lifeline
        self._lingers = lingers
        disown_in_children(self)

    def fileno(self) -> int:
        """Return a pidfd, readable once the server has ended; for a selector."""
        return self._pidfd

    def alive(self) -> bool:
        """Say whether the server runs."""
        return self._pidfd >= 0 and not _ended(self._pidfd, 0)

    def close(self, timeout: float = 5.0, *, wait: float | None = None) -> None:
        """Stop the server, or leave it to its clients.

        Args:
            timeout: seconds in which it has to end, or it is killed.
            wait: only for a server that lingers, which is left to its clients, and ends after the
                last of them: seconds to wait for that, where nobody is to come any more. With 0
                nothing is known of the others, and they have the time to come back.
        """
        if self._pidfd < 0:
            return
        leave = self._lingers and wait is not None
        if wait != 0 or not leave:
            with suppress(BrokenPipeError):  # it has ended already
                os.write(self._lifeline, GOODBYE if leave else STOP)
        os.close(self._lifeline)
        ended = _ended(self._pidfd, timeout if wait is None else wait)
        if not ended and not leave:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if ended or not leave:
            _reap(self.pid)
        os.close(self._pidfd)
        self._pidfd = self._lifeline = -1

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def disown(self) -> None:
        """Let go of a server that is the parent's, in a forked child."""
        if self._pidfd >= 0:
            os.close(self._lifeline)
            os.close(self._pidfd)
            self._pidfd = self._lifeline = -1


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
    timeout: float = 30.0,
) -> ServerProcess:
    """Start a store server in a process of its own and wait until it listens.

    Args:
        host: the address to listen on; an address is used as it is, a name is looked up.
        port: the port, 0 for a free one.
        token: the secret that clients must prove to hold (`make_token`, `load_token`).
        path: listen on this unix socket instead of a port.
        listener: serve this socket, which listens already, instead of a port. Whoever has connected
            to it is served; the caller keeps its own copy, and removes the path of a unix socket.
        limits: what the store refuses to exceed.
        tls: certificates to show to clients.
        services: what clients can ask besides keys: for each name the "module:function" that
            makes the `Service` in the server's process.
        on_demand: more of them, each made when it is first asked: one that cannot be made refuses
            its questions, and harms nobody else.
        linger: outlive this process as long as sessions are open.
        timeout: seconds within which the server must listen.

    Raises:
        StoreConnectionError: the server could not start; says why. If it could not listen, its
            cause is an OSError with the `errno`.
        StoreTimeout: it did not start in time.
    """
    config = {
        "host": host,
        "port": port,
        "path": path,
        "listener": listener is not None,
        "token": check_token(token).hex(),
        "limits": _fields(limits),
        "tls": None if tls is None else _fields(tls),
        "services": dict(services or {}),
        "on_demand": dict(on_demand or {}),
        "linger": linger,
        "parent": os.getpid(),
    }
    config_read, lifeline = os.pipe2(os.O_CLOEXEC)
    answer, answer_write = os.pipe2(os.O_CLOEXEC)
    inherited = [(config_read, 0), (answer_write, 1)]
    try:
        if listener is not None:
            # Of a number that none of the others takes before it is its turn.
            inherited.append((fcntl(listener, F_DUPFD_CLOEXEC, LISTENER + 1), LISTENER))
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _BOOT, *_import_paths()],
            {name: value for name, value in os.environ.items() if name not in _FOR_WORKERS},
            file_actions=[(os.POSIX_SPAWN_DUP2, ours, its) for ours, its in inherited],
            setsid=True,
            setsigmask=[],
            setsigdef=_RESET_SIGNALS,
        )
    except BaseException:
        os.close(lifeline)
        os.close(answer)
        raise
    finally:
        for ours, _ in inherited:
            os.close(ours)
    pidfd = os.pidfd_open(pid)
    try:
        os.write(lifeline, json.dumps(config).encode() + b"\n")
        endpoint = _await_endpoint(answer, timeout)
    except BaseException:
        os.close(lifeline)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _reap(pid)
        os.close(pidfd)
        raise
    finally:
        os.close(answer)
    return ServerProcess(pid, pidfd, lifeline, endpoint, linger)


def _await_endpoint(answer: int, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    received = b""
    while not received.endswith(b"\n"):
        if not select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise StoreTimeout(f"the store server did not start within {timeout:g} s")
        chunk = os.read(answer, 65536)
        if not chunk:
            raise StoreConnectionError(
                "the store server ended before it listened; what it wrote to stderr says why"
            )
        received += chunk
    report: dict[str, Any] = json.loads(received)
    if "error" in report:
        code = report.get("errno")
        raise StoreConnectionError(f"the store server could not start: {report['error']}") from (
            None if code is None else OSError(code, os.strerror(code))
        )
    endpoint: str = report["endpoint"]
    return endpoint


def _import_paths() -> list[str]:
    from importlib.util import find_spec

    spec = find_spec("msgspec")
    if spec is None or spec.origin is None:
        raise StoreConnectionError("msgspec is not installed; the store server needs it")
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [here, os.path.dirname(os.path.dirname(spec.origin))]


def _fields(config: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(config)


def _ended(pidfd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        # Somebody in this process waits for every child and was faster.
        return
