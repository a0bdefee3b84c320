"""Decide which node hosts the store server, and restart that server when its process ends.

All nodes receive the same endpoint, and the first agent on that host has to serve it. The name of
the endpoint does not show which host that is: a host has many names, and some names mean another
host elsewhere. So each agent tries to bind the address:

- If the bind succeeds, the address belongs to this host.
- If it fails with EADDRNOTAVAIL, the address belongs to another host.
- If it fails with EADDRINUSE, another process listens on the port already: a faster agent, or a
  server that a user runs for several jobs.

If two agents try at the same time, only one agent listens.

The server listens on as few addresses as possible. If the user gave an address, the server listens
on that address only. A name may mean different addresses on different hosts. On many systems, for
example, a host's own name means 127.0.1.1 on that host. So for a name, the server listens on every
address.

The address of a name may change. The name of a host that has just started may be unknown at first,
or may still resolve to the previous host. Then no host would serve. So the node resolves the name
again until it reaches a server, with growing pauses (`Tries`). If the user listed several
endpoints, the node also tries again to serve one that another process of its host holds: the server
of an agent that has just ended.

The agent that serves keeps what the next server process needs: the listening socket and the journal
(`round_service.py`). The open socket lets nodes that connect in the meantime wait; they are not
refused. A thread of `HostedServer` sleeps until the server's process ends. It then starts the next
process and reports the restart to the agent. After too many restarts in a short time, it starts no
further process, and reports the reason. If other hosts may take over (`successor.py`), it keeps the
socket open for `hold` seconds, and one of them takes over. Then the nodes are refused. Without
other hosts the job ends.

A server that takes over listens on every address of its host, at a port that the system chose when
the agent started.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous.errors import RendezvousConnectionError
from regrow.rendezvous.protocol.messages import ServerRestarted
from regrow.rendezvous.settings import RESOLVE_PAUSES, RESTART_PAUSE, RESTARTS, RESTARTS_WITHIN
from regrow.rendezvous.utils import check_host
from regrow.store import StoreError, addresses_of, family_of, is_loopback
from regrow.utils import Backoff, call_after_fork, get_logger, ready, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regrow.store import ServerProcess, Tls

    Start = Callable[[socket.socket, tuple[int, int]], ServerProcess]

SERVICES = {"rendezvous": "regrow.rendezvous.server.round_service:create"}
SUCCESSOR_SERVICES = {"rendezvous": "regrow.rendezvous.server.round_service:create_successor"}

logger = get_logger(__name__)


class Tries:
    """Time limits of the attempts to reach the server; the host is determined again before each.

    Args:
        seconds: time limit for all attempts together.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pauses = Backoff(*RESOLVE_PAUSES)
        self.last = False
        """Whether this attempt is the last one."""
        self.before = ""
        """Text to add to the error of this attempt if others came before it."""

    @property
    def look_up(self) -> float:
        """The time limit of a look-up of the endpoint's name before the next attempt, in seconds.

        A look-up that takes longer continues, and the next attempt waits for it.
        """
        return min(self._pauses.pause(self._pauses.failures + 1), self._left)

    def next(self, *, certain: bool) -> float:
        """Return the time limit of the next attempt, in seconds.

        Args:
            certain: whether the host that serves the endpoint would be the same later.
        """
        if certain:
            self.last, self.before = True, ""
            return self._seconds
        left = self._left
        limit = self._pauses.next(left)
        self.last, self.before = limit == left, f", the last of {self._seconds:g} s"
        return limit

    @property
    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)


class OwnAddress(NamedTuple):
    """An address of the endpoint that belongs to this host."""

    address: str
    listen: str
    """The address to listen on: this address, or the wildcard address."""


class MeetingPlace(NamedTuple):
    """The server of the rendezvous, as this node sees it."""

    server: HostedServer | None
    """The server that this node hosts; None if another node serves."""
    reach: str
    """The name or address by which this node reaches the server."""
    addr: str | None
    """This node's address for the other nodes; None: the address of its connection.

    It is set only if the address of the connection means another host to the other nodes.
    """
    here: bool
    """Whether the endpoint belongs to this host."""


