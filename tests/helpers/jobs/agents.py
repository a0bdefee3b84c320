"""Several `regrow run` on this machine, each as on a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from helpers.commands import Ended, run
from helpers.processes import PATIENCE, children_of, wait_until

# Prints its rank and node, then runs the lines that a test appends.
WORKER = """\
import os, signal, sys
rank, world, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
os.write(1, f"rank {rank} of {world} on node {node}\\n".encode())
open(f"started-{rank}-of-{world}", "w").close()
"""
WAIT = "signal.pause()\n"


class Hosts:
    """Agents on this machine that act as if on several hosts; they share one rendezvous port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._port = port
        self._agents: list[subprocess.Popen[str]] = []

    def start(
        self, flags: str, worker: str = "", arguments: Sequence[str] = (), **environ: str
    ) -> subprocess.Popen[str]:
        """Start an agent; PORT in its flags stands for the rendezvous port."""
        (self.folder / "train.py").write_text(WORKER + worker)
        agent = subprocess.Popen(
            [*self._command(f"run {flags}"), "train.py", *arguments],
            cwd=self.folder,
            env={**os.environ, **self._home(), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._agents.append(agent)
        return agent

    def regrow(self, command: str) -> Ended:
        """Run another command of regrow on one of the hosts; PORT is as in `start`."""
        return run(self._command(command), cwd=self.folder, env=self._home(), timeout_s=PATIENCE)

    def _command(self, text: str) -> list[str]:
        return [sys.executable, "-m", "regrow", *text.replace("PORT", str(self._port)).split()]

    def _home(self) -> dict[str, str]:
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": "", "TMPDIR": str(self.folder)}
        return home | {"REGROW_VERBOSE": "0"}  # the start line differs from run to run

    def ended(self, agent: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for the end of an agent; return its exit code, and the output with its workers'."""
        output, _ = agent.communicate(timeout=PATIENCE)
        return agent.returncode, output

    def wait_for(self, *names: str) -> None:
        """Wait until the workers have created these files."""
        for name in names:
            wait_until((self.folder / name).exists, name)

    def close(self) -> None:
        for agent in self._agents:
            with suppress(ProcessLookupError):
                agent.kill()
            agent.communicate()


def store_server_of(agent: subprocess.Popen[str]) -> int:
    """Wait until an agent has started the store server, and return the server's process id."""
    wait_until(lambda: bool(store_servers_below(agent.pid)), "the store server")
    return store_servers_below(agent.pid)[0]


def store_servers_below(parent: int) -> list[int]:
    """Return the process ids of the store servers that a process has started."""
    found = []
    for pid in children_of(parent):
        with suppress(OSError):
            if b"regrow.store.server.serving" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
