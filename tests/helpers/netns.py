"""Hosts of a network, each in namespaces of its own, on one machine.

A host has its own network (with one interface, eth0), host name, process ids, /etc/hosts and
/etc/resolv.conf; files and clocks are shared. It knows its own name and no other. There is no name
server: questions are refused at once, or with `Network(names="silent")` never answered, so that a
program that looks up names notices. Links lead to a switch in user space (`netns_switch`), where
they can be cut, in one direction too, slowed and made to lose frames.

Nothing is given a name outside of these namespaces, and nothing has to be cleaned up: all ends
with the processes, and each of them ends with the pipe to the test that made it. If the test is
killed, the first process of each host reads the end of its input and goes, with which the kernel
kills all others in the host, and what they held is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import netns_switch
import pytest
from processes import children_of, wait_until

SUBNET = "10.71.0"
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")

# $1 name, $2 address, $3 folder of files for /etc. Ended children are reaped by the kernel: the
# host's first process inherits those whose parent is gone.
_BOOT = """
set -e
trap '' CHLD
hostname "$1"
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/resolv.conf" /etc/resolv.conf
ip link set lo up
echo booted
read plugged
ip address add "$2/24" dev eth0
ip link set eth0 up
echo up
exec cat
"""


def require_hosts() -> None:
    """Skip the test where there can be no hosts; fail it instead where REGROW_TEST_ALL is 1."""
    why = _why_not()
    if why and os.environ.get("REGROW_TEST_ALL") == "1":
        pytest.fail(f"REGROW_TEST_ALL is 1, but network namespaces cannot be made: {why}")
    if why:
        pytest.skip(f"hosts are network namespaces, which cannot be made here: {why}")


@cache
def _why_not() -> str:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: iproute2, util-linux, mount, hostname)"
    try:
        with Network() as network:
            network.host()
    except HostError as error:
        return str(error)
    return ""


class HostError(Exception):
    """A host or the network could not be made."""


class Host:
    """One host; made by `Network.host`."""

    def __init__(self, network: Network, port: int) -> None:
        self.port = port
        self.name = f"node{port}"
        self.addr = f"{SUBNET}.{port}"
        self._network = network
        self._entered: list[subprocess.Popen[Any]] = []
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")
        unshare = ["unshare", *spaces, "--fork", "--kill-child"]
        with tempfile.TemporaryDirectory(prefix="netns_") as etc:  # once mounted, its name can go
            Path(etc, "hosts").write_text(f"127.0.0.1 localhost\n{self.addr} {self.name}\n")
            Path(etc, "resolv.conf").write_text(f"nameserver {network.name_server}\n")
            boot = ["sh", "-c", _BOOT, "sh", self.name, self.addr, etc]
            self._boot = subprocess.Popen(
                [*unshare, *boot],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            try:
                self._await("booted")
                (self.pid,) = children_of(self._boot.pid)
                network.command(do="plug", port=port, pid=self.pid)
                self._say("plugged")
                self._await("up")
            except BaseException:
                self.destroy()
                raise

    def popen(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a program on the host; the arguments are those of subprocess.Popen."""
        process = subprocess.Popen([*self._enter, *command], **how)
        self._entered.append(process)
        return process

    def run(self, *command: str) -> str:
        """Run a short program on the host and return what it writes."""
        return subprocess.run(
            [*self._enter, *command], check=True, capture_output=True, text=True
        ).stdout

    def link(self, state: str) -> None:
        """Set the host's interface "up" or "down", as an administrator would."""
        self.run("ip", "link", "set", "eth0", state)

    def destroy(self) -> None:
        """Kill everything on the host and take it away; its peers may be told by the kernel."""
        for process in (self._boot, *self._entered):
            _end(process)

    def hang_up(self) -> None:
        """Do what happens when the test is killed: the host's first process loses its input."""
        assert self._boot.stdin is not None
        self._boot.stdin.close()

    def lose_power(self) -> None:
        """Take the host away without a last word to anybody."""
        self._network.cut(self)
        self.destroy()

    @property
    def _enter(self) -> list[str]:
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ["nsenter", "--target", str(self.pid), *spaces]

    def _say(self, word: str) -> None:
        assert self._boot.stdin is not None
        self._boot.stdin.write(f"{word}\n")

    def _await(self, word: str) -> None:
        assert self._boot.stdout is not None
        assert self._boot.stderr is not None
        if self._boot.stdout.readline().strip() != word:
            raise HostError(f"{self.name}: {self._boot.stderr.read().strip()}")


