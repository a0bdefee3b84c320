"""The worker that `launch.py` starts under both launchers: `_worker.py MODE`.

Its first action is to record when it runs. It appends a line `MODE attempt rank pid nanoseconds` to
the file that BENCH_STAMPS names. The time is of the monotonic clock, which all processes of a host
share.

`crash`      imports nothing; in the first attempt the last rank exits with 1 once all run
`allreduce`  the same, after an all-reduce over gloo in both attempts
`idle`       sleeps until it is killed
"""

import os
import sys
import time

CRASH_AFTER_S = float(os.environ.get("BENCH_CRASH_AFTER_S", 0.5))  # by then, the launcher is idle
WAIT_S = 600.0


def stamp(what: str) -> None:
    """Append one line about this worker, in a single write."""
    line = f"{what} {ATTEMPT} {RANK} {os.getpid()} {time.monotonic_ns()}\n"
    fd = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


def all_stamped(what: str) -> bool:
    """Return whether every worker of the first attempt has recorded `what`."""
    with open(os.environ["BENCH_STAMPS"]) as file:
        return sum(line.startswith(f"{what} 0 ") for line in file) == WORLD_SIZE


ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
stamp("started")

MODE = sys.argv[1]
last_word = "started"
if MODE == "allreduce":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    stamp("reduced")
    last_word = "reduced"

if MODE == "idle":
    time.sleep(WAIT_S)
elif ATTEMPT == 0:
    if RANK != WORLD_SIZE - 1:
        time.sleep(WAIT_S)
    while not all_stamped(last_word):
        time.sleep(0.005)
    time.sleep(CRASH_AFTER_S)
    stamp("crashed")
    os._exit(1)  # Python takes another half second to unload torch, under any launcher
elif MODE == "allreduce":
    time.sleep(0.1)  # gloo's thread must release its work, or it may abort us (train_digits.py)
    dist.destroy_process_group()
