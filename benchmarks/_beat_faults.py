"""Inject faults into real workers, and measure when the last process of the job has ended.

Each fault has its own job: `SIZE` worker processes that call `heartbeat.start` and then do nothing
else. They use a store server like the one an agent starts. The measured time runs from the fault to
the end of the last process. `start` logs a bound for this time, and a process may take `KILL_S`
more to end. The last log lines of the workers must name the fault.
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

from regrow.heartbeat.terms import FAILURES, KILL_S
from regrow.store import STORE_ENV, STORE_TOKEN_ENV, ServerProcess, make_token, start_server

SERVICES = {"heartbeat": "regrow.heartbeat.service:create"}
VICTIM = Path(__file__).parent / "_beat_victim.py"
SIZE = 4
AT_ONCE_S = 1.0
"""Limit in seconds for faults that are known at once: a connection ends, or a process joins."""
LATE_S = 0.5
"""Allowance in seconds for an interpreter to end by an exception, and for two busy cores."""
LIMIT_S = 60.0


class Worker:
    """One worker process of a job."""

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

    def wait_for(self, what: str) -> float:
        """Wait until the worker reports `what`; return when, in monotonic seconds."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if what not in line:
            raise SystemExit(f"benchmark: rank {self.rank} says {line!r}, not {what!r}")
        at: float = json.loads(line)[what]
        return at

    def end(self) -> str:
        """Wait until the worker ends; return its last log line about the heartbeat."""
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
        """Start workers; return when the last worker has begun, monotonic seconds."""
        new = [Worker(self, rank, size) for rank in ranks]
        self.workers += new
        return max(worker.wait_for("begins") for worker in new)

    def beat(self) -> None:
        """Start all workers, and wait until they have beaten for one and a half periods."""
        self.start(*range(SIZE))
        for worker in self.workers:
            worker.wait_for("beats")
        time.sleep(1.5 * self.period)

    def signal(self, pid: int, signum: int) -> float:
        """Send a signal; return the time before it was sent, monotonic seconds."""
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
    """A fault that is injected into a job."""

    name: str
    do: Callable[[Job], float]
    """Injects the fault; returns when it did so, monotonic seconds."""
    says: str
    """The text with which the remaining workers report the fault."""
    at_once: bool = False
    """Whether the workers detect the fault before an exchange has failed."""


FAULTS = (
    Fault("killed", _killed, "the process of rank 1 ended without leaving", at_once=True),
    Fault("stopped", _stopped, "rank 1 is missing"),
    Fault("native code holds the lock", _stuck, "rank 1 is missing"),
    Fault("started again", _started_again, "rank 1 was restarted", at_once=True),
    Fault("another WORLD_SIZE", _of_another_size, "rank 1 expects another number", at_once=True),
    Fault("never started", _not_started, "rank 1 did not arrive"),
    Fault("the store's server stopped", _without_server, "no exchange has succeeded"),
)


def faults(period: float, timeout: float) -> list[str]:
    """Measure all faults and print the table; return the faults that failed their check.

    A check fails if the job missed its bound, or if the workers did not name the fault.

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
            outputs = {worker.rank: worker.end() for worker in job.workers}
            seconds = time.monotonic() - began
            job.signal(server.pid, signal.SIGCONT)
        known = AT_ONCE_S if fault.at_once else FAILURES * (period + timeout)
        bound = known + KILL_S
        print(f"{fault.name:>28}{seconds:10.2f}{bound:10.2f}", flush=True)
        if seconds > bound + LATE_S:
            failures.append(f"{fault.name}: the last process ended after {seconds:.2f} s")
        failures += [
            f"{fault.name}: rank {rank} says {words!r}"
            for rank, words in outputs.items()
            if rank != 1 and fault.says not in words
        ]
    return failures
