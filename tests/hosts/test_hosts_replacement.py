"""Lost ranks on three hosts are replaced on their hosts, and the budget is one for all hosts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from helpers.hosts.jobs import Agent, Job, Record
from helpers.hosts.netns import Host

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]


def started(job: Job, pid: int, host: str) -> Record:
    """Return the record of the start of a process."""
    (record,) = [each for each in job.records("started") if (each.pid, each.host) == (pid, host)]
    return record


def together(job: Job, size: int, after: int = -1) -> tuple[int, dict[int, Record]]:
    """Wait until `size` ranks run together in an iteration later than `after`.

    Returns:
        The iteration, and the record of each initial rank.
    """

    def found() -> tuple[int, dict[int, Record]] | None:
        for iteration in range(after + 1, after + 4):
            records = job.records(f"iteration {iteration}")
            if len(records) == size and {each.world_size for each in records} == {size}:
                return iteration, {started(job, r.pid, r.host).rank: r for r in records}
        return None

    return job.wait_until(found, f"{size} ranks run after iteration {after}")


def kill(agents: list[Agent], record: Record) -> Agent:
    """Kill the process that wrote a record; return the agent of its host."""
    (agent,) = [agent for agent in agents if agent.host.name == record.host]
    agent.host.run("kill", "-KILL", str(record.pid))
    return agent


def finish(job: Job, agents: list[Agent]) -> None:
    """Let the function return; assert that all agents succeed and no rank had two processes."""
    (job.folder / "finish").touch()
    assert [agent.finish() for agent in agents] == [0] * len(agents), job
    starts = job.records("started")
    assert {record.round for record in starts} == {starts[0].round}, "one attempt"
    last_seen_s = {}
    for path in (job.folder / "alive").iterdir():
        _, host, pid = path.name.split(".")
        last_seen_s[host, int(pid)] = float(path.read_text() or 0)
    for i, record in enumerate(starts):
        for earlier in starts[:i]:
            if earlier.rank == record.rank:
                assert earlier.host == record.host
                assert last_seen_s[earlier.host, earlier.pid] <= record.monotonic_s


@pytest.fixture
def begin(prepare: Callable[..., Job], hosts: list[Host]) -> Callable[..., tuple[Job, list[Agent]]]:
    """Return a function that starts a job on three hosts."""

    def begin(backend: str, nproc: int, **settings: object) -> tuple[Job, list[Agent]]:
        job = prepare(backend, nodes="3", mode="replaced", **settings)
        flags = [f"--nproc-per-node={nproc}", "--shutdown-timeout=2"]
        return job, [job.agent(host, *flags) for host in hosts[:3]]

    return begin


Begin = Callable[..., tuple[Job, list[Agent]]]


def test_a_rank_on_each_host_is_replaced_in_turn(begin: Begin, backend: str) -> None:
    job, agents = begin(backend, 1, max_restarts=3)
    iteration, ranks = together(job, 3)
    replaced = []
    for rank in range(3):
        before = ranks
        agent = kill(agents, ranks[rank])
        iteration, ranks = together(job, 3, after=iteration)
        changed = {each for each in ranks if ranks[each].pid != before[each].pid}
        assert changed == {rank}
        assert {each: ranks[each].rank for each in ranks} == {0: 0, 1: 1, 2: 2}
        assert [event["rank"] for event in agent.events("worker.replaced")] == [rank]
        replaced.append((rank, before[rank], ranks[rank]))
    finish(job, agents)
    restarts = agents[0].events("inprocess.restarted")
    for (rank, ended, started), restart in zip(replaced, restarts, strict=True):
        assert restart["replaced"] == [rank]
        (origin,) = restart["origins"]
        assert origin.startswith(f"pid {ended.pid} on {ended.host} ended by SIGKILL after step ")
        assert origin.endswith(f"; pid {started.pid} started by a cold start")
    story = " ".join(agents[0].output.split())
    for rank in (1, 2):
        assert re.search(rf"rank {rank}: pid \d+ on \S+ ended by SIGKILL after step", story), story
    assert [len(agent.events("worker.vacated")) for agent in agents] == [1, 1, 1]
    assert [agent.events("worker.not_replaced") for agent in agents] == [[], [], []]


def test_all_hosts_share_one_budget(begin: Begin, backend: str) -> None:
    job, agents = begin(backend, 2, max_restarts=2)
    iteration, ranks = together(job, 6)
    for rank in (0, 2):
        kill(agents, ranks[rank])
        iteration, ranks = together(job, 6, after=iteration)
    agent = kill(agents, ranks[4])
    iteration, ranks = together(job, 5, after=iteration)
    assert ranks.keys() == {0, 1, 2, 3, 5}
    finish(job, agents)
    (refused,) = agent.events("worker.not_replaced")
    assert refused["rank"] == 4
    assert refused["reason"] == "no restarts are left (--max-restarts)"
    assert sum(len(each.events("worker.replaced")) for each in agents) == 2


def test_ranks_on_all_hosts_are_replaced_at_once(begin: Begin) -> None:
    job, agents = begin("server", 2, max_restarts=3)
    iteration, before = together(job, 6)
    for rank in (1, 3, 5):
        kill(agents, before[rank])
    records = job.wait_until(lambda: job.records("started")[8:], "nine processes have started")
    assert {each.rank for each in job.records("started")[6:]} == {1, 3, 5}
    assert len(records) == 1

    def all_six() -> dict[int, Record] | None:
        for number in range(iteration + 1, iteration + 5):
            found = job.records(f"iteration {number}")
            ranks = {started(job, each.pid, each.host).rank: each for each in found}
            new = {r for r, each in ranks.items() if each.pid != before[r].pid}
            if len(ranks) == 6 and new == {1, 3, 5}:
                return ranks
        return None

    ranks = job.wait_until(all_six, "six ranks run, three of them in new processes")
    assert {each: ranks[each].rank for each in ranks} == {rank: rank for rank in range(6)}
    finish(job, agents)
