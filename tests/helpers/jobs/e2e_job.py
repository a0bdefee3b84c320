"""A whole job under test: the launcher is a process, and its workers report through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.processes import alive, wait_until

DEADLINE_S = 40.0

PRELUDE = """
import os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])
def report(*words):
    fd = os.open(os.environ["REPORTS"], os.O_WRONLY)
    os.write(fd, (" ".join(map(str, (RANK, ATTEMPT, *words))) + "\\n").encode())
    os.close(fd)
def forever():
    # Not signal.pause(): one that comes just before it would be handled after the next one only.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    while True:
        os.read(read_end, 1)
"""


class Job:
    """One `regrow run` and its results."""

    def __init__(
        self,
        folder: Path,
        script: str,
        flags: list[str],
        env: dict[str, str],
        standalone: bool = True,
        prelude: str = PRELUDE,
    ) -> None:
        self.log_dir = folder / "logs"
        self.script = folder / "train.py"
        self.script.write_text(prelude + script)
        self.marker = uuid.uuid4().hex
        reports = folder / "reports"
        os.mkfifo(reports)
        # Opened for reading and writing, so that neither end waits for the other.
        self._reports = os.open(reports, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        command = [sys.executable, "-m", "regrow.run"]
        if standalone:
            command.append("--standalone")
        if not any(flag.startswith("--log-dir") for flag in flags):
            command += ["--log-dir", str(self.log_dir)]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *flags, str(self.script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"REPORTS": str(reports), "TEST_MARKER": self.marker} | env,
                start_new_session=True,
            )

    def reports(self, count: int = 1) -> list[list[str]]:
        """Return the next `count` reports of workers: rank, attempt, words."""
        deadline = time.monotonic() + DEADLINE_S
        while self._unread.count(b"\n") < count:
            if not select.select([self._reports], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(
                    f"received {self._unread!r}, not {count} lines; {self.output}{self.stacks()}"
                )
            self._unread += os.read(self._reports, 65536)
        *lines, self._unread = self._unread.split(b"\n", count)
        return [line.decode().split() for line in lines]

    def unread_reports(self) -> list[list[str]]:
        """Return all reports of workers that have arrived and that `reports` has not returned."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unread += os.read(self._reports, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode().split() for line in lines]

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def kill_family(self) -> None:
        """Kill the launcher and all processes of the job, as the loss of their host does.

        All are stopped first, so that none acts on the end of another.
        """
        family = [self.process.pid, *self._marked()]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        self.process.wait()

    def finish(self) -> int:
        """Return the launcher's exit status; assert that no process of the job is left."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher does not end; {self.output}") from None
        assert self.left_behind() == []
        return status

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    @property
    def output(self) -> str:
        return f"stdout: {self.stdout[-2000:]!r} stderr: {self.stderr[-4000:]!r}"

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the job's recorded events with the name `regrow.<name>`."""
        (path,) = self.log_dir.glob("*/events.jsonl")
        whole, _, _ = path.read_text().rpartition("\n")  # the last line may still be written
        events = [json.loads(line) for line in whole.splitlines()]
        return [event for event in events if event["name"] == f"regrow.{name}"]

    def await_event(
        self, name: str, like: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait for the first event `regrow.<name>` for which `like` is true, and return it."""

        def first() -> dict[str, Any] | None:
            started = any(self.log_dir.glob("*/events.jsonl"))
            return next(filter(like, self.events(name)), None) if started else None

        return wait_until(first, lambda: f"{name}; {self.output}", DEADLINE_S)

    def stacks(self) -> str:
        """Return the stacks of the job's processes, as py-spy prints them."""
        dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
        done = [
            subprocess.run(
                [*dump, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            for pid in self._marked()
        ]
        return b"\n".join(each.stdout for each in done).decode(errors="replace")

    def left_behind(self) -> list[str]:
        """Return the processes of this job that still run; killed processes get time to end."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._marked(), "no process is left", DEADLINE_S, pause=0.02)
        return [f"{pid} {_command_line(pid)}" for pid in self._marked()]

    def _marked(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is a kernel thread
                continue
        return found

    def owns(self, pid: int) -> bool:
        """Return whether a process belongs to this job."""
        return pid in self._marked()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self._marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.close(self._reports)


def wait_gone(pid: int) -> None:
    """Wait until the process `pid` has ended."""
    wait_until(lambda: not alive(pid), f"{pid} has ended", DEADLINE_S)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "?"