def find_own(host: str, port: int, look_up: float = RESOLVE_PAUSES[0]) -> OwnAddress | None:
    """Return the first address of the endpoint that belongs to this host; None if there is none.

    Args:
        host: name or address.
        port: the port, 1 or higher.
        look_up: time limit for the look-up of a name, in seconds.

    Raises:
        ValueError: `host` is neither a name nor an address.
    """
    if host == "localhost":
        host = "127.0.0.1"  # the usual meaning; the resolver may return ::1 first
    literal = family_of(host)
    if literal is not None:
        return OwnAddress(host, host) if _binds(literal, host, port) else None
    check_host(host)
    for family, address in addresses_of(host, look_up):  # if it has none, connecting reports it
        if _binds(family, address, port):
            return OwnAddress(address, _every(family))
    return None


def settle(
    host: str,
    port: int,
    token: bytes,
    tls: Tls | None,
    is_host: bool | None,
    services: Mapping[str, str] = SERVICES,
    look_up: float = RESOLVE_PAUSES[0],
) -> MeetingPlace:
    """Decide whether this node serves the endpoint, and if so, start the server.

    Args:
        host: name or address of the endpoint.
        port: its port, 1 or higher.
        token: the job's secret.
        tls: certificates.
        is_host: whether the user declared this node the host; None: determine it.
        services: what the server offers.
        look_up: time limit for the look-up of a name, in seconds.

    Raises:
        RendezvousConnectionError: this node has to serve, but cannot.
    """
    own = None if is_host is False else find_own(host, port, look_up)
    if own is not None:
        server = _serve(own.listen, port, token, tls, services)
        beyond = is_loopback(own.address) and not is_loopback(host)
        if server is None and own.listen != own.address and not beyond:
            # The process that uses the port may listen on another address of this host.
            server = _serve(own.address, port, token, tls, services)
        return MeetingPlace(server, host, host if beyond else None, True)
    if not is_host:
        return MeetingPlace(None, host, None, False)
    family = family_of(host) or socket.AF_INET
    server = _serve(_every(family), port, token, tls, services)
    return MeetingPlace(server, "::1" if family == socket.AF_INET6 else "127.0.0.1", host, True)


def settle_one_of(
    endpoints: Sequence[tuple[str, int]],
    token: bytes,
    tls: Tls | None,
    look_up: float = RESOLVE_PAUSES[0],
) -> tuple[MeetingPlace, tuple[str, int]]:
    """Serve the first of several endpoints that belongs to this host, and is not served yet.

    Args:
        endpoints: name or address, and port, of each endpoint.
        token: the job's secret.
        tls: certificates.
        look_up: time limit for the look-up of a name, in seconds.

    Returns:
        This node's view of that endpoint, and the endpoint. If all that belong to this host are in
        use, the first one of these; if none belongs to it, the first endpoint. The node looks for
        the server at the first endpoint, in each case.

    Raises:
        RendezvousConnectionError: this node has to serve, but cannot.
    """
    first = endpoints[0][0]
    found = MeetingPlace(None, first, None, False), endpoints[0]
    for host, port in endpoints:
        is_host = True if _is_own_name(host) else None
        place = settle(host, port, token, tls, is_host, SUCCESSOR_SERVICES, look_up)
        if (place.here and not found[0].here) or place.server is not None:
            found = place._replace(reach=first), (host, port)
        if place.server is not None:
            break
    return found


def _is_own_name(host: str) -> bool:
    """Return whether a name is that of this host, whatever the name service knows.

    The name of a pod may be registered only some time after its start, and mean an earlier pod
    until then. The other hosts may need the vote of this one meanwhile.
    """
    own = socket.gethostname().split(".")[0]
    return family_of(host) is None and host.split(".")[0] == own


def _serve(
    listen: str, port: int, token: bytes, tls: Tls | None, services: Mapping[str, str]
) -> HostedServer | None:
    """Start the server; return None if a process listens on the port already."""
    try:
        return _host(listen, port, token, tls, services)
    except (OSError, ValueError, StoreError) as error:
        if _is_in_use(error):
            return None
        raise RendezvousConnectionError(
            f"this node has to serve the rendezvous, because the endpoint is its own address, and "
            f"cannot listen on port {port} of {listen}: {error}"
        ) from error


def serve_successor(host: str, port: int, token: bytes, tls: Tls | None) -> HostedServer:
    """Start a server that may take over from another one, on every address of this host.

    Args:
        host: the address of this host for the other nodes.
        port: the port.
        token: the job's secret.
        tls: certificates.

    Raises:
        OSError: the port is not available.
        StoreError: the server does not start.
    """
    every = _every(family_of(host) or socket.AF_INET)
    return _host(every, port, token, tls, SUCCESSOR_SERVICES)


