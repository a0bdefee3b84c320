"""What is done to one of a few real workers, and when the last of all processes has ended.

Each fault has a job of its own: `SIZE` worker processes that call `heartbeat.start` and leave it at
that, over a store server as an agent has one. The time is that from the fault to the end of the
last process, which `start` logs a bound for, and `KILL_S` is what a process may take to end then.
What the workers say last has to name the fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from regrow.heartbeat._terms import FAILURES, KILL_S
from regrow.store import STORE_ENV, STORE_TOKEN_ENV, ServerProcess, make_token, start_server

SERVICES = {"heartbeat": "regrow.heartbeat._service:create"}
VICTIM = Path(__file__).parent / "_beat_victim.py"
SIZE = 4
AT_ONCE_S = 1.0
"""What is known by a connection that ends, or by who comes, is known to all within that."""
LATE_S = 0.5
"""For an interpreter to end by an exception, and for two busy cores."""
LIMIT_S = 60.0


class Worker:
    """One of the processes."""

    def __init__(self, job: Job, rank: int, size: int = SIZE) -> None:
        self.rank = rank
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self.process = subprocess.Popen(
            [sys.executable, str(VICTIM), str(job.period), str(job.timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | job.environ | {"RANK": str(rank), "WORLD_SIZE": str(size)},
        )

    def hear(self, what: str) -> float:
        """Return when the worker says that it does this, monotonic seconds."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if what not in line:
            raise SystemExit(f"benchmark: rank {self.rank} says {line!r}, not {what!r}")
        at: float = json.loads(line)[what]
        return at

    def end(self) -> str:
        """Wait for the end, and return what was said of the heartbeat last."""
        self.process.wait(LIMIT_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self._said.seek(0)
        lines = [line for line in self._said if "heartbeat of rank" in line]
        self._said.close()
        return lines[-1] if lines else ""


class Job:
    """The workers of one fault."""

    def __init__(self, server: ServerProcess, token: bytes, period: float, timeout: float) -> None:
        self.server = server
        self.period = period
        self.timeout = timeout
        self.environ = {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: token.decode()}
        self.workers: list[Worker] = []

    def start(self, *ranks: int, size: int = SIZE) -> float:
        """Start workers, and return when the last of them has begun."""
        new = [Worker(self, rank, size) for rank in ranks]
        self.workers += new
        return max(worker.hear("begins") for worker in new)

    def beat(self) -> None:
        """Start all, and wait until they have beaten for a period and a half."""
        self.start(*range(SIZE))
        for worker in self.workers:
            worker.hear("beats")
        time.sleep(1.5 * self.period)

    def signal(self, pid: int, signum: int) -> float:
        """Send a signal, and return when."""
        now = time.monotonic()
        os.kill(pid, signum)
        return now


def _killed(job: Job) -> float:
    job.beat()
    return job.signal(job.workers[1].process.pid, signal.SIGKILL)


def _stopped(job: Job) -> float:
    job.beat()
    return job.signal(job.workers[1].process.pid, signal.SIGSTOP)


def _stuck(job: Job) -> float:
    job.beat()
    stdin = job.workers[1].process.stdin
    assert stdin is not None
    stdin.write("\n")
    stdin.flush()
    return time.monotonic()


def _started_again(job: Job) -> float:
    job.beat()
    return job.start(1)


def _of_another_size(job: Job) -> float:
    job.beat()
    return job.start(1, size=SIZE + 1)


def _not_started(job: Job) -> float:
    return job.start(*(rank for rank in range(SIZE) if rank != 1))


def _without_server(job: Job) -> float:
    job.beat()
    return job.signal(job.server.pid, signal.SIGSTOP)


class Fault(NamedTuple):
    """Something that is done to a job."""

    name: str
    do: Callable[[Job], float]
    """Returns when it was done, monotonic seconds."""
    says: str
    """What the workers that are left say of it."""
    at_once: bool = False
    """Whether it is known before any exchange has failed."""


FAULTS = (
    Fault("killed", _killed, "the process of rank 1 ended without a goodbye", at_once=True),
    Fault("stopped", _stopped, "rank 1 is missing"),
    Fault("native code holds the lock", _stuck, "rank 1 is missing"),
    Fault("started again", _started_again, "rank 1 was started again", at_once=True),
    Fault("another WORLD_SIZE", _of_another_size, "rank 1 expects another number", at_once=True),
    Fault("never started", _not_started, "rank 1 did not come"),
    Fault("the store's server stopped", _without_server, "no exchange has succeeded"),
)


def faults(period: float, timeout: float) -> list[str]:
    """Measure and print the table; return what missed its bound, or was not named.

    Args:
        period: seconds between two beats.
        timeout: seconds that an exchange may take.
    """
    print(
        f"\nseconds from a fault to the end of the last of {SIZE} processes; period {period:g} s, "
        f"time-out {timeout:g} s\n"
    )
    print(f"{'fault':>28}{'seconds':>10}{'bound':>10}")
    failures = []
    for fault in FAULTS:
        token = make_token()
        with start_server(token=token, services=SERVICES) as server:
            job = Job(server, token, period, timeout)
            began = fault.do(job)
            said = {worker.rank: worker.end() for worker in job.workers}
            seconds = time.monotonic() - began
            job.signal(server.pid, signal.SIGCONT)
        known = AT_ONCE_S if fault.at_once else FAILURES * (period + timeout)
        bound = known + KILL_S
        print(f"{fault.name:>28}{seconds:10.2f}{bound:10.2f}", flush=True)
        if seconds > bound + LATE_S:
            failures.append(f"{fault.name}: the last process ended after {seconds:.2f} s")
        failures += [
            f"{fault.name}: rank {rank} says {words!r}"
            for rank, words in said.items()
            if rank != 1 and fault.says not in words
        ]
    return failures
