"""A training job under a scheduler, for tests: its records and commands (`counting_train`)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.hosts.netns import Host, require_hosts
from helpers.pages import blocks, commands
from helpers.processes import wait_until

BATCH_SCRIPTS = [block.text for block in blocks("bash", "docs/guides/slurm.md")]
COMMANDS = commands("docs/guides/slurm.md")
"""The commands in docs/guides/slurm.md, word for word."""


class Record(NamedTuple):
    """One line that a rank wrote about itself."""

    what: str
    """Action: "started", "asks", "saved" or "finished"."""
    rank: int
    host: str
    pid: int
    """Process id on its own host."""
    step: int
    world_size: int
    attempt: int
    run: int
    """How many times Slurm had restarted the job."""


PATIENCE_S = 90.0
"""Seconds after which a test fails."""

START_LINES = 3
"""Lines at the start of a job: its meeting place, the threads of the workers, and the bounds."""


def stop_lines(nodes: int, output: str) -> int:
    """Return the lines of a job that is stopped: the signal, two of the story, one of each other
    agent.

    A scheduler signals one host after the other. The hosts that have no signal yet may start again
    without the first one. A new worker that has no handler yet then ends with a line. A story that
    is printed by one of these hosts has a restart more.
    """
    counted = r"was stopped by SIGTERM after .*?with\s+\d+\s+(restart|membership)"
    again = re.search(counted, output, re.DOTALL)
    logged = re.findall(r"regrow: .*; (?:waiting|restarting|no restarts|the rendezvous)", output)
    return 2 + nodes + (6 if again else 0) + len(logged)


def is_about_losses(line: str) -> bool:
    """Return whether the line says which hosts may be lost: a short job may end before it."""
    return re.search("regrow: the rendezvous (survives|does not survive) ", line) is not None


def unwrapped(output: str) -> list[str]:
    """Return the lines of an output without the continuations of the story's lines."""
    return [line for line in output.splitlines() if not line.startswith(" " * 16)]


_OF_A_HOST = ("slurmd", "munged", "cat", "nsenter", "unshare", "")
"""Programs that run on a host without any job."""


def require_schedulers(*tools: str) -> None:
    """Skip the test where hosts or these tools are missing; fail it in CI."""
    require_hosts()
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian: slurm-wlm, munge, openmpi-bin, gcc)")


def introduce(hosts: list[Host]) -> None:
    """Write the names of all hosts to each host's /etc/hosts."""
    names = "".join(f"{host.addr} {host.name}\n" for host in hosts)
    for host in hosts:
        host.run("sh", "-c", f"printf '127.0.0.1 localhost\n{names}' > /etc/hosts")


def left_over(hosts: list[Host]) -> list[str]:
    """Return the processes on the hosts that belong to a job."""
    found = []
    for host in hosts:
        for pid in host.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if Path(words[0].decode(errors="replace")).name not in _OF_A_HOST:
                found.append(f"{host.name}: {b' '.join(words).decode(errors='replace')}")
    return found


def prepare(folder: Path) -> None:
    """Write the files that the documented commands need: the script and the job's token."""
    shutil.copy(Path(__file__).with_name("counting_train.py"), folder / "train.py")
    (folder / "job.token").write_text("a token for the tests, of forty characters\n")
    (folder / "job.token").chmod(0o600)


class Training:
    """One training job.

    Args:
        folder: of the job.
        report: returns the state of the job, for a test that fails.
    """

    def __init__(self, folder: Path, report: Callable[[], str]) -> None:
        self.folder = folder
        self._report = report

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true, for at most `PATIENCE_S`."""
        wait_until(condition, lambda: f"{what}; {self._report()}", PATIENCE_S, pause=0.1)

    def records(self, what: str, **fields: Any) -> list[Record]:
        """Return the records of the kind `what` in which the fields have these values."""
        path = self.folder / "records"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [Record(**json.loads(line)) for line in lines]
        return [
            record
            for record in found
            if record.what == what
            and all(getattr(record, name) == value for name, value in fields.items())
        ]

    def runs(self, world_size: int, attempt: int = 0, run: int = 0) -> list[Record]:
        """Wait until all ranks of an attempt have started; return their records by rank."""
        which = {"world_size": world_size, "attempt": attempt, "run": run}
        self.wait_until(
            lambda: len(self.records("started", **which)) == world_size, f"runs: {which}"
        )
        return sorted(self.records("started", **which), key=lambda record: record.rank)

    def slow(self, rank: int | str, seconds: float) -> None:
        """Make the save of one rank, or of "all", take this many seconds."""
        (self.folder / "slow").write_text(f"{rank} {seconds}")

    def saved(self) -> dict[int, int]:
        """Return the last saved step of each rank."""
        return {
            int(path.name.removeprefix("saved.")): int(path.read_text())
            for path in self.folder.glob("saved.*")
        }

    def finish(self) -> None:
        """Let all ranks finish with success."""
        (self.folder / "finish").touch()
