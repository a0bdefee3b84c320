"""`Wrapper(elastic=True)`: the loss of a host, or a new one, ends no process of the others."""

from __future__ import annotations

import random
import signal
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job, wait_gone
from helpers.jobs.elastic_job import SCRIPT, Elastic
from helpers.processes import wait_until

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
        assert "run again, those of this host in the same processes" in " ".join(
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


SAVES = SCRIPT.replace(
    "\ntrain()\n",
    """
def save(signum, frame):
    time.sleep(float(os.environ.get("SAVING", 0)))
    say("saved", os.environ["RANK"], time.monotonic())
    os._exit(0)

signal.signal(signal.SIGTERM, save)
train()
""",
)
"""Saves at SIGTERM, which takes SAVING seconds."""


def has_saved(job: Elastic, count: int) -> bool:
    return len(job.lines("saved")) == count


def agent_of(job: Elastic, agents: list[Job], pids: dict[int, int], rank: int) -> Job:
    """Take the agent off the list that has started the worker with this rank."""
    (found,) = [agent for agent in agents if job.of_all(pids, agent) == [rank]]
    agents.remove(found)
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_that_leaves_with_notice_ends_no_process_of_the_others(
    launch: Launch, tmp_path: Path, rank: int
) -> None:
    job = Elastic(launch, tmp_path, "1:3", script=SAVES)
    agents = [job.agent(env={"SAVING": "1"}) for _ in range(3)]
    first, before = job.world(3)
    job.at_step(5, 3)
    leaver = agent_of(job, agents, before, rank)
    leaver.signal(signal.SIGTERM)
    _, after = job.world(2, after=first)
    ((*_, saver, saved),) = job.lines("saved")
    assert saver == str(rank), "it has saved before"
    assert {*after.values()} == {*before.values()} - {before[rank]}
    assert leaver.finish() == 128 + signal.SIGTERM
    assert len(job.finish(agents)) == 1
    assert len(job.lines("default")) == 3, "no rank went back to the checkpoint"
    for agent in agents:
        (announced,) = agent.events("round.leaving")
        (over,) = agent.events("round.ended")
        assert announced["monotonic"] < saved < over["monotonic"], "the leaving worker saves"
        assert (over["why"], over["lost"]) == ("its agent got SIGTERM", False)


def test_a_spare_host_takes_the_ranks_of_one_that_leaves_with_notice(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "2:2", script=SAVES)
    agents, first, before = job.begin(2)
    spare = job.agent()
    wait_until(lambda: "stands by" in spare.stderr, lambda: spare.output, 60.0)
    leaver = agent_of(job, agents, before, 1)
    leaver.signal(signal.SIGTERM)
    _, after = job.world(2, after=first)
    assert after[0] == before[0]
    assert leaver.finish() == 128 + signal.SIGTERM
    assert len(job.finish([*agents, spare])) == 1
    assert len(job.lines("default")) == 2, "no rank went back to the checkpoint"
    host = f"host {socket.gethostname()}"
    joins = f"this node joins the job, with rank 1 of 2; {host} is gone: its agent got SIGTERM"
    assert spare.stderr.count(joins) == 1, spare.stderr
    assert f"(attempt 0): {host} (node rank 1): its agent got SIGTERM" in spare.stderr, spare.stderr
    assert not any("joins the job" in agent.stderr for agent in agents)


def test_hosts_that_leave_one_after_the_other_end_no_process_of_the_last(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "1:3", script=SAVES)
    agents = [job.agent(env={"SAVING": saving}) for saving in ("0", "4", "0")]
    first, before = job.world(3)
    job.at_step(5, 3)
    slow, quick = agents[1], agents[0]
    (last,) = job.of_all(before, agents[2])
    slow.signal(signal.SIGTERM)
    slow.await_event("job.stopping")
    quick.signal(signal.SIGTERM)
    _, after = job.world(1, after=first)  # longer than a lease after the quick one has left
    assert after == {0: before[last]}
    assert [agent.finish() for agent in (slow, quick)] == [128 + signal.SIGTERM] * 2
    assert len(job.lines("saved")) == 2
    assert len(job.finish(agents[2:])) == 1


def test_a_save_may_take_longer_than_the_ranks_wait_for_each_other(
    launch: Launch, tmp_path: Path
) -> None:
    """One worker of the host ends at once, and the other ranks meet again without it."""
    script = SAVES.replace("    time.sleep(float(", "    work(float(").replace(
        "\ndef save(",
        """
def work(seconds):
    end = time.monotonic() + (0 if os.environ["LOCAL_RANK"] == "0" else seconds)
    while time.monotonic() < end:
        time.sleep(0.01)

def save(""",
    )
    bounds = "soft_timeout=s(2), hard_timeout=s(3), heartbeat_timeout=s(3), barrier_timeout=s(4)"
    script = script.replace("Wrapper(", f"Wrapper({bounds}, ", 1).replace(
        "def default():",
        "from datetime import timedelta\n\ndef s(n): return timedelta(seconds=n)\n\ndef default():",
    )
    job = Elastic(launch, tmp_path, "1:2", script=script)
    agents = [job.agent(nproc=2, env={"SAVING": "8"}) for _ in range(2)]
    first, before = job.world(4)
    job.at_step(5, 4)
    leaver = agents.pop()
    kept = {pid for pid in before.values() if not leaver.owns(pid)}
    leaver.signal(signal.SIGTERM)
    _, after = job.world(2, after=first)
    assert {*after.values()} == kept
    assert len(job.lines("saved")) == 2, leaver.output
    assert len(job.finish(agents)) == 1


def test_a_host_that_is_lost_while_it_leaves_ends_no_process_of_the_others(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "1:3", script=SAVES)
    agents = [job.agent(env={"SAVING": "60"}) for _ in range(3)]
    first, before = job.world(3)
    job.at_step(5, 3)
    leaver = agent_of(job, agents, before, 1)
    leaver.signal(signal.SIGTERM)
    leaver.await_event("job.stopping")
    leaver.kill_family()
    _, after = job.world(2, after=first)
    assert {*after.values()} == {*before.values()} - {before[1]}
    assert len(job.finish(agents)) == 1


@pytest.mark.parametrize("when", ["at once", "when another has saved", "in the next round"])
def test_all_hosts_that_are_told_to_stop_save(launch: Launch, tmp_path: Path, when: str) -> None:
    job = Elastic(launch, tmp_path, "1:3", script=SAVES, steps=1_000_000)
    agents, number, before = job.begin(3)
    for left, agent in zip((2, 1, 0), agents, strict=True):
        agent.signal(signal.SIGTERM)
        if left and when == "when another has saved":
            wait_until(partial(has_saved, job, 3 - left), "a save", 60.0)
        elif left and when == "in the next round":
            number, _ = job.world(left, after=number)
    assert [agent.finish() for agent in agents] == [128 + signal.SIGTERM] * 3
    assert {line[0] for line in job.lines("saved")} == {*before.values()}


def test_ranks_that_call_should_stop_go_on_without_a_host_and_then_stop_at_one_step(
    launch: Launch, tmp_path: Path
) -> None:
    script = SCRIPT.replace(
        "        regrow.step(step)\n",
        "        regrow.step(step)\n"
        "        if regrow.should_stop():\n"
        "            say('stopped', step)\n"
        "            return\n",
    )
    job = Elastic(launch, tmp_path, "1:3", script=script, steps=1_000_000, hold=0)
    agents, first, before = job.begin(3)
    leaver = agent_of(job, agents, before, 1)
    leaver.signal(signal.SIGTERM)
    _, after = job.world(2, after=first)
    assert {*after.values()} == {*before.values()} - {before[1]}
    assert leaver.finish() == 128 + signal.SIGTERM
    assert job.lines("stopped") == [], "one host alone leaves, as without should_stop"
    for agent in agents:
        agent.signal(signal.SIGTERM)
    assert [agent.finish() for agent in agents] == [85] * 2
    assert len({line[2] for line in job.lines("stopped")}) == 1


def test_the_workers_of_all_hosts_save_if_too_few_hosts_would_be_left(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "2:2", script=SAVES)
    agents, first, before = job.begin(2)
    leaver = agent_of(job, agents, before, 0)
    leaver.signal(signal.SIGTERM)
    assert leaver.finish() == 128 + signal.SIGTERM
    agents.append(job.agent())
    _, after = job.world(2, after=first)
    assert not {*after.values()} & {*before.values()}
    assert {line[0] for line in job.lines("saved")} == {*before.values()}
    job.finish(agents)


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
