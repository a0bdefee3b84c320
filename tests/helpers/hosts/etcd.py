"""An etcd cluster on hosts of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from helpers.hosts.netns import Host, Network, Process

CLIENT_PORT = 2379
PEER_PORT = 2380
PATIENCE_S = 40.0


class Etcd:
    """A cluster with one member on each of `size` new hosts."""

    def __init__(self, network: Network, folder: Path, size: int) -> None:
        self.hosts = [network.host() for _ in range(size)]
        self.endpoint = ",".join(f"{host.addr}:{CLIENT_PORT}" for host in self.hosts)
        peers = ",".join(f"{host.name}=http://{host.addr}:{PEER_PORT}" for host in self.hosts)
        self._output = folder / "etcd.output"
        with self._output.open("ab") as output:
            self._members = {
                host.name: Process(host, _command(host, folder, peers), dict(os.environ), output)
                for host in self.hosts
            }
        self._await_health()

    def kill(self, host: Host) -> None:
        """End the member on this host by SIGKILL."""
        self._members[host.name].signal(9)
        self._members[host.name].wait(PATIENCE_S)

    def leader(self) -> Host:
        """Return the host of the leader."""
        for host in self.hosts:
            status = json.loads(
                host.run(
                    *("env", "ETCDCTL_API=3", "etcdctl", "--write-out=json"),
                    *(f"--endpoints={host.addr}:{CLIENT_PORT}", "endpoint", "status"),
                )
            )[0]["Status"]
            if status["leader"] == status["header"]["member_id"]:
                return host
        raise AssertionError("no member of the etcd cluster says that it leads")

    def _await_health(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        endpoints = f"--endpoints={self.endpoint}"
        while True:
            asked = ["env", "ETCDCTL_API=3", "etcdctl", endpoints, "endpoint", "health"]
            try:
                self.hosts[0].run(*asked)
            except subprocess.CalledProcessError as error:
                if time.monotonic() > deadline:
                    text = self._output.read_text(errors="replace")
                    raise AssertionError(f"etcd does not come up: {error.stderr} {text}") from None
                time.sleep(0.1)
            else:
                return


def _command(host: Host, folder: Path, peers: str) -> list[str]:
    client = f"http://{host.addr}:{CLIENT_PORT}"
    peer = f"http://{host.addr}:{PEER_PORT}"
    return [
        *("etcd", f"--name={host.name}", f"--data-dir={folder / host.name}.etcd"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
        *(f"--initial-cluster={peers}", "--initial-cluster-state=new", "--log-level=error"),
    ]
