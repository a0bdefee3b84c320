"""torch's path `rendezvous.etcd_server`: an etcd of one member on this host, for tests.

A job needs none: on one host its agent has the round in memory, and on several an etcd of one
member is lost with its host, as the server of `c10d` is. It speaks version 3 of etcd's API.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import IO, TYPE_CHECKING

from regrow.utils import PortReservation, get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EtcdServer"]

BINARY_ENV = "TORCHELASTIC_ETCD_BINARY_PATH"
HOST = "127.0.0.1"
_PAUSE_MS = 20.0

logger = get_logger(__name__)


class EtcdServer:
    """Starts and stops an etcd on loopback, at ports that are free.

    The program is what TORCHELASTIC_ETCD_BINARY_PATH names, else `etcd` in PATH. It is stopped at
    the end of this process at the latest.

    Args:
        data_dir: where it keeps its data, and leaves it; None is a directory that goes with it.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._temporary: str | None = None
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    def get_port(self) -> int:
        """The port on which clients are served; -1 before the start."""
        return self._port

    def get_host(self) -> str:
        """The address on which it listens."""
        return HOST

    def get_endpoint(self) -> str:
        """`host:port`, as `--rdzv-endpoint` takes it."""
        return f"{HOST}:{self._port}"

    def start(
        self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[bytes] | None = None
    ) -> None:
        """Start it, and wait until it answers.

        Args:
            timeout: seconds in which it has to.
            num_retries: how often that is tried.
            stderr: where it writes its log, as `subprocess.Popen` takes it.

        Raises:
            OSError: there is no such program, or it cannot be started.
            RuntimeError: it runs already, or ended by itself.
            TimeoutError: it does not answer in time.
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
                logger.warning("etcd did not start: %s; it is tried again", error)

    def stop(self) -> None:
        """Stop it, and remove the directory that was made for it."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _start(self, timeout: float, stderr: int | IO[bytes] | None) -> None:
        atexit.register(self.stop)
        if self._data_dir is None:
            self._temporary = tempfile.mkdtemp(prefix="regrow-etcd-")
        # Held until it listens, as Go's listeners share an address with one that does not.
        with PortReservation(HOST) as clients, PortReservation(HOST) as peers:
            self._port = clients.port
            command = self._command(self._data_dir or self._temporary or "", peers.port)
            # Those of a user's own etcd would be taken for flags.
            environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
            self._process = subprocess.Popen(command, env=environment, stderr=stderr)
            self._wait(self._process, timeout)

    def _command(self, data_dir: str, peer_port: int) -> Sequence[str]:
        clients, peers = f"http://{self.get_endpoint()}", f"http://{HOST}:{peer_port}"
        return (
            *(os.environ.get(BINARY_ENV, "etcd"), "--data-dir", data_dir),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )

    def _wait(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        pidfd = os.pidfd_open(process.pid)
        try:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            while not self._healthy():
                # It tells nobody when it is ready; its end cuts the pause short.
                if ended.poll(_PAUSE_MS):
                    code = process.wait()
                    raise RuntimeError(f"etcd ended with code {code}; see its log (stderr)")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"etcd at {self.get_endpoint()} does not answer within {timeout} s"
                    )
        finally:
            os.close(pidfd)

    def _healthy(self) -> bool:
        try:
            with closing(HTTPConnection(HOST, self._port, timeout=1)) as asked:
                asked.request("GET", "/health")
                answer: object = json.loads(asked.getresponse().read())
        except (OSError, HTTPException, ValueError):
            return False
        return isinstance(answer, dict) and answer.get("health") == "true"
