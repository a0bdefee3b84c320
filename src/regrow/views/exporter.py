"""The exporter: a helper process of the agent that serves metrics and sends spans.

`regrow run --metrics-port` and `--otel-spans` start it. It reads the job's log directory and its
page of steps, as every view does, and the agent neither waits for it nor watches it. The agent only
binds the port, so that a port in use is an error before the job starts, and the helper inherits the
socket. The helper ends with the agent, whose end closes a pipe. A stopped helper is continued by
the kernel at that moment (PDEATHSIG), so that it can end too.

This module is loaded by the agent, so it imports nothing heavy.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FLUSH_S = 5.0
"""Seconds for the last spans at the end of a job."""
END_S = 1.0
"""Seconds for the end of a process that sends no spans."""
LISTENER, LIFELINE = 3, 0
"""Descriptors of the helper: the listening socket, and the pipe that ends with the agent."""
_BOOT = (
    "import sys; sys.path += sys.argv[3:]; from regrow.views.exporter_process import main;"
    " main(sys.argv[1], sys.argv[2].split(','))"
)


def address_of(value: str) -> tuple[str, int]:
    """Parse `PORT` or `ADDRESS:PORT`; without an address it is the loopback.

    Raises:
        ValueError: the value has neither form.
    """
    host, _, port = value.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{value!r} is neither a port nor ADDRESS:PORT; give for example 9400")
    return host.strip("[]") or "127.0.0.1", int(port)


def refusal(metrics_port: str | None, *, spans: bool) -> str | None:
    """Return why an exporter cannot be started, in one line; None if it can.

    Args:
        metrics_port: value of `--metrics-port`.
        spans: whether spans are sent.
    """
    if metrics_port:
        try:
            address_of(metrics_port)
        except ValueError as error:
            return f"--metrics-port: {error}"
        if find_spec("prometheus_client") is None:
            return "--metrics-port needs prometheus_client: pip install prometheus_client"
    if spans and not _has_opentelemetry():
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        return f"--otel-spans needs OpenTelemetry: pip install {packages}"
    return None


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None and (
            find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


def listen(value: str) -> socket.socket:
    """Return a socket that listens at the address `value` of `--metrics-port`.

    Raises:
        ValueError: the address is in use, or is none of this host.
    """
    host, port = address_of(value)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with ExitStack() as unless_it_listens:
            listener = socket.socket(family, socket.SOCK_STREAM)
            unless_it_listens.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
            unless_it_listens.pop_all()
    except OSError as error:
        raise ValueError(f"--metrics-port {value}: {error.strerror}") from error
    return listener


class Exporter:
    """The helper process of one agent; `start` starts it, `close` ends it.

    Args:
        directory: the job's log directory on this host.
        listener: the socket for metrics; None for no metrics. The exporter owns it.
        spans: whether to send spans.
    """

    def __init__(self, directory: str, listener: socket.socket | None, *, spans: bool) -> None:
        self._directory = directory
        self._listener = listener
        self._spans = spans
        self._kept = ExitStack()
        self._pidfd: int | None = None

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            environ: the agent's environment.

        Raises:
            OSError: it cannot be started.
        """
        from regrow.store import import_paths
        from regrow.utils import spawn_helper

        modes = [*(["metrics"] if self._listener else []), *(["spans"] if self._spans else [])]
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._kept.callback(os.close, writing)
        ours = [(reading, LIFELINE)]
        if self._listener is not None:
            ours.append((self._listener.detach(), LISTENER))
            self._listener = None
        with ExitStack() as passed:
            inherited: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, 2, 1)]
            for fd, its in ours:
                passed.callback(os.close, fd)
                # The copy has a number that no descriptor of the helper gets.
                copy = fcntl(fd, F_DUPFD_CLOEXEC, LISTENER + 1)
                passed.callback(os.close, copy)
                inherited.append((os.POSIX_SPAWN_DUP2, copy, its))
            # -P: prometheus_client is not a file beside a user's script.
            arguments = ["-P", "-c", _BOOT, self._directory, ",".join(modes), *import_paths()]
            try:
                pid = spawn_helper(arguments, environ, inherited)
            except OSError:
                self._kept.close()
                raise
        with suppress(OSError):  # it has ended already
            self._pidfd = os.pidfd_open(pid)

    def close(self) -> None:
        """End the process; it gets `FLUSH_S` to send the last spans."""
        from regrow.utils import end_process, ends_within, reap

        self._kept.close()
        if self._listener is not None:
            self._listener.close()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is None:
            return
        try:
            if not ends_within(pidfd, FLUSH_S if self._spans else END_S):
                end_process(pidfd)
            reap(pidfd)
        finally:
            os.close(pidfd)
