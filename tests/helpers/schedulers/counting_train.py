"""A training script for jobs of a real scheduler: it counts steps, and saves them on a notice.

Each rank continues from the step that it saved last. All files are in a folder of the job:
`records` has a JSON line for each action of a rank, and `saved.RANK` has a rank's step. Other files
there are commands: `finish` ends all ranks with success, and `slow` names a rank and the seconds
that its save takes. With `--should-stop`, it has no handler, and asks `regrow.should_stop`.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

RANK = int(os.environ["RANK"])
ARRAY = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}"
NAME = ARRAY if "SLURM_ARRAY_JOB_ID" in os.environ else "{SLURM_JOB_ID}"
FOLDER = Path(f"job-{NAME.format_map({'SLURM_JOB_ID': 'mpi', **os.environ})}")
SAVED = FOLDER / f"saved.{RANK}"
STEP_S = 0.05


def note(what: str, step: int) -> None:
    """Append a line about this rank, in a single write."""
    record = {
        "what": what,
        "rank": RANK,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": step,
        "world_size": int(os.environ["WORLD_SIZE"]),
        "attempt": int(os.environ["REGROW_ATTEMPT"]),
        "run": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }
    with open(FOLDER / "records", "ab", buffering=0) as records:
        records.write(json.dumps(record).encode() + b"\n")


def save(step: int) -> None:
    """Save the step; take as many seconds as the test wants."""
    slow = FOLDER / "slow"
    if slow.exists():
        rank, seconds = slow.read_text().split()
        if rank in (str(RANK), "all"):
            time.sleep(float(seconds))
    new = FOLDER / f"new.{RANK}"
    new.write_text(str(step))
    new.rename(SAVED)
    note("saved", step)


def stop(signum: int, frame: FrameType | None) -> None:
    """Save on a notice; a second notice changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    save(step)
    sys.exit(0)


FOLDER.mkdir(exist_ok=True)
step = int(SAVED.read_text()) if SAVED.exists() else 0
ASKS = "--should-stop" in sys.argv
if ASKS:
    import regrow

    ASKED = False
else:
    signal.signal(signal.SIGTERM, stop)
note("started", step)
while not (FOLDER / "finish").exists():
    time.sleep(STEP_S)
    step += 1
    if ASKS:
        if regrow.should_stop():
            save(step)
            sys.exit(0)
        if not ASKED:
            note("asks", step)
        ASKED = True
signal.signal(signal.SIGTERM, signal.SIG_IGN)
save(step)
note("finished", step)
