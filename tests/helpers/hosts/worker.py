"""A worker that records its actions, for jobs on several hosts: `worker.py MODE`.

Modes: `gloo` repeats all-reduces. `plain` imports nothing and sleeps. `beating` sleeps too, after
one heartbeat with all other workers. `training` trains from checkpoint to checkpoint. `wrapped`
sleeps in a function with in-process restart; `replaced` does so, and another process takes the
place of one that is lost. `elastic` trains over gloo in such a function, and its process goes on
when a host is lost or joins.

Each action is one line in JOB_FOLDER/records, stamped by the monotonic clock, which the hosts of a
test share. In JOB_FOLDER/alive each worker updates the time at which it last ran.

Files in JOB_FOLDER are commands. `finish` ends all workers with success. `fail.HOST` fails the
worker on that host, with exit code 7, or with an exception in a wrapped function. `stop.HOST` stops
that worker if it sends heartbeats. With the variable STAYS, a worker waits for the file `end`
before it ends. It does so after the loss of its peers, and after a request to end.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

FOLDER = Path(os.environ["JOB_FOLDER"])
HOST = socket.gethostname()
ROUND = int(os.environ["REGROW_FENCING_TOKEN"])
ALIVE_PERIOD_S = 0.01
STEP_S = 0.02
TRAINING_STEPS = 400


def note(what: str) -> None:
    """Append a line about this worker, in a single write."""
    record = {
        "what": what,
        "host": HOST,
        "pid": os.getpid(),
        "round": int(os.environ["REGROW_FENCING_TOKEN"]),
        "attempt": int(os.environ["REGROW_ATTEMPT"]),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "monotonic_s": time.monotonic(),
    }
    fd = os.open(FOLDER / "records", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, json.dumps(record).encode() + b"\n")
    os.close(fd)


def keep_alive() -> None:
    """Record the current time again and again, as proof that this process runs."""
    fd = os.open(FOLDER / "alive" / f"{ROUND}.{HOST}.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    while True:
        os.pwrite(fd, f"{time.monotonic():.6f}".encode(), 0)
        time.sleep(ALIVE_PERIOD_S)


def asked_to_fail() -> bool:
    """Return True once, when the test wants this host's worker to fail."""
    try:
        (FOLDER / f"fail.{HOST}").unlink()
    except FileNotFoundError:
        return False
    return True


def beating() -> None:
    """Send heartbeats, with the agents' settings, and wait for a command to end."""
    from regrow import heartbeat

    heartbeat.start(1)  # returns when the first heartbeat has begun
    while len(heartbeat.progress()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(STEP_S)
    note("beating")
    while not (FOLDER / "finish").exists():
        if (FOLDER / f"stop.{HOST}").exists():
            (FOLDER / f"stop.{HOST}").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(STEP_S)


def wrapped(replace: bool = False) -> None:
    """Record each call of a function with in-process restart, until a command to end."""
    import regrow
    from regrow.inprocess import CallWrapper, Wrapper

    @Wrapper(replace=replace)
    def train(call: CallWrapper) -> None:
        if replace:
            regrow.step(call.iteration)
        note(f"iteration {call.iteration}")
        while not (FOLDER / "finish").exists():
            if asked_to_fail():
                raise RuntimeError("asked to fail")
            time.sleep(STEP_S)

    train()  # type: ignore[call-arg]


def elastic() -> None:
    """Add numbers of all ranks in each step, in a function whose process outlives its round.

    What counts as a start is the call of the function, and what counts as alive is its loop.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import regrow
    from regrow.inprocess import CallWrapper, Wrapper

    weights = torch.zeros(3, dtype=torch.float64)
    state = regrow.State({"weights": weights})

    def default() -> int:
        note("default")
        return 0

    @Wrapper(replace=True, elastic=True)
    def train(call: CallWrapper) -> None:
        number = os.environ["REGROW_FENCING_TOKEN"]
        alive = os.open(
            FOLDER / "alive" / f"{number}.{HOST}.{os.getpid()}", os.O_WRONLY | os.O_CREAT
        )
        note("started")
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        step, first = state.recover(call, default), True
        rank = int(os.environ["RANK"])
        while True:
            os.pwrite(alive, f"{time.monotonic():.6f}".encode(), 0)
            # Whole numbers, so that the sum does not depend on the order of the ranks.
            total = torch.tensor(
                [(step + 1.0) * (rank + 1), float((FOLDER / "finish").exists())],
                dtype=torch.float64,
            )
            dist.all_reduce(total)
            with state.commit(step + 1):
                weights.add_(total[0])
            step += 1
            regrow.step(step)
            if first:
                note("reduced")
                first = False
            if total[1]:
                break
            time.sleep(STEP_S)
        note(f"result {step} {weights.tolist()}")
        time.sleep(0.1)  # gloo's thread may abort us before it releases its work
        dist.destroy_process_group()

    train()  # type: ignore[call-arg]


def checkpoint(*_: object) -> None:
    """Record that the worker had time to save."""
    note("checkpoint")
    os._exit(0)


def stay() -> None:
    """Wait until the test allows the worker to end."""
    while not (FOLDER / "end").exists():
        time.sleep(STEP_S)


def plain() -> None:
    """Wait for a command to end."""
    while not (FOLDER / "finish").exists():
        if asked_to_fail():
            sys.exit(7)
        time.sleep(STEP_S)


def training() -> None:
    """Train `TRAINING_STEPS` steps; each one continues from the checkpoint of the one before."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    saved = FOLDER / "checkpoint"
    step, weight = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    while step < TRAINING_STEPS:
        gradient = torch.tensor([(step + 1) * (dist.get_rank() + 1)])
        dist.all_reduce(gradient)
        step, weight = step + 1, trained(weight, int(gradient))
        if dist.get_rank() == 0:
            Path(FOLDER / "checkpoint.new").write_text(json.dumps((step, weight)))
            Path(FOLDER / "checkpoint.new").rename(saved)
        time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


def trained(weight: int, gradient: int) -> int:
    """Return the weight after a step; each step counts, and so does their order."""
    return (31 * weight + gradient) % (2**31 - 1)


def gloo() -> None:
    """Repeat all-reduces until one rank receives a command to end."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # Far longer than any test: only the agents end a collective that waits for a dead rank.
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    first = True
    while True:
        total = torch.tensor([1.0, float((FOLDER / "finish").exists())])
        try:
            dist.all_reduce(total)
        except RuntimeError:  # the other ranks are gone
            if {"STAYS", "CHECKPOINT"} & os.environ.keys():
                stay()  # with CHECKPOINT until its own SIGTERM, which may come after their end
            raise
        assert total[0] == dist.get_world_size()
        if first:
            note("reduced")
            first = False
        if total[1]:
            break
        if asked_to_fail():
            os._exit(7)  # gloo's threads may abort a normal exit
        time.sleep(STEP_S)
    time.sleep(0.1)  # gloo's thread may abort us before it releases its work
    dist.destroy_process_group()


if "CHECKPOINT" in os.environ:  # a Python handler, which waits for the collective to return
    signal.signal(signal.SIGTERM, checkpoint)
if "STAYS" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] != "elastic":
    note("started")
    threading.Thread(target=keep_alive, daemon=True).start()
MODES: dict[str, Callable[[], None]] = {
    "gloo": gloo,
    "plain": plain,
    "training": training,
    "beating": beating,
    "wrapped": wrapped,
    "replaced": partial(wrapped, replace=True),
    "elastic": elastic,
}
MODES[sys.argv[1]]()
note("finished")
