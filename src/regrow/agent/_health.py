"""The health-check server: says over HTTP whether the agent still makes progress.

`GET /healthz` is answered with status 200 while the agent's last progress is at
most `timeout` seconds ago, and with 503 after that; the body is a JSON object
with the age in both cases. What counts as progress is the callback's business:
by torch's convention it returns the time of the last progress in seconds since
the epoch, cut to whole seconds. A wall clock that is set back or forward makes
such an age wrong, so a caller that can should give the age itself.

The server is a thread of the agent's process. It does not share the agent's
loop, or it could not report a loop that hangs; it does share the interpreter,
so an agent that is stopped as a whole answers nothing, which a probe takes for
unhealthy too.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from regrow.utils._http import HttpServer, Request, Response

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

_FRESH_S = 0.1  # Probes within this many seconds share one call of the callback.


class HealthCheckServer:
    """Serves `/healthz` on a TCP port, from `start` to `stop`.

    Args:
        alive_callback: returns when the agent last made progress, in seconds since the epoch.
        port: the port, on all addresses of the host; 0 takes a free one.
        timeout: seconds without progress after which the agent counts as unhealthy.
        age: returns the seconds since the last progress; is asked instead of
            `alive_callback` where given.
        host: the address to listen on; "" is all, IPv6 and IPv4.

    Raises:
        ValueError: `port` is no port number.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        port: int,
        timeout: int,
        *,
        age: Callable[[], float] | None = None,
        host: str = "",
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"health check server: {port} is no port (0 to 65535)")
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._age = age
        self._host = host
        self._server: HttpServer | None = None
        self._answered_at = 0.0
        self._answer: tuple[int, bytes] | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        """The callback that tells the last progress."""
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port that is or will be listened on; 0 while a free one is not chosen yet."""
        return self._port

    def start(self) -> None:
        """Listen and answer from now on; a server that is running goes on.

        Raises:
            OSError: the port cannot be had (in use, or not allowed); the text names it.
        """
        if self._server is not None:
            return
        from regrow.utils._http import HttpServer

        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._server = HttpServer(listener, self._respond, "regrow-health")

    def stop(self) -> None:
        """Stop answering and give the port back; returns when both are done."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _respond(self, request: Request) -> Response:
        from regrow.utils._http import Response

        if request.path != "/healthz":
            return Response(404, b"only /healthz is here\n")
        if request.method not in ("GET", "HEAD"):
            return Response(405, b"only GET and HEAD\n")
        now = time.monotonic()
        if self._answer is None or now - self._answered_at > _FRESH_S:
            self._answer = self._examine()
            self._answered_at = time.monotonic()
        status, body = self._answer
        return Response(status, body, "application/json")

    def _examine(self) -> tuple[int, bytes]:
        report: dict[str, object]
        try:
            age = self._seconds_since_progress()
        except Exception as error:  # noqa: BLE001 - a broken callback is what the probe is told
            status, report = 503, {"status": "unhealthy", "error": f"{error!r}"}
        else:
            healthy = age <= self._timeout
            status = 200 if healthy else 503
            report = {
                "status": "healthy" if healthy else "unhealthy",
                "last_progress_s": round(age, 3),
            }
        return status, json.dumps(report).encode() + b"\n"

    def _seconds_since_progress(self) -> float:
        if self._age is not None:
            return self._age()
        # Cut to whole seconds as the callback's answer is, or "now" would be up to 1 s old.
        return max(0, int(time.time()) - self._alive_callback())


def create_healthcheck_server(
    alive_callback: Callable[[], int],
    port: int,
    timeout: int,
    *,
    age: Callable[[], float] | None = None,
) -> HealthCheckServer:
    """A `HealthCheckServer` with these arguments, not started yet."""
    return HealthCheckServer(alive_callback, port, timeout, age=age)


def _listen(host: str, port: int) -> socket.socket:
    import socket

    try:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=64)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=64)
    except OSError as error:
        raise OSError(
            error.errno,
            f"health check server: cannot listen on port {port}: {os.strerror(error.errno or 0)}",
        ) from error
