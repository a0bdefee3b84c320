"""A file timer's server that is watched, and processes for it to watch."""

from __future__ import annotations

import queue
import subprocess
import time
from pathlib import Path
from typing import Any

from processes import PATIENCE, wait_until

from regrow.timer._file_request import FileTimerRequest
from regrow.timer._file_server import FileTimerServer, Reaping
from regrow.timer._lines import Refusal

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
    """Keeps what it does until it is asked for."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.events: list[tuple[str, FileTimerRequest | None]] = []
        super().__init__(
            str(path), "run", log_event=lambda *event: self.events.append(event), **options
        )
        self.reapings: queue.SimpleQueue[list[Reaping]] = queue.SimpleQueue()
        self.refusals: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
        self.seen: queue.SimpleQueue[FileTimerRequest] = queue.SimpleQueue()

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        super().register_timers(timer_requests)
        for request in timer_requests:
            self.seen.put(request)

    def _before_reaping(self, reapings: list[Reaping]) -> None:
        self.reapings.put(reapings)

    def _refused(self, refusal: Refusal, request: FileTimerRequest | None) -> None:
        super()._refused(refusal, request)
        self.refusals.put(refusal)

    def reaping(self) -> Reaping:
        """The next reaping, of one worker."""
        (reaping,) = self.reapings.get(timeout=PATIENCE)
        return reaping

    def next_seen(self) -> FileTimerRequest:
        """The next request that counted."""
        return self.seen.get(timeout=PATIENCE)

    def armed(self) -> list[tuple[int, str]]:
        """The pid and scope of all timers."""
        with self._lock:
            due = self._timers.due(float("inf"))
        return sorted((pid, request.scope_id) for pid, found in due.items() for request in found)

    def wait_armed(self, timers: list[tuple[int, str]]) -> None:
        """Wait until these are all: who is reaped is told of before its timers are cleared."""
        wait_until(lambda: self.armed() == timers, f"{timers} and no more are armed")


class Rig:
    """A server, started, and processes; all gone after `clear`."""

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
        """A process that does nothing, for long."""
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        return self.processes[-1]

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program that can be talked to."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        return process

    def write(self, *pieces: bytes) -> None:
        """Write into the pipe as a process might that has nothing to do with us."""
        with open(self.path, "wb", buffering=0) as pipe:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[pipe.write(view) or 0 :]

    def arm(
        self, pid: int, after: float, scope: str = "scope", signal: int = 9, **clocks: float
    ) -> FileTimerRequest:
        """Arm a timer of a process, in torch's way if no clocks are given."""
        request = FileTimerRequest(pid, scope, time.time() + after, signal, **clocks)
        self.write(line(request))
        return request

    def release(self, pid: int, scope: str = "scope") -> None:
        """Release one."""
        self.write(line(FileTimerRequest(pid, scope, -1)))

    def clear(self) -> None:
        """End all that is left."""
        for server in self.servers:
            server.stop()
        for process in self.processes:
            process.kill()
            process.communicate()


def line(request: FileTimerRequest) -> bytes:
    """A request as torch's client writes it."""
    return request.to_json().encode() + b"\n"
