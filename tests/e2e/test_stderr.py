"""stderr of the workers of a real job: nothing is lost, and a terminal stays one."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import DEADLINE_S
from helpers.processes import wait_until

FLOOD = """\
import mmap, os, signal, struct
counter = mmap.mmap(os.open("counter", os.O_RDWR), 8)
for number in range(10**9):
    os.write(2, b"line %d\\n" % number)
    counter[:8] = struct.pack("Q", number + 1)
    if number == 100_000:
        os.kill(int(os.environ["AGENT"]), signal.SIGKILL)
"""


def processes_in(folder: Path) -> list[str]:
    """Return the processes whose working directory is this folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == folder:
                found.append(link.parent.name)
    return found


def command(tmp_path: Path, script: str) -> list[str]:
    """Return the command of a job with the agent's process id in AGENT."""
    (tmp_path / "train.py").write_text(script)
    words = f"{sys.executable} -m regrow.run --standalone --log-dir={tmp_path}/logs"
    return ["sh", "-c", f"AGENT=$$ exec {words} {tmp_path}/train.py"]


def test_what_a_worker_wrote_before_its_agent_was_killed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "counter").write_bytes(bytes(8))
    with (tmp_path / "stderr").open("wb") as stderr:
        done = subprocess.run(
            command(tmp_path, FLOOD), stderr=stderr, cwd=tmp_path, timeout=DEADLINE_S, check=False
        )
    assert done.returncode < 0

    def written() -> list[str]:
        return (tmp_path / "stderr").read_text().splitlines()

    counter = tmp_path / "counter"

    def counted() -> int:
        return int.from_bytes(counter.read_bytes(), sys.byteorder)

    # The guardian kills the worker a moment after the death of the agent, and the relay ends then.
    wait_until(lambda: not processes_in(tmp_path), "no process of the job")
    assert len(written()) >= counted() > 100_000
    lines = written()
    assert lines == [f"line {number}" for number in range(len(lines))]


GIGABYTE = """\
import os
block = b"step 12345 loss 0.1234\\n" * 2000
for _ in range(24_000):
    os.write(2, block)
os.abort()
"""


@pytest.mark.thorough
def test_a_gigabyte_passes_byte_for_byte(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        subprocess.run(command(tmp_path, GIGABYTE), stderr=stderr, timeout=DEADLINE_S, check=False)
    line, count = b"step 12345 loss 0.1234\n", 0
    with (tmp_path / "stderr").open("rb") as stderr_read:
        while stderr_read.read(len(line) * 1000) == line * 1000:
            count += 1000
    assert count == 48_000_000


LOOKS = """\
import os, sys
size = os.get_terminal_size(2)
print(os.isatty(1), os.isatty(2), size.columns, size.lines, flush=True)
sys.stderr.write("\\r 10%\\n")
"""


def test_a_worker_at_a_terminal_has_a_terminal(tmp_path: Path) -> None:
    control, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    job = subprocess.Popen(
        command(tmp_path, LOOKS),
        stdout=side,
        stderr=side,
        env={**os.environ, "REGROW_STATUS_LINE": "0", "REGROW_VERBOSE": "0"},
    )
    os.close(side)
    screen = bytearray()
    try:
        while data := os.read(control, 1 << 16):
            screen += data
    except OSError:  # no process has the other side open
        pass
    os.close(control)
    assert job.wait(DEADLINE_S) == 0
    assert screen == b"True True 90 30\r\n\r 10%\r\n"