def _host(
    listen: str, port: int, token: bytes, tls: Tls | None, services: Mapping[str, str]
) -> HostedServer:
    from regrow.store import listen_at, start_server

    def start(listener: socket.socket, journal: tuple[int, int]) -> ServerProcess:
        return start_server(
            listener=listener,
            token=token,
            tls=tls,
            services=services,
            linger=True,
            journal=journal,
        )

    return HostedServer(listen_at(listen, port, only_v6=True), start)


def _every(family: int) -> str:
    return "::" if family == socket.AF_INET6 else "0.0.0.0"


def _binds(family: int, address: str, port: int) -> bool:
    """Return whether the address belongs to this host, even if another process uses the port."""
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            # Any other error concerns the port, and the later attempt to listen reports it.
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _is_in_use(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE


class HostedServer:
    """A store server that is replaced when its process ends.

    Args:
        listener: the socket on which the server listens; this object closes it.
        start: starts a server process on the socket, with a journal.

    Raises:
        OSError: the first process could not be started.
        StoreError: the first process started but does not serve.
    """

    def __init__(self, listener: socket.socket, start: Start) -> None:
        from regrow.store import make_files

        self.on_restart: Callable[[ServerRestarted], None] = lambda restarted: None
        """Called from a thread after a server process has ended, with the result of the restart."""
        self.hold = 0.0
        """Seconds for which no node is refused after the last server has ended.

        Voters take a refused connection as the end of this agent (`successor.py`), but its
        workers may run until their lease ends.
        """
        self._listener = listener
        self._start = start
        self._lock = threading.Lock()  # held while a server starts, and during close
        self._closed = False
        self._starts: list[float] = []
        """Start times of the replacements in the last `RESTARTS_WITHIN` seconds."""
        with ExitStack() as opened:
            opened.callback(listener.close)
            self._files = make_files()
            for file in self._files:
                opened.callback(os.close, file)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._wake)
            self._server = start(listener, self._files)
            self._opened = opened.pop_all()
        call_after_fork(self)
        self._thread = start_thread(self._run, "regrow-server")

    @property
    def pid(self) -> int:
        """The process id of the current server, or of the last one."""
        return self._server.pid

    @property
    def endpoint(self) -> str:
        """The address to connect to, as "host:port"."""
        return self._server.endpoint

    def close(self, *, wait: float | None = None) -> None:
        """Stop the server, or leave it to its clients; from then on it is not replaced.

        Args:
            wait: see `ServerProcess.close`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._server.close(wait=wait)
        self._opened.close()

    def after_fork(self) -> None:
        """Release the server in a forked child; the parent keeps it, or is closing it."""
        self._closed = True
        self._opened.close()

    def _run(self) -> None:
        while self._ends():
            ended = time.monotonic()
            pid, how = self._server.pid, self._server.reap()
            failed = self._replace()
            if failed is None:
                return
            restarted = ServerRestarted(how, pid, time.monotonic() - ended, failed)
            logger.warning("%s", restarted)
            self.on_restart(restarted)
            if failed:
                ready([self._wake], self.hold)
                # After the report, because this refuses the nodes, which then lose the connection.
                self._listener.close()
                return

    def _replace(self) -> str | None:
        """Start the next server.

        Returns:
            An empty string if the next server serves; the reason if no server is started; None if
            this object is closed first.
        """
        why = ""
        while True:
            with self._lock:
                if self._closed:
                    return None
                now = time.monotonic()
                self._starts = [at for at in self._starts if now - at < RESTARTS_WITHIN]
                if len(self._starts) == RESTARTS:
                    return f"{RESTARTS} have ended within {RESTARTS_WITHIN:g} s{why}"
                self._starts.append(now)
                try:
                    self._server = self._start(self._listener, self._files)
                except (OSError, StoreError) as error:
                    why = f"; the last one: {error}"
                else:
                    return ""
            ready([self._wake], RESTART_PAUSE)

    def _ends(self) -> bool:
        """Wait for the end of the server; return False if this object is closed first."""
        return self._wake not in ready([self._server.fileno(), self._wake])
