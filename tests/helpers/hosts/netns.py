"""Hosts of a network on one machine; each host has namespaces of its own.

A host has its own network (with one interface, eth0), host name, process ids, /etc/hosts and
/etc/resolv.conf. Files and clocks are shared. A host knows only its own name. There is no name
server: the network refuses queries at once. With `Network(names="silent")` queries get no answer,
so that a program that resolves names waits. All hosts are connected to a switch in user space
(`netns_switch`). It can cut a link, also in one direction only, delay it, and drop frames.

Nothing has a name outside these namespaces, and nothing needs a clean-up. Every process ends with
the pipe to the test that started it. If the test is killed, the first process of each host reads
the end of its input and exits. The kernel then kills all other processes of the host and frees
their resources.
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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

from helpers.hosts import netns_switch
from helpers.processes import children_of, wait_until

SUBNET = "10.71.0"
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")

# $1 name, $2 address, $3 folder of files for /etc. The kernel reaps ended children, because the
# host's first process inherits all orphans.
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
    """Skip the test where hosts are not possible; fail it instead where REGROW_TEST_ALL is 1."""
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
    """The host or the network could not be set up."""


class Host:
    """One host; `Network.host` creates it."""

    def __init__(self, network: Network, port: int) -> None:
        self.port = port
        self.name = f"node{port}"
        self.addr = f"{SUBNET}.{port}"
        self._network = network
        self._entered: list[subprocess.Popen[Any]] = []
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")
        unshare = ["unshare", *spaces, "--fork", "--kill-child"]
        with tempfile.TemporaryDirectory(
            prefix="netns_"
        ) as etc:  # after the mount the folder's name is not needed
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

    def processes(self) -> list[int]:
        """Return the ids of all processes on the host, as the test sees them."""
        space = _space_of(self.pid)
        return [pid for pid in _every_process() if _space_of(pid) == space]

    def signal(self, signum: int) -> None:
        """Send a signal to all processes on the host, and none to the host itself."""
        for pid in self.processes():
            if pid != self.pid:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signum)

    def pid_here(self, pid: int) -> int:
        """Return the id, as the test sees it, of the process with the id `pid` on the host."""
        for here in self.processes():
            status = Path(f"/proc/{here}/status").read_text()
            if int(status.partition("NSpid:")[2].split("\n")[0].split()[-1]) == pid:
                return here
        raise HostError(f"{self.name} has no process {pid}")

    def run(self, *command: str) -> str:
        """Run a short program on the host and return its output."""
        return subprocess.run(
            [*self._enter, *command], check=True, capture_output=True, text=True
        ).stdout

    def link(self, state: str) -> None:
        """Set the host's interface "up" or "down", as an administrator would."""
        self.run("ip", "link", "set", "eth0", state)

    def destroy(self) -> None:
        """Kill all processes of the host and remove it; the kernel may still notify its peers."""
        for process in (self._boot, *self._entered):
            _end(process)

    def hang_up(self) -> None:
        """Close the input of the host's first process, as happens when the test is killed."""
        assert self._boot.stdin is not None
        self._boot.stdin.close()

    def lose_power(self) -> None:
        """Remove the host without any notice to its peers."""
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

    Only a child enters a namespace of process ids. So nsenter stays and forwards the end of the
    program: `wait` returns what `Popen.wait` would have returned.
    """

    def __init__(
        self, host: Host, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> None:
        self._nsenter = host.popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
        wait_until(lambda: bool(self._children()), f"{command} runs on {host.name}")
        self.pid = self._children()[0]
        """Process id as the test sees it; on its host the process has another id."""

    def _children(self) -> list[int]:
        assert self._nsenter.poll() is None, f"nsenter ended with {self._nsenter.returncode}"
        return children_of(self._nsenter.pid)

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._nsenter.poll()

    def wait(self, timeout: float) -> int:
        """Wait for the exit status and return it; raises subprocess.TimeoutExpired."""
        return self._nsenter.wait(timeout)

    def signal(self, signum: int) -> None:
        """Send a signal to the program."""
        os.kill(self.pid, signum)
        if signum == signal.SIGCONT:  # nsenter stops itself along with the program
            self._nsenter.send_signal(signum)


class Network:
    """A switch and its hosts; a context manager that removes them at its end."""

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
        """Add a host: the first is called node1 and has the address 10.71.0.1."""
        host = Host(self, len(self.hosts) + 1)
        self.hosts.append(host)
        return host

    def restore(self, host: Host) -> Host:
        """Add a host in the place of one that has lost its power, with its name and address."""
        restored = self.hosts[self.hosts.index(host)] = Host(self, host.port)
        self.mend(restored)
        return restored

    def cut(self, host: Host, directions: str = "both") -> None:
        """Drop all frames: "out" from the host, "in" to the host, or "both"."""
        self._change(host, directions, cut=True)

    def mend(self, host: Host) -> None:
        """Undo `cut`."""
        self._change(host, "both", cut=False)

    def impair(self, host: Host, delay_s: float, loss: float, directions: str = "both") -> None:
        """Delay each frame by `delay_s` and drop the share `loss`; `directions` as in `cut`."""
        self._change(host, directions, delay_s=delay_s, loss=loss)

    def impair_all(self, delay_s: float, loss: float) -> None:
        """Delay and drop frames between all hosts, also hosts that are added later."""
        self._everywhere = {"delay_s": delay_s, "loss": loss}
        self.command(do="lines", **self._everywhere)

    def close(self) -> None:
        """Remove the hosts and the switch."""
        for host in self.hosts:
            host.destroy()
        _end(self._switch)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, **words: Any) -> None:
        """Send the switch a command and wait until it is done."""
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


def _every_process() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _space_of(pid: int) -> int | None:
    """Return the process-id namespace of a process; None when it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
