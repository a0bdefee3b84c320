"""Jobs with a `regrow.State`, without torch: ranks are killed, and the result is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job
from helpers.jobs.state_job import FAULTS, POINTS, STEPS, WALK, Finished, Kill, schedule, start

Launch = Callable[..., Job]


def test_ranks_killed_at_all_points_of_a_step_leave_the_result_of_a_run_without_faults(
    launch: Launch, tmp_path: Path
) -> None:
    expected = Finished(start(launch, tmp_path, WALK, [])).results()
    assert len(set(expected.values())) == 1
    kills = schedule(1, 3, POINTS)
    found = Finished(start(launch, tmp_path, WALK, kills))
    assert found.results() == expected, kills
    assert len(found.job.events("worker.replaced")) == len(kills)
    assert len(found.of("default")) == 3  # only in the first iteration
    # A rank reports a step after its commit. A kill at "committed" comes after the report.
    repeated = Counter(tuple(line) for line in found.of("step"))
    assert max(repeated.values()) <= 2
    assert sum(repeated.values()) <= 3 * STEPS + 3 * len(kills)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2, 6))
def test_the_result_is_the_same_for_other_schedules(
    seed: int, launch: Launch, tmp_path: Path
) -> None:
    expected = Finished(start(launch, tmp_path, WALK, [])).results()
    kills = schedule(seed, 3, POINTS)
    assert Finished(start(launch, tmp_path, WALK, kills)).results() == expected, kills


GROUPS = (
    FAULTS
    + """
import regrow
from regrow.inprocess import CallWrapper, Wrapper

shard = {"values": [RANK % 2]}
state = regrow.State({"shard": shard}, replicas=[[0, 2], [1, 3]])

@Wrapper(replace=True)
def train(call: CallWrapper):
    step = state.recover(call, lambda: report("default") or 0)
    if call.joined:
        report("received", step, shard["values"])
    while step < 3:
        step += 1
        with state.commit(step):
            shard["values"].append(10 * step + RANK % 2)
        regrow.step(step)
        store = call.state.store
        store.set(f"{step}/{RANK}", str(os.getpid()))
        store.wait([f"{step}/{rank}" for rank in range(4)])
        at(step, "met")
        if step == 2:
            store.wait(["the end of the iteration"] if call.iteration == 0 and KILLS else [])

train()
report("result", shard["values"])
"""
)


def test_a_rank_receives_the_shard_of_its_own_replica_group(launch: Launch, tmp_path: Path) -> None:
    found = Finished(start(launch, tmp_path, GROUPS, [Kill(2, 1, "met")], nproc=4))
    assert found.of("received") == [["1", "2", "[1,", "11,", "21]"]]
    assert len(found.of("default")) == 4
    even, odd = "[0, 10, 20, 30]", "[1, 11, 21, 31]"
    assert found.results() == {"0": even, "1": odd, "2": even, "3": odd}


def test_the_checkpoint_is_loaded_if_all_ranks_of_a_replica_group_are_lost(
    launch: Launch, tmp_path: Path
) -> None:
    script = GROUPS.replace('lambda: report("default") or 0', "load")
    script = script.replace(
        "@Wrapper",
        "def load():\n    shard['values'][:] = [RANK % 2]\n    return report('default') or 0\n\n"
        "@Wrapper",
        1,
    )
    both = (
        "        if step == 2 and call.iteration == 0 and RANK == 1:\n"
        "            os.kill(int(store.get('2/3')), signal.SIGKILL)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = script.replace('        at(step, "met")\n', both)
    found = Finished(start(launch, tmp_path, script, [Kill(0, 0, "never")], nproc=4))
    assert len(found.of("default")) == 8
    even, odd = "[0, 10, 20, 30]", "[1, 11, 21, 31]"
    assert found.results() == {"0": even, "1": odd, "2": even, "3": odd}
    assert "no rank of the replica group of ranks 1, 3 has a clean state" in found.job.stderr


DAMAGE = (
    FAULTS
    + """
import numpy as np
import regrow
from regrow.inprocess import CallWrapper, Wrapper

