"""Watch a real training survive `kill -9`: train_digits.py on two workers, and one is killed.

    python examples/demo.py [--dir FOLDER]

The demo starts the training under `regrow run`. It waits for at least two checkpoints, and then for
the middle of an epoch. Then it kills rank 1 with SIGKILL, and only watches. It exits with 0 if the
job recovered by itself, reached its accuracy and printed its story. Otherwise it prints what is
missing and exits with 1. Checkpoints and logs stay in FOLDER (runs/demo).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
VICTIM_RANK = 1
CHECKPOINTS_FIRST = 3  # the time between the last two is the length of an epoch
ACCURACY = 0.95
STORY = ("SIGKILL", "detected after", "restarted after", "first step after", "work lost")
DEADLINE_S = 180.0
LOOK_AGAIN_S = 0.02


def announce(text: str) -> None:
    """Print a line of the demo, set apart from the lines of the job."""
    print(f"\n=== demo: {text}\n", flush=True)


def fail(text: str) -> NoReturn:
    """End the demo with exit code 1."""
    sys.exit(f"demo FAILED: {text}")


def first_pids(logs: Path) -> dict[int, int]:
    """Return the pid of each rank of the first attempt; empty until the workers have started."""
    for log in logs.glob("*/events.jsonl"):
        for line in log.read_text().splitlines(keepends=True):
            # The last line may be incomplete.
            event: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
            if event.get("name") == "regrow.attempt.started":
                return {int(rank): pid for rank, pid in event["pids"].items()}
    return {}


def wait_until(done: Callable[[], bool], what: str, job: subprocess.Popen[str]) -> None:
    """Poll until `done()` is true; end the demo if the job ends or the time is over."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not done():
        if job.poll() is not None:
            fail(f"the job ended with exit code {job.returncode} before {what}")
        if time.monotonic() > deadline_s:
            fail(f"no sign of {what} within {DEADLINE_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def echo(job: subprocess.Popen[str], seen: list[str]) -> None:
    """Print the output of the job, and append it to `seen`."""
    assert job.stdout is not None
    for line in job.stdout:
        print(line, end="", flush=True)
        seen.append(line)


@contextmanager
def launched(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run regrow with these arguments; yield the job, and the lines that it has written so far."""
    announce("regrow " + " ".join(command))
    job = subprocess.Popen(
        [sys.executable, "-m", "regrow", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seen: list[str] = []
    reader = threading.Thread(target=echo, args=(job, seen))
    reader.start()
    try:
        yield job, seen
    finally:
        job.terminate()  # no effect if the job has ended
        job.wait()
        reader.join()


def kill_mid_epoch(job: subprocess.Popen[str], checkpoints: Path, logs: Path) -> None:
    """Wait for the middle of an epoch, then kill the worker of VICTIM_RANK."""
    wait_until(lambda: len(first_pids(logs)) > VICTIM_RANK, "its first attempt", job)

    def finished() -> list[Path]:
        return sorted(checkpoints.glob("epoch-*.pt"))

    wait_until(lambda: len(finished()) >= CHECKPOINTS_FIRST, f"checkpoint {CHECKPOINTS_FIRST}", job)
    before, last = finished()[-2:]
    time.sleep((last.stat().st_mtime - before.stat().st_mtime) / 2)
    pid = first_pids(logs)[VICTIM_RANK]
    announce(f"{last.name} is written; kill -9 {pid}, the worker of rank {VICTIM_RANK}")
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        fail(f"process {pid} had ended already: the job was over, or failed by itself")


def check(code: int, output: str) -> float:
    """Return the final accuracy; end the demo if the job did not recover as promised."""
    if code != 0:
        fail(f"the job ended with exit code {code}, not 0")
    if "resuming after epoch" not in output:
        fail("no attempt resumed from a checkpoint")
    accuracies = re.findall(r"final test accuracy ([0-9.]+)", output)
    if not accuracies or float(accuracies[-1]) <= ACCURACY:
        fail(f"the final test accuracy is {accuracies or 'not printed'}, not over {ACCURACY}")
    story = output[output.rfind("regrow: job ") :]
    missing = [part for part in (f"rank {VICTIM_RANK} ", *STORY) if part not in story]
    if missing:
        fail(f"the launcher's story does not say {missing}")
    return float(accuracies[-1])


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="A training that survives a kill -9.")
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"))
    folder: Path = parser.parse_args().dir
    checkpoints, logs = folder / "checkpoints", folder / "logs"
    for old in (checkpoints, logs):
        shutil.rmtree(old, ignore_errors=True)

    command = ["run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += [f"--log-dir={logs}", str(HERE / "train_digits.py")]
    command += [f"--checkpoint-dir={checkpoints}"]
    with launched(command) as (job, seen):
        kill_mid_epoch(job, checkpoints, logs)
        code = job.wait(DEADLINE_S)
    accuracy = check(code, "".join(seen))
    announce(
        f"one worker killed, job recovered by itself, test accuracy {accuracy:.4f}.\n"
        f"=== its story again: {Path(sys.executable).parent / 'regrow'} events {logs}"
    )


if __name__ == "__main__":
    main()
