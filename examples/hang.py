"""A training in which one rank hangs silently, to show how regrow handles it.

    regrow run --standalone --nproc-per-node 4 --max-restarts 1 --timers examples/hang.py

In the first attempt the last rank never receives its fourth batch, and all other ranks wait for it
in a collective. No process fails, so the job would hang without the timer. The example needs no
torch: the collective is the folder of the attempt's logs, in which every rank leaves a file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import regrow

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ["REGROW_ATTEMPT"]
MEETING = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent


def load_batch(step: int) -> None:
    """Stand in for a read from a file server, which fails to answer once."""
    if step == 4 and RANK == WORLD - 1 and ATTEMPT == "0":
        time.sleep(3600)


def all_reduce(step: int) -> None:
    """Stand in for a collective: returns when every rank has joined."""
    (MEETING / f"step-{step}.{RANK}").touch()
    while len(list(MEETING.glob(f"step-{step}.*"))) < WORLD:
        time.sleep(0.01)


def main() -> None:
    """Train for eight steps; each step may take a second."""
    for step in range(1, 9):
        with regrow.expires(after=1):
            load_batch(step)
            all_reduce(step)
        regrow.step(step)
    print(f"rank {RANK} is done")


if __name__ == "__main__":
    main()
