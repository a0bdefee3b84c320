"""A worker that tells what it sees, for jobs on several hosts: `host_worker.py MODE`.

`gloo` does one all-reduce after the other, `plain` imports nothing and sleeps, `beating` sleeps as
well, once it has beaten with all others, and `wrapped` in a function that is restarted in place.
Everything told is one line of JOB_FOLDER/records, stamped
by the monotonic clock, which the hosts of a test share; and in JOB_FOLDER/alive each worker keeps
the time at which it was last seen to run.

What to do is said by files in JOB_FOLDER: `finish` ends all workers well, `fail.HOST` the one on
that host with exit code 7, or in place by an exception, and `stop.HOST` stops it, if it beats. With
the variable STAYS workers that lose the others, or are told to end, do so when there is the file
`end`.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["JOB_FOLDER"])
HOST = socket.gethostname()
ROUND = int(os.environ["REGROW_FENCING_TOKEN"])
ALIVE_PERIOD_S = 0.01
STEP_S = 0.02


def note(what: str) -> None:
    """Append a line about this worker, in a single write."""
    record = {
        "what": what,
        "host": HOST,
        "pid": os.getpid(),
        "round": ROUND,
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
    """Write down again and again that this process runs."""
    fd = os.open(FOLDER / "alive" / f"{ROUND}.{HOST}.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    while True:
        os.pwrite(fd, f"{time.monotonic():.6f}".encode(), 0)
        time.sleep(ALIVE_PERIOD_S)


def asked_to_fail() -> bool:
    """Say whether this host's worker is to fail, once."""
    try:
        (FOLDER / f"fail.{HOST}").unlink()
    except FileNotFoundError:
        return False
    return True


def beating() -> None:
    """Beat with all others, as the agents were asked to have it, and wait to be told how to end."""
    from regrow import heartbeat

    heartbeat.start(1)  # returns when the one has begun that begins by itself
    while len(heartbeat.progress()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(STEP_S)
    note("beating")
    while not (FOLDER / "finish").exists():
        if (FOLDER / f"stop.{HOST}").exists():
            (FOLDER / f"stop.{HOST}").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(STEP_S)


def wrapped() -> None:
    """Tell of each call of a function that restarts in place, until told how to end."""
    from regrow.inprocess import CallWrapper, Wrapper

    @Wrapper()
    def train(call: CallWrapper) -> None:
        note(f"iteration {call.iteration}")
        while not (FOLDER / "finish").exists():
            if asked_to_fail():
                raise RuntimeError("told to fail")
            time.sleep(STEP_S)

    train()  # type: ignore[call-arg]


def checkpoint(*_: object) -> None:
    """Note that there was time to save."""
    note("checkpoint")
    os._exit(0)


def stay() -> None:
    """Wait to be allowed to end."""
    while not (FOLDER / "end").exists():
        time.sleep(STEP_S)


def plain() -> None:
    """Wait to be told how to end."""
    while not (FOLDER / "finish").exists():
        if asked_to_fail():
            sys.exit(7)
        time.sleep(STEP_S)


def gloo() -> None:
    """All-reduce until one of the ranks was told how to end."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # Far longer than any test: nothing but the agents ends a collective that waits for the dead.
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    first = True
    while True:
        told = torch.tensor([1.0, float((FOLDER / "finish").exists())])
        try:
            dist.all_reduce(told)
        except RuntimeError:  # the others are gone
            if "STAYS" in os.environ:
                stay()
            raise
        assert told[0] == dist.get_world_size()
        if first:
            note("reduced")
            first = False
        if told[1]:
            break
        if asked_to_fail():
            os._exit(7)  # on the long way out gloo's threads may abort us
        time.sleep(STEP_S)
    time.sleep(0.1)  # gloo's thread lets go of its work, else it may abort us
    dist.destroy_process_group()


if "CHECKPOINT" in os.environ:  # a handler in Python: it has to wait for the collective to return
    signal.signal(signal.SIGTERM, checkpoint)
if "STAYS" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("started")
threading.Thread(target=keep_alive, daemon=True).start()
{"gloo": gloo, "plain": plain, "beating": beating, "wrapped": wrapped}[sys.argv[1]]()
note("finished")
