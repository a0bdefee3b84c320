"""Ranks that call a wrapped function, of regrow or of its peer package; started by `inprocess.py`.

    python benchmarks/_restart_ranks.py PACKAGE              forks the ranks of each job it reads
    python benchmarks/_restart_ranks.py PACKAGE JOB RANK     is one rank

A job is a line of JSON with the fields of `Job`. The ranks append their events to the file that the
job names: a line of JSON for each event, with its time on the host's monotonic clock. Forked ranks
share one import of torch. The process prints "over" when all ranks of a job have ended.

The wrapped function has no annotation that is a string: the peer package cannot resolve it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

GROUP_TIMEOUT = timedelta(seconds=10)
BLOCKED_S = 0.3
"""Seconds before the fault; after them, all other ranks surely wait in their all-reduce."""
FOREVER_S = 600.0
WARM_UP = 20
FAULTY = 2
"""The rank with the fault; not 0, because rank 0 holds the peer's store."""


class Job(NamedTuple):
    """One job for the ranks."""

    case: str
    size: int
    settings: dict[str, float]
    """Arguments of the wrapper, in seconds."""
    ports: list[int]
    """Ports for the wrapper's store, one for each time the wrapper is called."""
    group: str
    """Where process groups meet: a port of a TCPStore, or the path of a file."""
    lines: str
    """The file for the events."""
    steps: int = 0
    """Number of steps in a block of the training."""


class Rank:
    """One rank of a job."""

    def __init__(self, package: Any, job: Job, rank: int) -> None:
        self._package = package
        self._job = job
        self._rank = rank
        self._lines = os.open(job.lines, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        self._groups = 0

    def report(self, event: str, **figures: float) -> None:
        """Append an event to the file of the job."""
        line = {"event": event, "rank": self._rank, "at": time.monotonic(), **figures}
        os.write(self._lines, (json.dumps(line) + "\n").encode())

    def wrapped(self, function: Callable[[Any], None]) -> Callable[[], None]:
        """Wrap a function with one parameter, which receives the running wrapper."""

        def called(call: Any = None) -> None:  # default: the peer checks for missing arguments
            function(call)

        called.__annotations__ = {"call": self._package.CallWrapper}
        settings = {k: timedelta(seconds=s) for k, s in self._job.settings.items()}
        result: Callable[[], None] = self._package.Wrapper(**settings)(called)
        return result

    def meet(self, name: str) -> None:
        """Create the default process group."""
        group = self._job.group
        if group.isdecimal():
            store: Any = dist.TCPStore("127.0.0.1", int(group), is_master=False)
        else:
            store = dist.FileStore(group)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{self._job.lines}/{name}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=GROUP_TIMEOUT,
        )

    def run(self) -> None:
        """Run the job of this rank."""
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._job.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._job.ports[0]),
            TORCHELASTIC_RUN_ID=self._job.lines,  # ranks of an earlier job may still be running
        )
        if self._job.case == "training":
            self._train()
        else:
            self.wrapped(self._fail_once)()

    # -------------------------------------------------------------------- faults

    def _fail_once(self, call: Any) -> None:
        self.meet(str(call.iteration))
        dist.all_reduce(torch.ones(1))
        self.report("reduced", iteration=call.iteration)
        if call.iteration == 0:
            self._fail(call)
        dist.destroy_process_group()

    def _fail(self, call: Any) -> None:
        """Cause the fault on the faulty rank; on other ranks, wait for it as the case demands."""
        how, _, others = self._job.case.partition(" ")
        if self._rank != FAULTY or how == "none":
            if others == "blocked":
                dist.all_reduce(torch.ones(1))
            self._compute(call.ping if how == "hang" else lambda: None)
        time.sleep(BLOCKED_S)
        if how == "hang":
            call.ping()
        self.report("fault")
        if how == "raise":
            raise ValueError("a mistake")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._compute(lambda: None)

    @staticmethod
    def _compute(ping: Callable[[], object]) -> None:
        """Compute on the CPU in short steps, with a sleep in place of an accelerator's work."""
        a = torch.ones(64, 64)
        deadline = time.monotonic() + FOREVER_S
        while time.monotonic() < deadline:
            torch.mm(a, a)
            ping()
            time.sleep(0.002)

    # ------------------------------------------------------------------ training

    def _train(self) -> None:
        """Train in pairs of blocks, one with the wrapper and one without, in alternating order.

        A wrapper starts and ends with its block, outside the measured time.
        """
        torch.set_num_threads(1)
        for pair, port in enumerate(self._job.ports):
            os.environ.update(MASTER_PORT=str(port))
            for wrapped in (False, True) if pair % 2 else (True, False):
                os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._job.size))
                if wrapped:
                    self.wrapped(self._block)()
                else:
                    self._block(None)

    def _block(self, call: Any) -> None:
        self._groups += 1
        self.meet(f"block {self._groups}")
        torch.manual_seed(0)
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        # Not DistributedDataParallel: deleting it after its group is destroyed may hang in torch.
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch, wanted = torch.randn(64, 256), torch.randint(10, (64,))
        began = spent = 0.0
        for step in range(WARM_UP + self._job.steps):
            if step == WARM_UP:
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), wanted).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if call is not None:
                call.ping()
        dist.barrier()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        self.report("block", wrapped=call is not None, seconds=seconds, spent=spent)
        dist.destroy_process_group()


def fork(package: Any, job: Job) -> None:
    """Fork the ranks of a job, and wait until all have ended."""
    for rank in range(job.size):
        if os.fork() == 0:
            try:
                Rank(package, job, rank).run()
            finally:
                os._exit(0)  # skips the exit handlers of libraries
    for _ in range(job.size):
        os.waitpid(-1, 0)  # any rank: the peer takes a process that is not reaped for a living one


def main() -> None:
    """Be one rank, or fork the ranks of each job."""
    package = importlib.import_module(f"{sys.argv[1]}.inprocess")
    if len(sys.argv) > 2:
        Rank(package, Job(*json.loads(sys.argv[2])), int(sys.argv[3])).run()
        os._exit(0)
    for line in sys.stdin:
        fork(package, Job(*json.loads(line)))
        print("over", flush=True)


if __name__ == "__main__":
    main()
