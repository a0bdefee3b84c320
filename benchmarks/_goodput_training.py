"""The training of `goodput.py`: a small model on gloo, with steps of 50 ms and checkpoints.

    _goodput_training.py plain|regrow|peer FOLDER SOFT_S HARD_S COLLECTIVE_S

`plain` is any script under torchrun: it loads the newest checkpoint and trains. `regrow` has the
loop in `regrow.inprocess.Wrapper(replace=True)`, with a `regrow.State`. `peer` has it in the
wrapper of nvidia-resiliency-ext, at its shortest intervals. All three have the same model, steps,
checkpoints and time-out of collectives.

Each rank writes its process id, its latest step and the time to `FOLDER/progress.RANK`. It obeys
the file `FOLDER/order.RANK` of the benchmark: `raise` or `hang`.

The wrapped function has no annotation that is a string: the peer cannot resolve it.
"""

import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SYSTEM, FOLDER = sys.argv[1], Path(sys.argv[2])
SOFT, HARD, COLLECTIVE = (timedelta(seconds=float(each)) for each in sys.argv[3:])
STEP_S = 0.05
CHECKPOINT_STEPS = 100
CHECKPOINT = FOLDER / "checkpoint.pt"
PROGRESS = struct.Struct("=qqd")
"""Process id, latest step, monotonic seconds."""


class Training:
    """The model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def load(self) -> int:
        """Load the newest checkpoint; return its step, 0 without one."""
        if not CHECKPOINT.exists():
            return 0
        found = torch.load(CHECKPOINT)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        return int(found["step"])

    def save(self, step: int) -> None:
        """Save a checkpoint as a whole: a rank may be killed meanwhile."""
        partial = CHECKPOINT.with_suffix(f".{os.getpid()}")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": step}, partial)
        partial.rename(CHECKPOINT)

    def run(
        self,
        step: int,
        prepare: Callable[[int], object] = lambda step: None,
        commit: Callable[[int], AbstractContextManager[object]] = lambda step: nullcontext(),
        done: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Train from a step on, until the benchmark ends the job.

        Args:
            step: the first step is the next one.
            prepare: called before the gradients of a step leave this rank.
            commit: the section that changes the model.
            done: called after each step.
        """
        rank, size = int(os.environ["RANK"]), dist.get_world_size()
        progress = os.open(FOLDER / f"progress.{rank}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        order = FOLDER / f"order.{rank}"
        while True:
            begun = time.monotonic()
            step += 1
            data = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 64 + rank))
            self.optimizer.zero_grad()
            loss = self.model(data).pow(2).mean()
            loss.backward()
            prepare(step)
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
            with commit(step):
                self.optimizer.step()
            done(step)
            os.pwrite(progress, PROGRESS.pack(os.getpid(), step, time.monotonic()), 0)
            if rank == 0 and step % CHECKPOINT_STEPS == 0:
                self.save(step)
            if order.exists():
                self.obey(order)
            time.sleep(max(0.0, begun + STEP_S - time.monotonic()))

    @staticmethod
    def obey(order: Path) -> None:
        """Have the fault that the benchmark asks for."""
        fault = order.read_text()
        order.unlink()
        if fault == "raise":
            raise ValueError("a mistake")
        while True:  # Python code runs: the peer interrupts it only then
            time.sleep(0.05)


def plain() -> None:
    """Train without a wrapper."""
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    training = Training()
    training.run(training.load())


def with_regrow() -> None:
    """Train in regrow's wrapper, from the state of the other ranks after a fault."""
    import regrow
    from regrow.inprocess import CallWrapper, Wrapper
    from regrow.store import worker_store
    from regrow.store.torch import TorchStore

    store, training = TorchStore(worker_store()), Training()
    state = regrow.State({"model": training.model, "optimizer": training.optimizer})

    @Wrapper(replace=True, soft_timeout=SOFT, hard_timeout=HARD)
    def train(call: CallWrapper) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        keys = dist.PrefixStore(str(call.iteration), store)
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size, timeout=COLLECTIVE)

        def done(step: int) -> None:
            regrow.step(step)
            call.ping()

        training.run(state.recover(call, training.load), state.prepare, state.commit, done)

    train()  # type: ignore[call-arg]


def with_peer() -> None:
    """Train in the peer's wrapper, from the newest checkpoint after a fault."""
    from nvidia_resiliency_ext import inprocess

    # With this variable, the wrapper checks the GPU after a fault, and fails where there is none.
    os.environ.pop("LOCAL_RANK", None)
    fast = timedelta(seconds=0.01)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

    def train(call: Any = None) -> None:
        # The peer's wrapper has the store at MASTER_PORT, so the group meets in a file.
        store = dist.FileStore(str(FOLDER / f"group.{attempt}.{call.iteration}"))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
        training = Training()
        training.run(training.load(), done=lambda step: call.ping())

    train.__annotations__ = {"call": inprocess.CallWrapper}
    wrapper = inprocess.Wrapper(
        soft_timeout=SOFT,
        hard_timeout=HARD,
        monitor_thread_interval=fast,
        monitor_process_interval=fast,
        heartbeat_interval=fast,
        progress_watchdog_interval=fast,
        last_call_wait=timedelta(0),
    )
    wrapper(train)()


torch.set_num_threads(1)
{"plain": plain, "regrow": with_regrow, "peer": with_peer}[SYSTEM]()
