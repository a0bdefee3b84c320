"""Ranks that call a wrapped function, of this package or of its peer; see `inprocess.py`.

    python benchmarks/_restart_ranks.py PACKAGE              forks the ranks of each job it reads
    python benchmarks/_restart_ranks.py PACKAGE JOB RANK     is one rank

A job is a line of JSON, the fields of `Job`. What the ranks do they append to the file that it
names, a line of JSON for each event with its time on the host's monotonic clock. Torch is loaded
once for the ranks that are forked, and the line "over" printed when all have ended.

The function is not annotated with the name of its type: the peer does not read it in a string.
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
"""After it the others wait in their all-reduce for sure."""
FOREVER_S = 600.0
WARM_UP = 20
FAULTY = 2
"""The rank with the fault; not 0, which holds the peer's store."""


class Job(NamedTuple):
    """What ranks are to do."""

    case: str
    size: int
    settings: dict[str, float]
    """Arguments of the wrapper, in seconds."""
    ports: list[int]
    """For the wrapper's store, one for each call of it."""
    group: str
    """Where process groups meet: a port of a TCPStore, or the path of a file."""
    lines: str
    """The file for the events."""
    steps: int = 0
    """Of a block of a training."""


class Rank:
    """One rank."""

    def __init__(self, package: Any, job: Job, rank: int) -> None:
        self._package = package
        self._job = job
        self._rank = rank
        self._lines = os.open(job.lines, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        self._groups = 0

    def tell(self, event: str, **figures: float) -> None:
        """Note an event."""
        line = {"event": event, "rank": self._rank, "at": time.monotonic(), **figures}
        os.write(self._lines, (json.dumps(line) + "\n").encode())

    def wrapped(self, function: Callable[[Any], None]) -> Callable[[], None]:
        """Wrap a function, whose parameter is for the live wrapper."""

        def called(call: Any = None) -> None:  # the peer looks for arguments that are missing
            function(call)

        called.__annotations__ = {"call": self._package.CallWrapper}
        settings = {k: timedelta(seconds=s) for k, s in self._job.settings.items()}
        result: Callable[[], None] = self._package.Wrapper(**settings)(called)
        return result

    def meet(self, name: str) -> None:
        """Begin a process group."""
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
        """Do the job."""
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._job.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._job.ports[0]),
            TORCHELASTIC_RUN_ID=self._job.lines,  # another job's ranks may not have ended yet
        )
        if self._job.case == "training":
            self._train()
        else:
            self.wrapped(self._fail_once)()

    # -------------------------------------------------------------------- faults

    def _fail_once(self, call: Any) -> None:
        self.meet(str(call.iteration))
        dist.all_reduce(torch.ones(1))
        self.tell("reduced", iteration=call.iteration)
        if call.iteration == 0:
            self._fail(call)
        dist.destroy_process_group()

    def _fail(self, call: Any) -> None:
        """Have a fault, or be where the others are meanwhile."""
        how, _, others = self._job.case.partition(" ")
        if self._rank != FAULTY or how == "none":
            if others == "blocked":
                dist.all_reduce(torch.ones(1))
            self._compute(call.ping if how == "hang" else lambda: None)
        time.sleep(BLOCKED_S)
        if how == "hang":
            call.ping()
        self.tell("fault")
        if how == "raise":
            raise ValueError("a mistake")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._compute(lambda: None)

    @staticmethod
    def _compute(ping: Callable[[], object]) -> None:
        """Take steps: some of the work here, more of it on what would be an accelerator."""
        a = torch.ones(64, 64)
        deadline = time.monotonic() + FOREVER_S
        while time.monotonic() < deadline:
            torch.mm(a, a)
            ping()
            time.sleep(0.002)

    # ------------------------------------------------------------------ training

    def _train(self) -> None:
        """Train in blocks, in turn without and with the wrapper, the first of a pair alternating.

        A wrapper begins and ends with its block, outside the time that is taken.
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
        # Not DistributedDataParallel: one that goes when its group was destroyed may hang in torch.
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
        self.tell("block", wrapped=call is not None, seconds=seconds, spent=spent)
        dist.destroy_process_group()


def fork(package: Any, job: Job) -> None:
    """Fork the ranks of a job, and wait until all have ended."""
    for rank in range(job.size):
        if os.fork() == 0:
            try:
                Rank(package, job, rank).run()
            finally:
                os._exit(0)  # what a library does at the end of a process is none of our business
    for _ in range(job.size):
        os.waitpid(-1, 0)  # whichever is first: to the peer, one that is not reaped is alive


def main() -> None:
    """Be one rank, or fork them."""
    package = importlib.import_module(f"{sys.argv[1]}.inprocess")
    if len(sys.argv) > 2:
        Rank(package, Job(*json.loads(sys.argv[2])), int(sys.argv[3])).run()
        os._exit(0)
    for line in sys.stdin:
        fork(package, Job(*json.loads(line)))
        print("over", flush=True)


if __name__ == "__main__":
    main()