class Process:
    """A program that runs on a host.

    A namespace of process ids is entered by a child only, so nsenter stays, and hands the end of
    the program on: `wait` returns what `Popen.wait` would have.
    """

    def __init__(
        self, host: Host, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> None:
        self._nsenter = host.popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
        wait_until(lambda: bool(self._children()), f"{command} runs on {host.name}")
        self.pid = self._children()[0]
        """As seen from here; on its host it has another."""

    def _children(self) -> list[int]:
        assert self._nsenter.poll() is None, f"nsenter ended with {self._nsenter.returncode}"
        return children_of(self._nsenter.pid)

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._nsenter.poll()

    def wait(self, timeout: float) -> int:
        """The exit status, as soon as there is one; raises subprocess.TimeoutExpired."""
        return self._nsenter.wait(timeout)

    def signal(self, signum: int) -> None:
        """Send a signal to the program."""
        os.kill(self.pid, signum)
        if signum == signal.SIGCONT:  # nsenter stops itself along with the program
            self._nsenter.send_signal(signum)


class Network:
    """A switch and the hosts on it; a context manager that takes all of it away at its end."""

    def __init__(self, names: str = "refused") -> None:
        self.hosts: list[Host] = []
        self.name_server = f"{SUBNET}.254" if names == "silent" else "127.0.0.1"
        self._lines: dict[tuple[int, int], dict[str, Any]] = {}
        self._everywhere: dict[str, Any] = {}
        self._switch = subprocess.Popen(
            ["unshare", "--net", sys.executable, netns_switch.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self._answered("a switch cannot be started")
        except HostError:
            self.close()
            raise

    def host(self) -> Host:
        """Make a host: the first is called node1 and has the address 10.71.0.1."""
        host = Host(self, len(self.hosts) + 1)
        self.hosts.append(host)
        return host

    def cut(self, host: Host, directions: str = "both") -> None:
        """Let nothing through any more: "out" of the host, "in" to it, or "both"."""
        self._change(host, directions, cut=True)

    def mend(self, host: Host) -> None:
        """Let everything through again."""
        self._change(host, "both", cut=False)

    def impair(self, host: Host, delay_s: float, loss: float, directions: str = "both") -> None:
        """Delay each frame by seconds, and lose a share of them; `directions` as in `cut`."""
        self._change(host, directions, delay_s=delay_s, loss=loss)

    def impair_all(self, delay_s: float, loss: float) -> None:
        """Do so on the way from each host to each other, also those that are made later."""
        self._everywhere = {"delay_s": delay_s, "loss": loss}
        self.command(do="lines", **self._everywhere)

    def close(self) -> None:
        """Take everything away."""
        for host in self.hosts:
            host.destroy()
        _end(self._switch)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, **words: Any) -> None:
        """Have the switch do something; returns when it has."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(words) + "\n")
        self._answered(f"the switch cannot {words}")

    def _answered(self, what: str) -> None:
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        answer = self._switch.stdout.readline()
        why = json.loads(answer) if answer else self._switch.stderr.read()
        if why is not None:
            raise HostError(f"{what}: {why.strip()}")

    def _change(self, host: Host, directions: str, **properties: Any) -> None:
        for peer in self.hosts:
            ways = {"out": (host.port, peer.port), "in": (peer.port, host.port)}
            for direction, way in ways.items():
                if peer is not host and directions in (direction, "both"):
                    line = self._lines.setdefault(way, dict(self._everywhere))
                    line.update(properties)
                    self.command(do="line", **{"from": way[0], "to": way[1]}, **line)


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
