"""etcd servers of the host (Debian: etcd-server, etcd-client) for the benchmarks."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from regrow.utils import PortReservation

START_S = 30.0
"""Time for the members to start, in seconds."""


@dataclass(frozen=True, slots=True)
class Member:
    """One etcd process."""

    endpoint: str
    """Where its clients connect, `HOST:PORT`."""
    pid: int

    def leads(self) -> bool:
        """Return whether this member says that it is the leader."""
        status = _etcdctl(self.endpoint, "endpoint", "status", "--write-out", "fields")
        fields = dict(line.split(" : ", 1) for line in status.splitlines() if " : " in line)
        return fields.get('"Leader"') == fields.get('"MemberID"', "?")


@contextmanager
def etcd(count: int = 1) -> Iterator[list[Member]]:
    """Start etcd with some members on the loopback; kill them at the end.

    Raises:
        SystemExit: it does not start; the text has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="bench_etcd_") as folder, ExitStack() as stack:
        ports = [
            [stack.enter_context(PortReservation()).port for _ in range(2)] for _ in range(count)
        ]
        cluster = ",".join(
            f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports)
        )
        log_path = Path(folder, "log")
        log = stack.enter_context(log_path.open("ab"))
        members = []
        for number, (client_port, peer_port) in enumerate(ports):
            client, peer = (f"http://127.0.0.1:{port}" for port in (client_port, peer_port))
            command = [
                *("etcd", "--data-dir", f"{folder}/{number}", "--name", f"m{number}"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster),
            ]
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            members.append(Member(client.removeprefix("http://"), process.pid))
        deadline = time.monotonic() + START_S
        while not all(_etcdctl(each.endpoint, "endpoint", "health") for each in members):
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: etcd does not start: {log_path.read_text()[-500:]}")
        yield members


def _etcdctl(endpoint: str, *words: str) -> str:
    """Return what etcdctl prints; the empty string if it fails."""
    done = subprocess.run(
        ["etcdctl", "--endpoints", endpoint, *words],
        env={**os.environ, "ETCDCTL_API": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "" if done.returncode else done.stdout
