"""The health check: reports over HTTP whether the agent makes progress.

`GET /healthz` returns status 200 if the agent's last progress is at most `timeout` seconds old, and
503 otherwise. The body is a JSON object with the age in both cases. The callback defines progress.
By torch's convention it returns the time of the last progress in whole seconds since the epoch.
An adjustment of the wall clock makes such an age wrong, so a caller should provide the age itself
if it can.

The server is a thread of the agent's process. It does not run in the agent's loop, because it must
report a loop that hangs. It shares the interpreter with the loop, so it does not respond if the
whole agent is stopped. A probe treats that as unhealthy too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from regrow.agent.attempt.environment import HEALTH_CHECK_PORT_ENV
from regrow.agent.features import Feature
from regrow.utils import describe, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.agent.job import Job
    from regrow.utils.http_server import HttpRequest, HttpResponse, HttpServer

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

TIMEOUT_S = 60
"""Seconds without progress after which an agent is unhealthy, as in torch."""
_PROBE_TIMEOUT_S = 1.0  # the loop must reply within this time

logger = get_logger(__name__)


class AgentHealth(Feature):
    """Serves the seconds since which the loop has not replied to a probe.

    Args:
        job: what the parts of the agent share.
        server: a server to use instead of a new one on `TORCHELASTIC_HEALTH_CHECK_PORT`.
        other_age: returns the seconds since the last progress of another thread that must make
            progress too.
    """

    def __init__(
        self,
        job: Job,
        server: HealthCheckServer | None = None,
        other_age: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._job = job
        self._server = server
        self._other_age = other_age
        self._asked: float | None = None  # monotonic: the first probe without a reply

    def open(self) -> None:
        """Start the server; a failure to start is logged and does not stop the training."""
        try:
            if self._server is None:
                port = int(os.environ[HEALTH_CHECK_PORT_ENV])
                self._server = HealthCheckServer(lambda: 0, port, TIMEOUT_S, age=self.age)
            self._server.start()
        except (OSError, ValueError) as error:
            logger.error("no health server (%s): %s", HEALTH_CHECK_PORT_ENV, error)

    def close(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def age(self) -> float:
        """Return for how many seconds the loop has not replied; send a probe and wait up to 1 s.

        The time counts from the first probe without a reply. So a loop that is busy for a moment
        is healthy, however long ago the last probe was.

        A subclass's own loop does not reply to probes. It always counts as healthy, as in torch.
        """
        age = 0.0
        if not self._job.own_loop:
            answered = threading.Event()
            self._asked = self._asked or time.monotonic()
            self._job.post(partial(self._answer, answered))
            answered.wait(_PROBE_TIMEOUT_S)
            asked = self._asked
            age = 0.0 if asked is None else time.monotonic() - asked
        return max(age, self._other_age())

    def _answer(self, answered: threading.Event) -> None:
        """Reply to a probe, also after its time; called by the loop."""
        self._asked = None
        answered.set()


class HealthCheckServer:
    """Serves `/healthz` on a TCP port, from `start` to `stop`.

    Args:
        alive_callback: returns the time of the agent's last progress, in seconds since the epoch.
        port: the port, on all addresses of the host, IPv6 and IPv4; 0 takes a free one.
        timeout: seconds without progress after which the agent counts as unhealthy.
        age: returns the seconds since the last progress; replaces `alive_callback` if given.

    Raises:
        ValueError: `port` is not a port number.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        port: int,
        timeout: int,
        *,
        age: Callable[[], float] | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"health check server: port {port} is not between 0 and 65535")
        self._port = port
        self._timeout = timeout
        # In whole seconds, like the callback's time: otherwise the age could be 1 s too high.
        self._age = age or (lambda: max(0, int(time.time()) - alive_callback()))
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port of the server; 0 until a free port is chosen."""
        return self._port

    def start(self) -> None:
        """Start to listen and respond; no effect on a running server.

        Raises:
            OSError: the port is in use or not allowed; the text names it.
        """
        if self._server is not None:
            return
        from regrow.store import listen
        from regrow.utils.http_server import HttpServer

        try:
            listener = listen("", self._port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            text = f"health check server: cannot listen on port {self._port}: {why}"
            raise OSError(error.errno, text) from error
        self._port = listener.getsockname()[1]
        self._server = HttpServer(listener, self._respond, "regrow-health")

    def stop(self) -> None:
        """Stop the server and release the port; return when both are done."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        from regrow.utils.http_server import HttpResponse

        if request.path != "/healthz":
            return HttpResponse(404, b"only /healthz is here\n")
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"only GET and HEAD\n")
        report: dict[str, object]
        try:
            age = self._age()
        except Exception as error:  # noqa: BLE001 - the probe gets the callback's error
            healthy, report = False, {"error": describe(error)}
        else:
            healthy, report = age <= self._timeout, {"last_progress_s": round(age, 3)}
        status = {"status": "healthy" if healthy else "unhealthy"}
        body = json.dumps(status | report).encode() + b"\n"
        return HttpResponse(200 if healthy else 503, body, "application/json")


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """Return a `HealthCheckServer` with these arguments; it is not started."""
    return HealthCheckServer(alive_callback, port, timeout)
