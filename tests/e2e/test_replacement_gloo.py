"""Lost ranks of torch are replaced: four gloo ranks in a loop of all-reduces."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.replacing import Act, Launch, Training

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

GLOO = """
import json
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import worker_store
from regrow.store.torch import TorchStore

FOLDER, INCARNATION = Path(os.environ["FOLDER"]), int(os.environ.get("REGROW_INCARNATION") or 0)
ACTS, initial_rank = json.loads(os.environ["ACTS"]), RANK
TIMEOUTS = json.loads(os.environ["TIMEOUTS"])
store = TorchStore(worker_store())

def say(*words):
    report(INCARNATION, os.getpid(), *words)

def act(step):
    for rank, incarnation, _, at, how in ACTS:
        if (rank, incarnation, at) == (initial_rank, INCARNATION, step):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

say("starts", os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], 0)

@Wrapper(replace=True, **{name: timedelta(seconds=s) for name, s in TIMEOUTS.items()})
def train(call: CallWrapper):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=size)
    step = 0
    while True:
        step += 1
        act(step)
        values = torch.tensor([2.0**rank, float((FOLDER / "finish").exists())])
        dist.all_reduce(values)
        assert values[0] == 2**size - 1
        call.ping()
        regrow.step(step)
        if step == 3:
            replaced = ",".join(map(str, call.replaced)) or "-"
            say("called", call.iteration, rank, size, int(call.joined), replaced)
        if values[1] == size:
            break
        time.sleep(0.01)
    dist.destroy_process_group()

train()
say("returns", initial_rank)
"""

SLOW = {"soft_timeout": 10.0, "hard_timeout": 15.0}
"""Durations for ranks that import torch on a loaded machine."""

Start = Callable[..., Training]


@pytest.fixture
def start(launch: Launch, tmp_path: Path) -> Start:
    """Return a function that starts four gloo ranks; see `Training`."""

    def start(*flags: str, **more: object) -> Training:
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        timeouts = SLOW
        return Training(
            launch,
            tmp_path,
            *flags,
            script=GLOO,
            env=env,
            timeouts=timeouts,
            **more,  # type: ignore[arg-type]
        )

    return start


def check(training: Training, incarnations: dict[int, int], replaced: int) -> None:
    """Let the function return; assert that all ranks succeeded in the first attempt."""
    assert training.finish() == 0, training.job.output
    assert training.results() == {rank: (0, n) for rank, n in incarnations.items()}
    assert training.attempts == 1
    assert len(training.events("replaced")) == replaced


def test_killed_ranks_are_replaced_one_after_the_other_and_two_at_once(start: Start) -> None:
    training = start("--max-restarts=4")
    calls = training.await_all()
    pids = {rank: call.pid for rank, call in calls.items()}
    training.kill(calls, 0)
    calls = training.await_all(rank_0=1)
    training.kill(calls, 3)
    calls = training.await_all(rank_0=1, rank_3=1)
    training.kill(calls, 0, 1)
    calls = training.await_all(rank_0=2, rank_1=1, rank_3=1)
    assert {call.initial_rank: call.rank for call in calls.values()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert calls[2].pid == pids[2]
    check(training, {0: 2, 1: 1, 2: 0, 3: 1}, 4)


def test_a_replacement_is_forked_from_a_template_that_has_torch(start: Start) -> None:
    training = start("--max-restarts=1", "--preload=torch")
    calls = training.await_all()
    training.job.await_event("template.ready")
    training.kill(calls, 1)
    training.await_all(rank_1=1)
    check(training, {0: 0, 1: 1, 2: 0, 3: 0}, 1)


def test_a_rank_that_is_killed_while_another_is_replaced_is_replaced_too(start: Start) -> None:
    training = start("--max-restarts=2")
    calls = training.await_all()
    training.kill(calls, 1)
    training.await_start(1, 1)
    os.kill(calls[2].pid, signal.SIGKILL)
    training.await_all(rank_1=1, rank_2=1)
    check(training, {0: 0, 1: 1, 2: 1, 3: 0}, 2)


def test_a_rank_that_is_suspended_in_an_all_reduce_is_ended_and_replaced(start: Start) -> None:
    training = start("--max-restarts=1", acts=[Act(1, 0, "", 50, "stop")])
    training.await_all()
    training.await_all(rank_1=1)
    check(training, {0: 0, 1: 1, 2: 0, 3: 0}, 1)


def test_without_restarts_the_others_continue_with_three_ranks(start: Start) -> None:
    training = start("--max-restarts=0")
    training.kill(training.await_all(), 0)
    calls = training.await_calls({1: 0, 2: 0, 3: 0})
    assert {call.world_size for call in calls.values()} == {3}
    check(training, {1: 0, 2: 0, 3: 0}, 0)
