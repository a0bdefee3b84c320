"""A file timer's server with recorded actions, and processes for it to watch."""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

from helpers.processes import PATIENCE, wait_until
from regrow.timer.fifo.request import FileTimerRequest, RequestRefusal
from regrow.timer.fifo.server import FileTimerServer, Reaping

# torch's own timer, without the rest of torch, which takes seconds to import.
TORCHS_TIMER = """
import importlib.util, sys, types
(root,) = importlib.util.find_spec("torch").submodule_search_locations
for name in ("", ".distributed", ".distributed.elastic", ".distributed.elastic.utils"):
    package = sys.modules["torch" + name] = types.ModuleType("torch" + name)
    package.__path__ = [root + name.replace(".", "/")]
from torch.distributed.elastic import timer
"""


class WatchedServer(FileTimerServer):
    """A server that queues its actions until the test reads them."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.events: list[tuple[str, FileTimerRequest | None]] = []
        super().__init__(
            str(path), "run", log_event=lambda *event: self.events.append(event), **options
        )
        self.reapings: queue.SimpleQueue[list[Reaping]] = queue.SimpleQueue()
        self.refusals: queue.SimpleQueue[RequestRefusal] = queue.SimpleQueue()
        self.seen: queue.SimpleQueue[FileTimerRequest] = queue.SimpleQueue()

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        super().register_timers(timer_requests)
        for request in timer_requests:
            self.seen.put(request)

    def before_reaping(self, reapings: list[Reaping]) -> None:
        self.reapings.put(reapings)

    def on_refused(self, refusal: RequestRefusal, request: FileTimerRequest | None) -> None:
        super().on_refused(refusal, request)
        self.refusals.put(refusal)

    def reaping(self) -> Reaping:
        """Return the next reaping; it must be of one worker."""
        (reaping,) = self.reapings.get(timeout=PATIENCE)
        return reaping

    def next_seen(self) -> FileTimerRequest:
        """Return the next request that the server accepted."""
        return self.seen.get(timeout=PATIENCE)

    def armed(self) -> list[tuple[int, str]]:
        """Return the pid and scope of all timers."""
        due = self.get_expired_timers(float("inf"))
        return sorted((pid, request.scope_id) for pid, found in due.items() for request in found)

    def wait_armed(self, timers: list[tuple[int, str]]) -> None:
        """Wait until exactly these timers are armed.

        The server reports a reaping before it clears the timers.
        """
        wait_until(lambda: self.armed() == timers, f"{timers} and no more are armed")


class Rig:
    """A running server, and processes; `clear` ends both."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        self.servers: list[FileTimerServer] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def serve(self, kind: type[WatchedServer] = WatchedServer, **options: Any) -> WatchedServer:
        """Start a server."""
        server = kind(self.path, **options)
        self.servers.append(server)
        server.start()
        return server

    def worker(self) -> subprocess.Popen[bytes]:
        """Start a process that sleeps for a long time."""
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        return self.processes[-1]

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program with pipes to its input and output."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        return process

    def write(self, *pieces: bytes) -> None:
        """Write into the pipe as an unrelated process might."""
        with open(self.path, "wb", buffering=0) as pipe:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[pipe.write(view) or 0 :]

    def waiting(self) -> int:
        """Return the number of bytes in the pipe."""
        with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
            return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])

    def arm(
        self, pid: int, after: float, scope: str = "scope", signal: int = 9, **clocks: float
    ) -> FileTimerRequest:
        """Arm a timer of a process; without `clocks`, in torch's format."""
        request = FileTimerRequest(pid, scope, time.time() + after, signal, **clocks)
        self.write(line(request))
        return request

    def release(self, pid: int, scope: str = "scope") -> None:
        """Release a timer."""
        self.write(line(FileTimerRequest(pid, scope, -1)))

    def clear(self) -> None:
        """End everything that is left."""
        for server in self.servers:
            server.stop()
        for process in self.processes:
            process.kill()
            process.communicate()


def line(request: FileTimerRequest) -> bytes:
    """Return a request as torch's client writes it."""
    return request.to_json().encode() + b"\n"
