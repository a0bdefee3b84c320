"""The program of the exporter's process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import suppress
from threading import Lock
from time import monotonic

from regrow.ledger import read_ledgers
from regrow.utils import ready
from regrow.utils.http_server import HttpRequest, HttpResponse, HttpServer
from regrow.views.exporter import LIFELINE, LISTENER
from regrow.views.runs import Library
from regrow.views.watch import JobWatch

SPANS_S = 1.0
"""Seconds between two looks at the log for the ends of spans."""
LEDGER_S = 60.0
"""Seconds between two readings of the ledger; workers book their time into the log as often."""
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
        self._goodput = Goodput(directory)
        self._lock = Lock()

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the metrics at `/metrics`."""
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"only GET\n")
        if request.path not in ("/metrics", "/"):
            return HttpResponse(404, b"the metrics are at /metrics\n")
        from regrow.views.prometheus import exposition

        with self._lock:
            if self._watch is None:
                if not (jobs := self._library.jobs()):
                    return HttpResponse(503, b"the job has not started yet\n")
                self._watch = JobWatch(self._library, jobs[0])
            text = exposition(self._watch.snapshot(), self._goodput.ratio())
            return HttpResponse(200, text, CONTENT_TYPE)


class Goodput:
    """The goodput of the agent's run, read from its log now and then.

    Args:
        directory: the log directory of the agent's run.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._ratio: float | None = None
        self._read_at = float("-inf")

    def ratio(self) -> float | None:
        """Return the goodput; None if it is not known yet."""
        if monotonic() >= self._read_at + LEDGER_S:
            with suppress(OSError):
                ledgers = read_ledgers([self._directory], lambda broken_line: None)
                self._ratio = ledgers[-1].goodput if ledgers else None
            self._read_at = monotonic()
        return self._ratio
