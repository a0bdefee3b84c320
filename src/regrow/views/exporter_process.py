"""The program of the exporter's process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from threading import Lock

from regrow.utils import ready
from regrow.utils.http_server import HttpServer, Request, Response
from regrow.views.exporter import LIFELINE, LISTENER
from regrow.views.runs import Library
from regrow.views.watch import JobWatch

SPANS_S = 1.0
"""Seconds between two looks at the log for the ends of spans."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PR_SET_PDEATHSIG = 1


def main(directory: str, modes: list[str]) -> None:
    """Serve until the agent has ended.

    Args:
        directory: the log directory of the agent's run.
        modes: `metrics`, `spans` or both.
    """
    # A helper that was stopped by a signal reads the end of the pipe when it continues.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    server: HttpServer | None = None
    if "metrics" in modes:
        listener = socket.socket(fileno=LISTENER)
        os.set_inheritable(LISTENER, False)
        server = HttpServer(listener, Metrics(directory).answer, "regrow-metrics")
    if "spans" in modes:
        from regrow.views.spans import Sender

        sender = Sender(directory)
        while not ready([LIFELINE], SPANS_S):
            sender.send_new()
        sender.close()
    else:
        ready([LIFELINE])
    if server is not None:
        server.stop()


class Metrics:
    """Answers the requests of Prometheus; reads the job at each request only."""

    def __init__(self, directory: str) -> None:
        self._library = Library([directory])
        self._watch: JobWatch | None = None
        self._lock = Lock()

    def answer(self, request: Request) -> Response:
        """Return the metrics at `/metrics`."""
        if request.method not in ("GET", "HEAD"):
            return Response(405, b"only GET\n")
        if request.path not in ("/metrics", "/"):
            return Response(404, b"the metrics are at /metrics\n")
        from regrow.views.prometheus import exposition

        with self._lock:
            if self._watch is None:
                if not (jobs := self._library.jobs()):
                    return Response(503, b"the job has not started yet\n")
                self._watch = JobWatch(self._library, jobs[0])
            return Response(200, exposition(self._watch.snapshot()), CONTENT_TYPE)
