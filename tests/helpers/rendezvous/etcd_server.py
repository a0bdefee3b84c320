"""Real etcd servers on loopback: one alone, or a cluster of three. A test can kill each member."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

import pytest

from helpers.stores.storing import PATIENCE
from regrow.rendezvous.backends.etcd.etcd_client import EtcdError
from regrow.utils import PortReservation

Ports = tuple[PortReservation, PortReservation, PortReservation]
ETCD = "/usr/bin/etcd"


def require_etcd() -> None:
    """Skip the calling test where there is no etcd; fail it where CI promises one."""
    if os.path.exists(ETCD):
        return
    why = f"needs {ETCD} (Debian, Ubuntu: apt-get install etcd-server)"
    if os.environ.get("REGROW_TEST_ALL") == "1":
        pytest.fail(why)
    pytest.skip(why)


class Certificate:
    """A self-signed certificate for 127.0.0.1, for client and server, and as its own authority."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = str(folder / "cert.pem"), str(folder / "key.pem")
        subprocess.run(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-keyout {self.key} -out {self.cert} -subj /CN=etcd "
            "-addext subjectAltName=IP:127.0.0.1".split(),
            check=True,
            capture_output=True,
        )


class EtcdProcess:
    """One etcd process; its data are in memory where the host has a file system for that."""

    def __init__(
        self,
        name: str = "alone",
        ports: Ports | None = None,
        cluster: str = "",
        certificate: Certificate | None = None,
        *options: str,
    ) -> None:
        self._ports = ports or reserve_ports()  # held until `remove`: other members use others
        self.port, self.peer_port, self._health_port = (held.port for held in self._ports)
        self.endpoint = f"127.0.0.1:{self.port}"
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix="regrow-etcd-", dir=shm)
        peer = f"http://127.0.0.1:{self.peer_port}"
        client = f"{'https' if certificate else 'http'}://{self.endpoint}"
        self._command = [
            *(ETCD, "--name", name, "--data-dir", f"{self._folder}/data"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster or f"{name}={peer}"),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._health_port}"),
            *options,
        ]
        if certificate is not None:
            files = ("--cert-file", certificate.cert, "--key-file", certificate.key)
            self._command += [*files, "--client-cert-auth", "--trusted-ca-file", certificate.cert]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process; `wait_until_healthy` returns when it is ready."""
        self._log = open(f"{self._folder}/log", "ab")  # noqa: SIM115 - closed in kill
        # The variables of a user's own etcd are removed; this etcd would read them as flags.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=self._log,
            env={**environment, "GOMAXPROCS": "1"},
        )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.healthy():
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def healthy(self) -> bool:
        try:
            return bool(json.loads(self._ask("/health"))["health"] == "true")
        except (OSError, ValueError):
            return False

    def leads(self) -> bool:
        """Return whether the member believes that it is the leader."""
        try:
            return b"\netcd_server_is_leader 1\n" in self._ask("/metrics")
        except OSError:
            return False

    def requests(self) -> int:
        """Return the number of calls of every kind that it has begun to answer."""
        lines = self._ask("/metrics").decode().splitlines()
        started = [line for line in lines if line.startswith("grpc_server_started_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in started)

    def log(self) -> str:
        return Path(self._folder, "log").read_text(errors="replace")[-4000:]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL; `start` restarts it with its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._log.close()
            self._process = None

    def lose_data(self) -> None:
        """End it and delete its data; `start` creates it again without data."""
        self.kill()
        shutil.rmtree(f"{self._folder}/data")

    def remove(self) -> None:
        self.kill()
        for held in self._ports:
            held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, path: str) -> bytes:
        with urlopen(f"http://127.0.0.1:{self._health_port}{path}", timeout=PATIENCE) as answer:
            content: bytes = answer.read()
            return content


class EtcdCluster:
    """An etcd cluster and its members."""

    def __init__(self, size: int = 3, certificate: Certificate | None = None) -> None:
        ports = [reserve_ports() for _ in range(size)]
        peers = ",".join(f"m{n}=http://127.0.0.1:{ports[n][1].port}" for n in range(size))
        # Test machines are often busy: a leader that is slow for a moment keeps its role.
        calm = ("--heartbeat-interval", "100", "--election-timeout", "1000")
        self.members = [
            EtcdProcess(f"m{n}", ports[n], peers if size > 1 else "", certificate, *calm)
            for n in range(size)
        ]

    def __enter__(self) -> Self:
        for member in self.members:
            member.wait_until_healthy()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.remove()

    @property
    def endpoint(self) -> str:
        """All members, in the notation of --rdzv-endpoint."""
        return ",".join(member.endpoint for member in self.members)

    def leader(self) -> EtcdProcess:
        """Wait until there is a leader, and return it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for member in self.members:
                if member.leads():
                    return member
            assert time.monotonic() < deadline, "the cluster has no leader"
            time.sleep(0.02)

    def follower(self) -> EtcdProcess:
        leader = self.leader()
        return next(member for member in self.members if member is not leader)


@contextmanager
def etcd(size: int = 1, certificate: Certificate | None = None) -> Iterator[EtcdCluster]:
    """A cluster for the time of a `with`; skips the test where there is no etcd."""
    require_etcd()
    with EtcdCluster(size, certificate) as cluster:
        yield cluster


@cache
def shared_etcd() -> str:
    """Return the endpoint of a server that lives as long as this process; use your own prefix."""
    servers = ExitStack()
    endpoint = servers.enter_context(etcd()).endpoint
    atexit.register(servers.close)
    return endpoint


def reserve_ports() -> Ports:
    """Reserve three free ports, so that no other process uses them."""
    return PortReservation("127.0.0.1"), PortReservation("127.0.0.1"), PortReservation("127.0.0.1")


def enable_passwords(call: Any, user: str, password: str) -> None:
    """Enable passwords, with a user that has all rights; `call(path, message)` calls etcd."""
    for name in dict.fromkeys(("root", user)):
        try:
            call("auth/user/add", {"name": name, "password": password})
        except (
            EtcdError
        ) as error:  # the first answer missed its deadline: hashing a password takes time
            if "already exists" not in str(error):
                raise
        call("auth/user/grant", {"user": name, "role": "root"})
    call("auth/enable", {})