weights = {"w": np.zeros(1000), "n": np.zeros(3)}

class Damaging:
    # Changes one byte of one message of the first transfer.
    def __init__(self, transport):
        self.inner, self.count = transport, 0
    def send(self, rank, data):
        self.count += 1
        if self.count == 3:
            data[17] ^= 4
        self.inner.send(rank, data)
    def receive(self, rank, into):
        self.inner.receive(rank, into)

damaged = []
def adapt(transport):
    if RANK == 0 and not damaged:
        damaged.append(1)
        return Damaging(transport)
    return transport

state = regrow.State({"weights": weights}, transport=adapt)

@Wrapper(replace=True)
def train(call: CallWrapper):
    try:
        step = state.recover(call, lambda: 0)
    except regrow.state.StateError as error:
        report("refused", state.clean, str(error).replace(" ", "_"))
        raise
    while step < 4:
        step += 1
        with state.commit(step):
            weights["w"] += step
        regrow.step(step)
        store = call.state.store
        store.set(f"{step}/{RANK}", b"")
        store.wait([f"{step}/{rank}" for rank in range(2)])
        at(step, "committed")

train()
report("result", weights["w"].sum())
"""
)


def test_a_byte_that_changes_on_its_way_is_found_and_sent_again(
    launch: Launch, tmp_path: Path
) -> None:
    found = Finished(start(launch, tmp_path, DAMAGE, [Kill(2, 1, "committed")], nproc=2))
    (refused,) = found.of("refused")
    assert refused[:2] == ["1", "False"]
    assert "replicated['weights']['w']_was_damaged_on_its_way_from_rank_0" in refused[2]
    assert found.results() == {"0": "10000.0", "1": "10000.0"}


LOST_SENDER = (
    FAULTS
    + """
import regrow
from regrow.inprocess import CallWrapper, Wrapper

values = {"steps": []}

def adapt(transport):
    at(2, "sends")  # the receivers are connected, and have no byte yet
    return transport

def default():
    values["steps"][:] = []
    return report("default") or 0

state = regrow.State({"values": values}, transport=adapt)

@Wrapper(replace=True)
def train(call: CallWrapper):
    step = state.recover(call, default)
    if state.step == step == 1:
        report("continued", step)
    while step < 3:
        step += 1
        store = call.state.store
        if step == 2 and call.iteration == 0 and RANK != 0:
            store.wait(["the end of the iteration"])
        with state.commit(step):
            values["steps"].append(step)
        regrow.step(step)
        store.set(f"{step}/{RANK}", b"")
        if step == 2 and call.iteration == 0:
            raise RuntimeError("only rank 0 has step 2")
        store.wait([f"{step}/{rank}" for rank in range(3)])

train()
report("result", values["steps"])
"""
)


def test_ranks_whose_sender_ends_before_it_sends_keep_their_step(
    launch: Launch, tmp_path: Path
) -> None:
    found = Finished(start(launch, tmp_path, LOST_SENDER, [Kill(2, 0, "sends")]))
    assert len(found.job.events("worker.replaced")) == 1
    assert len(found.of("default")) == 3  # only in the first iteration
    assert sorted(line[0] for line in found.of("continued")) == ["0", "1", "2"]
    assert set(found.results().values()) == {"[1, 2, 3]"}


def test_a_rank_with_another_shape_is_refused_with_the_key(launch: Launch, tmp_path: Path) -> None:
    script = DAMAGE.replace(
        "np.zeros(1000)", "np.zeros(1000 if not os.listdir(os.environ['DONE']) else 8)"
    )
    script = script.replace("if RANK == 0 and not damaged:", "if False:")
    script = script.replace("        raise\n", "        os._exit(3)\n")
    job = start(launch, tmp_path, script, [Kill(2, 1, "committed")], nproc=2)
    line = next(line for line in iter(lambda: job.reports()[0], None) if line[2] == "refused")
    assert line[0] == "1", line
    assert "replicated['weights']['w']_is_numpy_<f8_[8]_on_this_rank,_and_" in line[4]
