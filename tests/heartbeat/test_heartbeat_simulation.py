"""Whole groups in virtual time: no failure without a fault, and each fault within its bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.heartbeats.beating import GRACE, LATENCY, Process, World
from regrow.heartbeat import messages as messages

PERIOD, TIMEOUT = 1.0, 1.0
BOUND = 3 * (PERIOD + TIMEOUT)
SLACK = 0.2
"""Additional seconds for messages."""

SIZES = st.integers(2, 6)
SEEDS = st.integers(0, 2**32)
TIMES = st.floats(0.0, 12.0)
RANKS = st.integers(0, 5)


@st.composite
def troubles(draw: st.DrawFn, most: int = 6) -> list[tuple[float, Callable[[World], None]]]:
    """Apply accidents that a group must survive, one after the other."""

    def drop(rank: int, seconds: float) -> Callable[[World], None]:
        return lambda world: world.drop(world.procs[rank % world.size], seconds)

    def stop(rank: int, seconds: float) -> Callable[[World], None]:
        return lambda world: world.stop(world.procs[rank % world.size], seconds)

    def restart(seconds: float) -> Callable[[World], None]:
        return lambda world: world.restart_server(seconds)

    kinds = st.one_of(
        st.builds(drop, RANKS, st.floats(0.0, GRACE - 0.05)),
        st.builds(drop, RANKS, st.floats(GRACE + 0.05, 1.5)),
        st.builds(stop, RANKS, st.floats(0.0, 2.0)),
        st.builds(restart, st.floats(0.0, 1.0)),
    )
    count = draw(st.integers(0, most))
    return [(draw(st.floats(0.0, 1.0)) + 6.0 * i, draw(kinds)) for i in range(count)]


def alarms(world: World) -> list[str]:
    return [str(process.failure) for process in world.procs if process.failure]


@given(SIZES, SEEDS, st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6), troubles())
def test_there_is_no_failure_without_a_fault(
    size: int,
    seed: int,
    starts: list[float],
    accidents: list[tuple[float, Callable[[World], None]]],
) -> None:
    """Workers are late, connections break, processes are stopped, servers lose their memory."""
    world = World(size, seed)
    for rank in range(size):
        world.at(world.now + starts[rank], partial(world.start, rank))
    world.run(6.0)
    for after, accident in accidents:
        world.at(world.now + after, partial(accident, world))
    world.run(6.0 * len(accidents) + 10.0)
    assert alarms(world) == []
    beaten = [process.state.beats for process in world.procs]
    world.run(4.0)
    assert all(p.state.beats > before for p, before in zip(world.procs, beaten, strict=True))


@given(SIZES, SEEDS, RANKS, st.floats(0.0, 12.0), st.floats(0.0, 20.0))
def test_workers_meet_again_after_a_delay_longer_than_the_time_out(
    size: int, seed: int, rank: int, when: float, seconds: float
) -> None:
    """The period is much longer than the time-out; without the rule, all workers end."""
    world = World(size, seed, period=10.0, timeout=2.0, start_timeout=30.0)
    workers = world.start_all()
    world.run(1.0 + when)
    world.stop(workers[rank % size], seconds)
    world.run(50.0)
    assert alarms(world) == []
    assert all(worker.state.beats >= 3 for worker in workers)


def test_workers_meet_again_after_some_lost_an_answer() -> None:
    """The server loses its memory between two answers."""
    for seed in range(100):
        world = World(2, seed)
        one, other = world.start_all()
        world.run_until(lambda one=one: one.state.beats == 2)  # type: ignore[misc]
        if other.state.beats == 1:
            world.restart_server(0.0)
            world.run(2 * BOUND)
            assert alarms(world) == []
            return
    raise AssertionError("the other one always received it first")


@given(SIZES, SEEDS, st.integers(1, 8))
def test_a_beat_is_one_question_and_one_answer_for_each_worker(
    size: int, seed: int, beats: int
) -> None:
    world = World(size, seed)
    workers = world.start_all()
    world.run_until(lambda: all(worker.state.beats == beats for worker in workers))
    for worker in workers:
        assert worker.messages == {messages.BeatQuestion: beats, messages.FollowGroup: 1}
        assert worker.answers == {messages.InStep: beats}


def kill(world: World, worker: Process) -> None:
    world.kill(worker)


def stop(world: World, worker: Process) -> None:
    world.stop(worker)


def replace(world: World, worker: Process) -> None:
    world.kill(worker)
    world.start(worker.plan.rank)


def intrude(world: World, worker: Process) -> None:
    world.start(worker.plan.rank)


def resize(world: World, worker: Process) -> None:
    world.start(worker.plan.rank, size=world.size + 1)


def cut(world: World, worker: Process) -> None:
    world.drop(worker, 1000.0)


FAULTS: dict[Callable[[World, Process], None], tuple[set[str], float]] = {
    kill: ({"lost"}, GRACE),
    stop: ({"missing"}, BOUND),
    replace: ({"restarted"}, 0.0),
    intrude: ({"restarted"}, 0.0),
    resize: ({"wrong world size"}, 0.0),
    cut: ({"missing"}, BOUND),
}
"""The kind of each fault, and the seconds from the last beat until all workers know it."""


@pytest.mark.parametrize("fault", FAULTS)
@given(SIZES, SEEDS, TIMES, RANKS, troubles(1))
def test_all_workers_detect_every_fault_within_its_bound(
    fault: Callable[[World, Process], None],
    size: int,
    seed: int,
    when: float,
    rank: int,
    before: list[tuple[float, Callable[[World], None]]],
) -> None:
    kinds, bound = FAULTS[fault]
    world = World(size, seed)
    workers = world.start_all()
    world.run(1.0)
    for after, accident in before:
        world.at(world.now + after, partial(accident, world))
    world.run(6.0 * len(before) + when)
    victim = workers[rank % size]
    began = world.now
    fault(world, victim)
    world.run(BOUND + 1.0)
    everyone = [worker for worker in world.procs if not (worker.dead or worker.stopped)]
    for worker in everyone:
        if worker is victim and fault is cut:
            assert worker.failure is not None
            continue
        assert worker.failure is not None, "it knows nothing"
        assert worker.failure.kind in kinds
        assert worker.failure.ranks == (victim.plan.rank,)
        assert worker.failed_at <= began + bound + SLACK


@given(SIZES, SEEDS, RANKS)
def test_a_worker_that_never_starts_is_detected_at_the_start_time_out(
    size: int, seed: int, rank: int
) -> None:
    world = World(size, seed)
    workers = [world.start(each) for each in range(size) if each != rank % size]
    world.run(BOUND + SLACK)
    assert {(w.failure and w.failure.kind, w.failure and w.failure.ranks) for w in workers} == {
        ("never started", (rank % size,))
    }


@given(SIZES, SEEDS, TIMES, RANKS)
def test_all_workers_stop_without_a_failure_when_one_leaves(
    size: int, seed: int, when: float, rank: int
) -> None:
    world = World(size, seed)
    workers = world.start_all()
    world.run(1.0 + when)
    world.run_until(lambda: not workers[rank % size].beat_id)
    workers[rank % size].stop()
    world.run(PERIOD + TIMEOUT)
    assert alarms(world) == []
    assert all(worker.ended for worker in workers)


def test_a_stopped_worker_learns_that_the_others_gave_it_up() -> None:
    world = World(3)
    workers = world.start_all()
    world.run(5.0)
    world.stop(workers[1], 20.0)
    world.run(25.0)
    assert [str(each.failure).partition(": ")[2][:24] for each in workers] == [
        "rank 1 is missing: 3 exc",
        "this process was missing",
        "rank 1 is missing: 3 exc",
    ]


def test_the_simulated_latency_is_far_below_the_slack() -> None:
    assert 4 * LATENCY[1] < SLACK
