"""Workers that send heartbeats, as processes, forked by a small program that imports regrow once.

A test sends the program the workers to start. The workers report their events. Both use lines of
JSON over the program's pipes. The test itself sends signals to the workers.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from helpers.jumping_clock import jumps
from helpers.processes import PATIENCE


class ForkServer:
    """The test's side: starts workers and receives their reports.

    Args:
        env: added to the environment of all workers.
    """

    def __init__(self, **env: str) -> None:
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._kept: list[dict[str, Any]] = []
        self._living: set[int] = set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def start(self, **spec: Any) -> int:
        """Start a worker and return its pid."""
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(spec) + "\n")
        self._program.stdin.flush()
        pid: int = self.receive("started", rank=spec["rank"])["pid"]
        self._living.add(pid)
        return pid

    def receive(self, what: str, **fields: Any) -> dict[str, Any]:
        """Return the next report of this kind with these fields; other reports are kept."""
        wanted = {"what": what, **fields}
        deadline = time.monotonic() + PATIENCE
        while True:
            for line in self._kept:
                if wanted.items() <= line.items():
                    self._kept.remove(line)
                    return line
            try:
                self._keep(self._lines.get(timeout=max(deadline - time.monotonic(), 0.0)))
            except queue.Empty:
                raise AssertionError(f"no worker reported {wanted}, but: {self._kept}") from None

    def unread(self, what: str) -> list[dict[str, Any]]:
        """Return all reports of this kind that `receive` has not returned."""
        while not self._lines.empty():
            self._keep(self._lines.get())
        return [line for line in self._kept if line["what"] == what]

    def clear(self) -> None:
        """Kill all workers that are left, and drop their reports."""
        self.unread("ended")  # the kernel may have given their pids to other processes
        for pid in self._living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._living:
            self.receive("ended", pid=min(self._living))
        self._kept.clear()

    def close(self) -> None:
        """End the program."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        try:
            self.clear()
        finally:
            self._program.stdin.close()
            self._program.wait(PATIENCE)
            self._thread.join(PATIENCE)
            self._program.stdout.close()

    def _keep(self, line: dict[str, Any]) -> None:
        self._kept.append(line)
        if line["what"] == "ended":
            self._living.discard(line["pid"])

    def _read(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            self._lines.put(json.loads(line))


# --- the program's own code starts here


def report(what: str, **fields: Any) -> None:
    """Write one report; its line is short enough for a single atomic write."""
    os.write(1, (json.dumps({"what": what, "pid": os.getpid(), **fields}) + "\n").encode())


def work(
    rank: int,
    world_size: int,
    endpoint: str,
    token: str,
    *,
    dies: bool = False,
    forks: bool = False,
    stuck: str = "",
    session_grace: float | None = 0.5,
    **options: Any,
) -> None:
    """Run a worker: send heartbeats until they end or a signal ends the worker.

    On SIGUSR1 the worker exits; on SIGUSR2 it fails by an exception. With `stuck` its main thread
    then blocks in a C function: "with the lock" of the interpreter, or without. Without
    `session_grace`, the heartbeat creates sessions of its own.
    """
    import ctypes
    import logging

    from regrow import heartbeat
    from regrow.store import STORE_ENV, STORE_TOKEN_ENV, connect

    class LogReporter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report("logged", rank=rank, text=record.getMessage())

    def leave(*_: object) -> None:
        sys.exit(0)

    def fail(*_: object) -> None:
        raise RuntimeError("as the test wants it")

    def failed(failure: heartbeat.HeartbeatFailure) -> None:
        report(
            "failed",
            rank=rank,
            kind=failure.kind,
            ranks=list(failure.ranks),
            beat=failure.beat,
            text=str(failure),
        )

    logging.getLogger("regrow").addHandler(LogReporter())
    signal.signal(signal.SIGUSR1, leave)
    signal.signal(signal.SIGUSR2, fail)
    secret = bytes.fromhex(token)
    store = None
    if session_grace is None:
        os.environ |= {STORE_ENV: endpoint, STORE_TOKEN_ENV: secret.decode()}
    else:
        store = connect(endpoint, token=secret, session_grace=session_grace, timeout=PATIENCE)
    try:
        event = heartbeat.start(
            rank=rank,
            world_size=world_size,
            store=store,
            on_failure=None if dies else failed,
            **options,
        )
    except heartbeat.HeartbeatFailure as failure:
        failed(failure)
        return
    if forks:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
    report("beats", rank=rank, clock_jumps=jumps())
    heartbeat.step(rank, "train")
    if stuck:
        library = ctypes.PyDLL(None) if stuck == "with the lock" else ctypes.CDLL(None)
        library.read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    event.wait()
    report("over", rank=rank)


def main() -> None:
    """Fork the requested workers, and report their ends."""
    import regrow.heartbeat.api
    import regrow.heartbeat.death
    import regrow.store.client.client  # noqa: F401 - so that no worker has to import it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    workers: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, *workers], [], [])
        for pidfd in ready:
            if pidfd:
                pid, status = os.waitpid(workers.pop(pidfd), 0)
                os.close(pidfd)
                os.write(1, f'{{"what": "ended", "pid": {pid}, "status": {status}}}\n'.encode())
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            spec = json.loads(line)
            pid = os.fork()
            if pid == 0:
                report("started", rank=spec["rank"])
                work(**spec)
                return
            workers[os.pidfd_open(pid)] = pid


if __name__ == "__main__":
    main()
