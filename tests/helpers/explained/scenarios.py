"""Real failures of jobs on this machine, one of each kind, for `regrow explain`.

Each scenario is a script, the flags of `regrow run`, and what happens to the job from outside. The
scripts train for a few seconds: a step takes 20 ms, and rank 0 saves every tenth step.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.processes import wait_until

TRAIN = """\
import os, signal, sys, time
from pathlib import Path

import regrow

rank, attempt = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])
checkpoint = Path("checkpoint")


def train_step(step):
    time.sleep(0.02)
    if step == FAULT_STEP and rank == FAULT_RANK and attempt in FAULT_ATTEMPTS:
        fault()


def meet(step):
    # Waits until all ranks have done this step, as in a collective.
    mine = Path(f"done.{attempt}.{os.environ.get('ITERATION', 0)}.{os.environ['RANK']}")
    mine.write_text(str(step))
    for other in range(int(os.environ["WORLD_SIZE"])):
        theirs = mine.with_suffix(f".{other}")
        while not theirs.exists() or int(theirs.read_text() or -1) < step:
            time.sleep(0.002)


def train(last):
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(done + 1, last + 1):
        train_step(step)
        meet(step)
        regrow.step(step)
        if rank == 0 and step % 10 == 0:
            with regrow.phase("checkpoint"):
                checkpoint.write_text(str(step))


FAULT_STEP, FAULT_RANK, FAULT_ATTEMPTS = 37, 1, (0,)
"""
END = "\ntrain(60)\n"


class Scenario(NamedTuple):
    """A job that fails."""

    fault: str
    """The end of the script, which defines `fault`."""
    flags: str = "--nproc-per-node 2 --max-restarts 1"
    act: Callable[[Path, subprocess.Popen[bytes]], None] | None = None
    """What happens from outside while the job runs, given its folder and its agent."""
    env: Mapping[str, str] = {}
    script: str = TRAIN
    memory: int | None = None
    """Bytes of memory of the whole job, in a cgroup of its own; None: no limit."""


def _kill_worker(folder: Path, agent: subprocess.Popen[bytes]) -> None:
    wait_until((folder / "pid").exists, "a worker wrote its pid")
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def _stop_worker(folder: Path, agent: subprocess.Popen[bytes]) -> None:
    wait_until((folder / "pid").exists, "a worker wrote its pid")
    os.kill(int((folder / "pid").read_text()), signal.SIGSTOP)


def _terminate(folder: Path, agent: subprocess.Popen[bytes]) -> None:
    wait_until((folder / "pid").exists, "a worker wrote its pid")
    agent.send_signal(signal.SIGTERM)


def _await(event: str, folder: Path) -> None:
    """Wait until an agent has recorded an event."""
    logs = folder.glob
    wait_until(lambda: any(event in log.read_text() for log in logs("runs/*/events.jsonl")), event)


def _kill_worker_with_standby(folder: Path, agent: subprocess.Popen[bytes]) -> None:
    _await("standby.ready", folder)
    _kill_worker(folder, agent)


def _fail_with_template(folder: Path, agent: subprocess.Popen[bytes]) -> None:
    _await("template.ready", folder)
    (folder / "go").touch()


# The name appears at once with its content, because it is moved there.
SHOW_PID = """
def fault():
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    while True:
        time.sleep(0.02)
"""

WRAPPED = """
from regrow.inprocess import CallWrapper, Wrapper

faults = []

def train_step(step):
    time.sleep(0.02)
    is_new = "REGROW_REPLACES" in os.environ
    here = rank == FAULT_RANK and attempt in FAULT_ATTEMPTS
    if here and step == FAULT_STEP and not faults and not is_new:
        faults.append(step)
        fault()


@Wrapper({arguments})
def call(wrapper: CallWrapper):
{begin}    os.environ["ITERATION"] = str(wrapper.iteration)
    train(60)


call()
"""


_PLACE = 'rank, attempt = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])'
LATE = TRAIN.replace(_PLACE, "rank = attempt = 0")
"""A script that reads its place in the wrapped call: a standby process has none before."""
BEGIN = f"    global rank, attempt\n    {_PLACE}\n"
"""The begin of the wrapped call of such a script."""


def wrapped(fault: str, arguments: str = "", begin: str = "") -> str:
    """Return the end of a script that trains in a function with an in-process wrapper.

    Args:
        fault: defines `fault`.
        arguments: those of the wrapper.
        begin: first lines of the function.
    """
    return fault + WRAPPED.format(arguments=arguments, begin=begin)


COLLECTIVE = """\
import os, sys

