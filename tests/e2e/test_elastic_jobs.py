"""`Wrapper(elastic=True)`: the loss of a host, or a new one, ends no process of the others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job, wait_gone
from helpers.jobs.elastic_job import SCRIPT, Elastic

Launch = Callable[..., Job]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("lost", [2, 0])
def test_a_spare_host_takes_the_ranks_of_a_lost_one_and_the_others_keep_their_processes(
    launch: Launch, tmp_path: Path, lost: int
) -> None:
    undisturbed = Elastic(launch, tmp_path, "3:3")
    expected = undisturbed.finish([undisturbed.agent() for _ in range(3)])
    assert len(expected) == 1
    job = Elastic(launch, tmp_path, "3:3")
    agents, first, before = job.begin(3)
    spare = job.agent()
    job.lose(agents, before, lost)
    _, after = job.world(3, after=first)
    others = before.keys() - {lost}
    assert {rank: after[rank] for rank in others} == {rank: before[rank] for rank in others}
    assert job.of_all(after, spare) == [lost]
    assert job.finish([*agents, spare]) == expected
    assert len(job.lines("default")) == 3, "no rank went back to the checkpoint"
    assert all(str(file).endswith("/0/error.json") for *_, file in job.lines("error file"))
    for agent in agents:
        starts = agent.events("attempt.started")
        assert [(each["restart_count"], len(each["kept"])) for each in starts] == [(0, 0), (0, 1)]
        (step,) = [each for each in agent.events("worker.first_step") if each["attempt"] == 1]
        assert step["step"] in (5, 6), "the story shows when the training went on"
        assert "run again; those of this node in the same processes" in " ".join(
            agent.stderr.split()
        )


def test_the_other_hosts_go_on_with_fewer_ranks_without_a_spare_host(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "1:3")
    agents, first, before = job.begin(3, nproc=2)
    job.lose(agents, before, 0, 1)
    second, after = job.world(4, after=first)
    assert set(after.values()) == {before[rank] for rank in (2, 3, 4, 5)}
    assert {rank: after[rank] for rank in (2, 3)} == {rank: before[rank] for rank in (2, 3)}
    assert len(job.finish(agents)) == 1
    steps = [int(str(each[3])) for each in job.lines("step") if int(str(each[1])) >= second]
    assert min(steps) in (5, 6), "at most one step is done again"


def test_a_host_that_joins_is_taken_in_without_the_end_of_a_process(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "1:3")
    agents, first, before = job.begin(2)
    agents.append(job.agent())
    _, after = job.world(3, after=first)
    assert {rank: after[rank] for rank in before} == before, [
        str(agent.events("attempt.not_kept") + agent.events("round.ended")) for agent in agents
    ]
    assert len(job.finish(agents)) == 1
    assert [agent.events("attempt.started")[-1]["kept"] for agent in agents] == [[0], [1], []]


@pytest.mark.thorough
def test_two_hosts_that_are_lost_at_once_cost_no_process_of_the_third(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "1:3")
    agents, first, before = job.begin(3)
    job.lose(agents, before, 0)
    job.lose(agents, before, 2)
    _, after = job.world(1, after=first)
    assert after == {0: before[1]}
    assert len(job.finish(agents)) == 1


def test_a_worker_that_does_not_leave_its_function_is_ended_and_the_others_live_on(
    launch: Launch, tmp_path: Path
) -> None:
    stubborn = SCRIPT.replace(
        '    while step == int(os.environ["HOLD"])',
        "    if rank == 1 and step == 5 and not os.path.exists(f'{FOLDER}/go'):\n"
        "            with call.atomic():\n"
        "                time.sleep(3600)\n"
        '        while step == int(os.environ["HOLD"])',
    )
    job = Elastic(launch, tmp_path, "1:3", "--restart-timeout=1", script=stubborn)
    agents, first, before = job.begin(3)
    (other,) = [agent for agent in agents if job.of_all(before, agent) == [1]]
    job.lose(agents, before, 2)
    _, after = job.world(2, after=first)
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert len(job.finish(agents)) == 1
    (reason,) = [each["reason"] for each in other.events("attempt.not_kept")]
    assert reason == "a worker did not leave its round within 0.8 s"


@pytest.mark.thorough
def test_workers_that_wait_longer_than_their_lease_are_ended_and_start_again(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "2:2")
    agents, first, before = job.begin(2)
    job.lose(agents, before, 0)
    (other,) = agents
    wait_gone(before[1])
    spare = job.agent()
    _, after = job.world(2, after=first)
    assert job.of_all(after, other) == [1]
    assert len(job.finish([other, spare])) == 1
    (reason,) = [each["reason"] for each in other.events("attempt.not_kept")]
    assert reason == "a worker ended while the round formed, or its lease expired"


@pytest.mark.thorough
def test_a_script_whose_second_call_runs_starts_again(launch: Launch, tmp_path: Path) -> None:
    twice = SCRIPT.replace(
        "\ntrain()\n", "\nearly = Wrapper(replace=True)(lambda: 0)\nearly()\ntrain()\n"
    )
    job = Elastic(launch, tmp_path, "1:2", script=twice)
    agents, first, before = job.begin(2)
    job.lose(agents, before, 0)
    _, after = job.world(1, after=first)
    assert after[0] != before[1]
    job.finish(agents)
    assert agents[0].events("attempt.not_kept") == [], "no worker could go on"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_a_host_that_is_lost_at_any_moment_leaves_the_result_of_a_run_without_faults(
    launch: Launch, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    undisturbed = Elastic(launch, tmp_path, "3:3", steps=300)
    expected = undisturbed.finish([undisturbed.agent() for _ in range(3)])
    job = Elastic(launch, tmp_path, "3:3", steps=300)
    agents = [job.agent() for _ in range(3)]
    first, before = job.world(3)
    spare = job.agent("--preload=regrow.inprocess")
    spare.await_event("template.ready")
    victim = chosen.choice(agents)
    job.go()
    job.at_step(chosen.randrange(20, 250), chosen.choice((1, 3)))
    victim.kill_family()
    agents.remove(victim)
    assert job.finish([*agents, spare]) == expected
    started = [agent.events("attempt.started") for agent in agents]
    moved = [each for starts in started for each in starts if each["kept"]]
    assert len(moved) == 2, f"from round {first}, with the processes {before}"
    repeated = Counter((str(each[2]), each[3]) for each in job.lines("step"))
    assert max(repeated.values()) <= 2
