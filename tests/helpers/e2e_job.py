"""A whole job under test: the launcher as a process, workers that tell what they do by a pipe."""

from __future__ import annotations

import ctypes
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

from processes import wait_until

DEADLINE_S = 40.0
_IN_MODIFY = 2

PRELUDE = """
import os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])
def tell(*words):
    fd = os.open(os.environ["NEWS"], os.O_WRONLY)
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
    """One `regrow run` and what becomes of it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        flags: list[str],
        env: dict[str, str],
        standalone: bool = True,
    ) -> None:
        self.log_dir = folder / "logs"
        self.script = folder / "train.py"
        self.script.write_text(PRELUDE + script)
        self.marker = uuid.uuid4().hex
        news = folder / "news"
        os.mkfifo(news)
        # Read and write, so that neither end ever waits for the other.
        self._news = os.open(news, os.O_RDWR | os.O_NONBLOCK)
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
                env=os.environ | {"NEWS": str(news), "TEST_MARKER": self.marker} | env,
                start_new_session=True,
            )

    def news(self, count: int = 1) -> list[list[str]]:
        """The next `count` things told by workers: rank, attempt, words."""
        deadline = time.monotonic() + DEADLINE_S
        while self._unread.count(b"\n") < count:
            if not select.select([self._news], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(
                    f"heard {self._unread!r}, not {count} lines; {self.output}{self.stacks()}"
                )
            self._unread += os.read(self._news, 65536)
        *lines, self._unread = self._unread.split(b"\n", count)
        return [line.decode().split() for line in lines]

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def finish(self) -> int:
        """The launcher's exit status; nothing of the job may be left behind."""
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
        """The job's recorded events called `regrow.<name>`."""
        (path,) = self.log_dir.glob("*/events.jsonl")
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if event["name"] == f"regrow.{name}"]

    def await_event(
        self, name: str, like: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """The first recorded event called `regrow.<name>` that is `like`, as soon as there is."""
        deadline = time.monotonic() + DEADLINE_S
        wait_until(lambda: any(self.log_dir.glob("*/events.jsonl")), "a log of events")
        (path,) = self.log_dir.glob("*/events.jsonl")
        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_CLOEXEC)
        try:
            assert libc.inotify_add_watch(watch, os.fsencode(path), _IN_MODIFY) >= 0
            while not (found := list(filter(like, self.events(name)))):
                left = deadline - time.monotonic()
                assert select.select([watch], [], [], max(0, left))[0], f"no {name}; {self.output}"
                os.read(watch, 4096)
            return found[0]
        finally:
            os.close(watch)

    def stacks(self) -> str:
        """Where the processes of this job stand, as py-spy has it."""
        dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
        done = [
            subprocess.run(
                [*dump, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            for pid in self._marked()
        ]
        return b"\n".join(each.stdout for each in done).decode(errors="replace")

    def left_behind(self) -> list[str]:
        """Processes of this job that still run, waiting for those just being killed."""
        deadline = time.monotonic() + DEADLINE_S
        for pid in self._marked():
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([pidfd], [], [], max(0, deadline - time.monotonic()))
            os.close(pidfd)
        return [f"{pid} {_command_line(pid)}" for pid in self._marked()]

    def _marked(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or a kernel thread
                continue
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self._marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.close(self._news)


def wait_gone(pid: int) -> None:
    """Until the process `pid` has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], DEADLINE_S)[0], f"{pid} still runs"
    finally:
        os.close(pidfd)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "?"