import torch
import torch.distributed as dist

import regrow

rank, attempt = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])


def loss_of(batch):
    if attempt == 0 and rank == 2 and batch == 25:
        raise ValueError("loss is not finite")
    return torch.ones(8)


dist.init_process_group("gloo")
for batch in range(1, 51):
    dist.all_reduce(loss_of(batch))
    regrow.step(batch)
dist.destroy_process_group()
"""

SCENARIOS: dict[str, Scenario] = {
    "exception": Scenario('def fault():\n    raise KeyError("no such layer: decoder.7")\n' + END),
    "exception-with-followers": Scenario(
        "", "--nproc-per-node 3 --max-restarts 1", env={"OMP_NUM_THREADS": "1"}, script=COLLECTIVE
    ),
    "exit-code": Scenario("def fault():\n    sys.exit(3)\n" + END),
    "sigkill": Scenario(SHOW_PID + END, act=_kill_worker),
    "out-of-memory": Scenario(
        "def fault():\n    held = [b'x' * (32 << 20) for _ in range(64)]\n" + END,
        memory=400 << 20,
    ),
    "segfault": Scenario(
        "import faulthandler\nfaulthandler.enable()\n"
        "def fault():\n    import ctypes\n    ctypes.string_at(0)\n" + END,
        "--nproc-per-node 2 --max-restarts 1 --tee 3",
    ),
    "cpp-abort": Scenario(
        "def fault():\n"
        "    sys.stderr.write(\"terminate called after throwing an instance of 'c10::Error'\\n\"\n"
        '        "  what():  CUDA error: an illegal memory access was encountered\\n")\n'
        "    sys.stderr.flush()\n    os.abort()\n" + END,
        "--nproc-per-node 2 --max-restarts 1 --tee 3",
    ),
    "hang-timer": Scenario(
        "def fault():\n"
        "    with regrow.expires(after=2, scope='load batch'):\n"
        "        time.sleep(1000)\n" + END,
        "--nproc-per-node 2 --max-restarts 1 --timers",
    ),
    "sigstop-heartbeat": Scenario(
        SHOW_PID + END,
        "--nproc-per-node 2 --max-restarts 1 --heartbeat 1",
        act=_stop_worker,
    ),
    "slow-stop": Scenario(
        "if attempt == 0 and rank == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "def fault():\n    raise RuntimeError('NaN in the loss')\n"
        "checkpoint = Path('none')\n" + "\ntrain(300)\n",
        "--nproc-per-node 2 --max-restarts 1 --restart-timeout 3",
    ),
    "during-a-checkpoint": Scenario(
        "FAULT_STEP = 31\ndef fault():\n    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\n"
        "class Slow(type(checkpoint)):\n    def write_text(self, text):\n"
        "        if text == '30' and attempt == 0:\n            time.sleep(100)\n"
        "        return super().write_text(text)\n"
        "checkpoint = Slow('checkpoint')\n" + END
    ),
    "before-the-first-step": Scenario(
        "if attempt == 0 and rank == 1:\n    import no_such_module\n" + END
    ),
    "budget-spent": Scenario(
        "FAULT_ATTEMPTS = (0, 1)\n"
        "def fault():\n    raise OSError(28, 'No space left on device', '/scratch/cache')\n" + END
    ),
    "crash-loop": Scenario(
        "FAULT_ATTEMPTS, FAULT_STEP = (0, 1, 2), 2\n"
        "def fault():\n    raise ConnectionError('the data server refused the connection')\n" + END,
        "--nproc-per-node 2 --max-restarts 3",
    ),
    "preempted": Scenario(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + SHOW_PID + END, act=_terminate
    ),
    "in-process": Scenario(
        wrapped("def fault():\n    raise FloatingPointError('gradient overflow')\n")
    ),
    "wrapper-gives-up": Scenario(
        wrapped(
            "from regrow.inprocess.initialize import RetryController\n"
            "def train_once():\n    raise FloatingPointError('gradient overflow')\n"
            "def fault():\n    train_once()\n",
            "initialize=RetryController(max_iterations=2)",
        ).replace("and not faults", "")
    ),
    "replaced": Scenario(
        wrapped("def fault():\n    os.kill(os.getpid(), signal.SIGKILL)\n", "replace=True")
    ),
    "standby": Scenario(
        wrapped(SHOW_PID, "replace=True", BEGIN),
        "--nproc-per-node 2 --max-restarts 1 --standby 1",
        act=_kill_worker_with_standby,
        script=LATE,
    ),
    "preload": Scenario(
        "def fault():\n    while not Path('go').exists():\n        time.sleep(0.02)\n"
        "    raise ValueError('the loss is NaN')\n" + END,
        "--nproc-per-node 2 --max-restarts 1 --preload regrow.inprocess",
        act=_fail_with_template,
    ),
    "continues-without": Scenario(
        wrapped("def fault():\n    os.kill(os.getpid(), signal.SIGKILL)\n"),
        "--nproc-per-node 3 --max-restarts 1",
    ),
    "in-process-time-out": Scenario(
        wrapped(
            "from datetime import timedelta\ndef fault():\n    time.sleep(1000)\n",
            "replace=True, soft_timeout=timedelta(seconds=2), hard_timeout=timedelta(seconds=4),"
            " monitor_process_interval=timedelta(seconds=0.2),"
            " monitor_thread_interval=timedelta(seconds=0.2)",
        )
    ),
    "without-steps": Scenario(
        "if attempt == 0:\n    if rank == 1:\n        sys.exit('bad configuration')\n"
        "    time.sleep(100)\n"
    ),
    "injected": Scenario(
        "FAULT_ATTEMPTS = ()\ntrain(150)\n",
        "--nproc-per-node 2 --max-restarts 1 --chaos 'raise rank=1 at=1s'",
    ),
    "stopped-early": Scenario(
        "def train_step(step):\n    time.sleep(0.02)\n    if regrow.should_stop():\n"
        "        sys.exit(0)\n    if step == 30 and rank == 1:\n"
        "        Path('pid').write_text(str(os.getpid()))\n" + "\ntrain(3000)\n",
        act=_terminate,
    ),
    "replaced-and-fails-again": Scenario(
        "incarnation = int(os.environ.get('REGROW_INCARNATION') or 0)\n"
        "if incarnation and attempt == 0:\n    raise RuntimeError('CUDA error: device 1 is lost')\n"
        + wrapped("def fault():\n    os.kill(os.getpid(), signal.SIGKILL)\n", "replace=True"),
        "--nproc-per-node 2 --max-restarts 2",
    ),
}


@contextmanager
def limited_memory(size: int) -> Iterator[Path]:
    """Make a cgroup with so many bytes of memory; yield its list of processes.

    Raises:
        OSError: this process cannot make one.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    parent = Path("/sys/fs/cgroup", *(["memory"] if "memory" in own else []))
    folder = parent / own.get("memory", own.get("", "")).lstrip("/") / f"regrow-{os.getpid()}"
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if "memory" in own else "memory.max"
        (folder / limit).write_text(str(size))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def require_limited_memory() -> None:
    """Skip the test where no cgroup can be made."""
    try:
        with limited_memory(1 << 30):
            pass
    except OSError as error:
        pytest.skip(f"this process cannot make a cgroup: {error}")


def run(scenario: Scenario, folder: Path, timeout_s: float = 60.0) -> int:
    """Run a job in a folder, with its logs in `runs`; return the exit code of the agent."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(scenario.script + scenario.fault)
    command = [sys.executable, "-m", "regrow", "run", "--standalone", "--log-dir", "runs"]
    command += [*shlex.split(scenario.flags), "train.py"]
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("wb"))
        if scenario.memory is not None:
            processes = stack.enter_context(limited_memory(scenario.memory))
            command = ["sh", "-c", f"echo $$ > {processes} && exec {shlex.join(command)}"]
        agent = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **scenario.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            if scenario.act is not None:
                scenario.act(folder, agent)
            return agent.wait(timeout_s)
        finally:
            agent.kill()
            agent.wait()
