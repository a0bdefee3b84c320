"""Watch a training lose two of its four processes, one after the other, and continue each time.

    python examples/demo_replace.py [--dir FOLDER]

The demo starts gpt.py under `regrow run`. It kills rank 2 in the middle of the training, and rank 0
later, with SIGKILL, and only watches. It exits with 0 if each was replaced by one new process, the
others kept theirs, at most one step was repeated each time, and the model has learned. Otherwise it
prints what is missing and exits with 1. The logs stay in FOLDER (runs/demo-replace).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from demo import DEADLINE_S, announce, fail, first_pids, launched, wait_until  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
STEPS = 300
KILLS = {100: 2, 200: 0}
"""The rank that is killed after each of these steps."""
LOSS = 2.6
"""The loss of a model that has learned nothing is about 5: the logarithm of 150 characters."""


def check(code: int, output: str) -> float:
    """Return the final loss; end the demo if the job did not recover as promised."""
    if code != 0:
        fail(f"the job ended with exit code {code}, not 0")
    losses = re.findall(r"final test loss ([0-9.]+)", output)
    if len(losses) != 1 or float(losses[0]) >= LOSS:
        fail(f"the final test loss is {losses or 'not printed'}, not under {LOSS}")
    story = output[output.rfind("regrow: job ") :]
    replaced = re.findall(r"replaced +rank (\d+): pid \d+ ended by SIGKILL after step (\d+)", story)
    if [int(rank) for rank, _ in replaced] != list(KILLS.values()):
        fail(f"the launcher's story names {replaced} as replaced, not the ranks of {KILLS}")
    resumed = re.findall(r"rank \[\d+\] is replaced; continue after step (\d+)", output)
    if len(resumed) != len(KILLS):
        fail(f"the training resumed {len(resumed)} times, not {len(KILLS)} times")
    for (rank, lost_at), after in zip(replaced, resumed, strict=True):
        if int(after) < int(lost_at) - 1:
            fail(f"rank {rank} was lost at step {lost_at}, and the job resumed after step {after}")
    if "attempt 1" in story:
        fail("all workers were started again")
    return float(losses[0])


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="A training that replaces two killed processes.")
    parser.add_argument("--dir", type=Path, default=Path("runs/demo-replace"))
    logs: Path = parser.parse_args().dir / "logs"
    shutil.rmtree(logs, ignore_errors=True)

    command = ["run", "--standalone", "--nproc-per-node=4", "--max-restarts=3", "--preload=torch"]
    command += [f"--log-dir={logs}", str(HERE / "gpt.py"), f"--steps={STEPS}"]
    with launched(command) as (job, seen):
        for step, rank in KILLS.items():
            wait_until(lambda s=step: any(f"step {s}," in x for x in seen), f"step {step}", job)
            pid = first_pids(logs)[rank]
            announce(f"step {step} is done; kill -9 {pid}, the worker of rank {rank}")
            os.kill(pid, signal.SIGKILL)
        code = job.wait(DEADLINE_S)
    loss = check(code, "".join(seen))
    announce(
        f"two processes killed, each replaced by one, test loss {loss:.3f}.\n"
        f"=== its story again: {Path(sys.executable).parent / 'regrow'} events {logs}"
    )


if __name__ == "__main__":
    main()
