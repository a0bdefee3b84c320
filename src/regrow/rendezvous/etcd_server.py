"""torch's path `rendezvous.etcd_server`: an etcd with one member on this host, for tests.

No job needs this server. On one host, the agent keeps the round in memory. On several hosts, an
etcd with one member is lost with its host, like the server of `c10d`. The server uses version 3 of
etcd's API.

As with torch's class, etcd is an ordinary child process: it receives the signals of the terminal,
and outlives an owner that is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import IO

from regrow.utils import PortReservation, get_logger

__all__ = ["EtcdServer"]

BINARY_ENV = "TORCHELASTIC_ETCD_BINARY_PATH"
HOST = "127.0.0.1"
PAUSE_S = 0.02
GRACE_S = 10.0
"""Seconds in which etcd has to end after SIGTERM."""

logger = get_logger(__name__)


class EtcdServer:
    """An etcd on the loopback address, with free ports.

    The program is the one in TORCHELASTIC_ETCD_BINARY_PATH, or else `etcd` in PATH. It stops at the
    end of this process at the latest.

    Args:
        data_dir: directory for etcd's data, which is kept; None: a temporary directory, which is
            removed at the stop.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    def get_port(self) -> int:
        """Return the port for clients; -1 before the start."""
        return self._port

    def get_host(self) -> str:
        """Return the address on which etcd listens."""
        return HOST

    def get_endpoint(self) -> str:
        """Return `host:port`, in the format of `--rdzv-endpoint`."""
        return f"{HOST}:{self._port}"

    def start(
        self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[bytes] | None = None
    ) -> None:
        """Start etcd, and wait until it answers.

        Args:
            timeout: seconds in which etcd has to answer.
            num_retries: maximum number of attempts.
            stderr: destination of etcd's log, as for `subprocess.Popen`.

        Raises:
            OSError: the program does not exist, or cannot be started.
            RuntimeError: etcd runs already, or ended by itself.
            TimeoutError: etcd does not answer in time.
        """
        if self._process is not None:
            raise RuntimeError(f"this etcd already runs at {self.get_endpoint()}")
        for left in reversed(range(max(num_retries, 1))):
            try:
                self._start(timeout, stderr)
                return
            except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
                self.stop()
                if not left:
                    raise
                logger.warning("etcd did not start, trying again: %s", error)

    def stop(self) -> None:
        """Stop etcd, and remove its temporary directory."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _start(self, timeout: float, stderr: int | IO[bytes] | None) -> None:
        atexit.register(self.stop)
        data_dir = self._data_dir
        if data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(
                prefix="regrow-etcd-", ignore_cleanup_errors=True
            )
            data_dir = self._temporary.name
        # Held until etcd listens: Go's listeners share an address with a socket that does not.
        with PortReservation(HOST) as client_port, PortReservation(HOST) as peer_port:
            self._port = client_port.port
            clients, peers = f"http://{self.get_endpoint()}", f"http://{HOST}:{peer_port.port}"
            command = [
                *(os.environ.get(BINARY_ENV, "etcd"), "--data-dir", data_dir),
                *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"default={peers}"),
            ]
            # etcd would read ETCD_ variables of the user's own etcd as flags.
            environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
            self._process = subprocess.Popen(command, env=environment, stderr=stderr)
            deadline = time.monotonic() + timeout
            while not self._is_healthy():
                try:
                    code = self._process.wait(PAUSE_S)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"etcd at {self.get_endpoint()} does not answer within {timeout} s"
                        ) from None
                else:
                    raise RuntimeError(f"etcd ended with code {code}; see its log (stderr)")

    def _is_healthy(self) -> bool:
        try:
            with closing(HTTPConnection(HOST, self._port, timeout=1)) as connection:
                connection.request("GET", "/health")
                answer: object = json.loads(connection.getresponse().read())
        except (OSError, HTTPException, ValueError):
            return False
        return isinstance(answer, dict) and answer.get("health") == "true"
