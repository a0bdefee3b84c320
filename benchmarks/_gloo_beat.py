"""The algorithm of TensorFlow's DTensor heartbeat over gloo, with one process for each rank.

    python benchmarks/_gloo_beat.py SIZE PERIOD TIMEOUT HOW PHASE

Rank 0 draws a token. An all-reduce of a vector with one place for each rank distributes it. Then,
in every period, each rank puts the token into its own place and all-reduces the vector.

A failed exchange is counted, and the third failure in a row is fatal. After each exchange the
vector is compared with the token, and a difference is fatal too. As in the original, it is also
compared after a failed exchange, when it still holds only this rank's own place. So the first
failure is already fatal. To measure both, a rank reports its first failure and its third, and
continues in between.

Rank 1 is lost PHASE periods after a beat: "killed" by SIGKILL, or "silent" by SIGSTOP. The output
is JSON: when rank 1 was lost, and when the last of the other ranks met the first failure and the
third. Times are of the host's monotonic clock. The ranks use one gloo group, like a job that uses
`torch.distributed` for this purpose. gloo cannot use a group again after a failure.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

FAILURES = 3
LOST = 1
BEATS_BEFORE = 2


def rank_main(
    rank: int, size: int, period: float, timeout: float, store: str, report_fd: int
) -> None:
    """Run one rank until its third failure in a row."""
    rendezvous = dist.FileStore(store, size)
    # Connecting many ranks takes longer than an exchange may take.
    group = dist.ProcessGroupGloo(rendezvous, rank, size, timedelta(seconds=120))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=120)
    signals = torch.zeros(size, dtype=torch.int32)
    if rank == 0:
        signals[:] = secrets.randbelow(65535) + 1
    group.allreduce([signals], options).wait()
    token = int(signals[0])
    options.timeout = timedelta(seconds=timeout)
    failures = beats = 0
    while True:
        time.sleep(period)
        signals = torch.zeros(size, dtype=torch.int32)
        signals[rank] = token
        try:
            group.allreduce([signals], options).wait()
            failures = 0
        except RuntimeError:
            failures += 1
        if failures or not bool((signals == token).all()):
            os.write(report_fd, f"failure {failures} {time.monotonic()}\n".encode())
            if failures == FAILURES:
                os._exit(1)
        else:
            beats += 1
            if rank == LOST and beats == BEATS_BEFORE:
                os.write(report_fd, f"beat 0 {time.monotonic()}\n".encode())


def main() -> None:
    """Fork the ranks, lose rank 1, and print when the other ranks detected it."""
    size, period, timeout, how, phase = sys.argv[1:]
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    pids, pipes = [], []
    for rank in range(int(size)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(rank, int(size), float(period), float(timeout), f"{folder}/store", write)
            finally:
                os._exit(2)
        os.close(write)
        pids.append(pid)
        pipes.append(os.fdopen(read))
    last_beat = float(pipes[LOST].readline().split()[2])
    time.sleep(max(0.0, last_beat + float(phase) * float(period) - time.monotonic()))
    lost = time.monotonic()
    os.kill(pids[LOST], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    first, third = 0.0, 0.0
    for rank, pipe in enumerate(pipes):
        if rank != LOST:
            times = {line.split()[1]: float(line.split()[2]) for line in pipe}
            first, third = max(first, times["1"]), max(third, times[str(FAILURES)])
    os.kill(pids[LOST], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    print(json.dumps({"lost": lost, "first": first, "third": third}))


if __name__ == "__main__":
    main()
