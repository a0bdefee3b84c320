"""In-process restart under torchrun; its agent ends all processes when one has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.stores.storing import master_port

pytestmark = [pytest.mark.training, pytest.mark.timeout(120)]

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import PrefixStore, worker_store
from regrow.store.torch import TorchStore

store = worker_store()

@Wrapper()
def train(call: CallWrapper) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = TorchStore(PrefixStore(str(call.iteration), store))
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=size)
    total = torch.ones(1)
    for step in range(3):
        if (call.iteration, rank, step) in ((0, 1, 1), (1, 2, 2)):
            raise ValueError(f"in iteration {call.iteration}")
        dist.all_reduce(total)
    text = f"rank {rank} of {size} pid {os.getpid()} iteration {call.iteration}"
    os.write(1, f"{text}: {total.item():g}\\n".encode())

os.write(1, f"started {os.getpid()}\\n".encode())
train()
"""


STATE = """\
import os, time
import torch
import torch.distributed as dist
import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import PrefixStore, worker_store
from regrow.store.torch import TorchStore

store = worker_store()
weights, done = torch.zeros(3), []
state = regrow.State({"weights": weights}, {"rng": regrow.rng(), "done": done})
torch.manual_seed(int(os.environ["RANK"]))

@Wrapper()
def train(call: CallWrapper) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = TorchStore(PrefixStore(str(call.iteration), store))
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=size)
    step = state.recover(call, lambda: 0)
    while step < 5:
        step += 1
        gradient = torch.randn(3)
        done.append(step)
        state.prepare(step)
        if FAULTS and (call.iteration, rank, step) == (0, 1, 2):
            raise ValueError("before the collective")
        while FAULTS and (call.iteration, step) in ((0, 2), (1, 4), (2, 5)):
            time.sleep(0.01)  # another rank fails now, and a wait in gloo might not end
        dist.all_reduce(gradient)
        if FAULTS and (call.iteration, step) in ((1, 3), (2, 4)):
            keys.set(f"{step}/{rank}", b"reduced")  # no rank is left in gloo when one fails
            keys.wait([f"{step}/{each}" for each in range(size)])
        if FAULTS and (call.iteration, rank, step) == (1, 2, 3):
            raise ValueError("after the collective")
        with state.commit(step):
            weights.add_(gradient)
            if FAULTS and (call.iteration, rank, step) == (2, 0, 4):
                raise ValueError("within the commit")
    os.write(1, f"rank {rank} {done} {weights.numpy().tobytes().hex()}\\n".encode())

train()
"""


def torchrun(script: str, folder: Path) -> list[str]:
    """Run a script on three ranks of torchrun; return the lines of its output."""
    (folder / "train.py").write_text(script)
    home = {"HOME": str(folder), "XDG_STATE_HOME": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    with master_port() as port:
        done = subprocess.run(
            [*command, f"--master-port={port}", folder / "train.py"],
            env=os.environ | home | {"GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_function_that_fails_on_one_rank_and_then_another_is_completed_by_the_same_processes(
    tmp_path: Path,
) -> None:
    lines = torchrun(SCRIPT, tmp_path)
    started = {line.split()[1] for line in lines if line.startswith("started")}
    ends = sorted(line.split() for line in lines if line.startswith("rank"))
    assert [end[1] for end in ends] == ["0", "1", "2"]
    assert {end[5] for end in ends} == started, "a process was restarted"
    assert {" ".join(end[6:]) for end in ends} == {"iteration 2: 27"}


def test_a_state_recovers_from_faults_that_leave_the_processes_alive(tmp_path: Path) -> None:
    expected = sorted(torchrun(f"FAULTS = False\n{STATE}", tmp_path))
    assert len(expected) == 3
    assert all("[1, 2, 3, 4, 5]" in line for line in expected)
    assert sorted(torchrun(f"FAULTS = True\n{STATE}", tmp_path)) == expected
