"""A host beyond the maximum of `--nnodes` gets ready while it waits for a place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job
from helpers.jobs.elastic_job import SCRIPT as ELASTIC_SCRIPT
from helpers.jobs.elastic_job import Elastic
from helpers.processes import alive, wait_until

Launch = Callable[..., Job]

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
imported = "decimal" in sys.modules
report("runs", imported)
while not os.path.exists(os.environ["FINISH"]):
    time.sleep(0.01)
"""


def test_a_host_that_waits_for_a_place_starts_its_first_workers_from_the_template(
    launch: Launch, tmp_path: Path
) -> None:
    finish, meet = tmp_path / "finish", tmp_path / "meet"
    meet.mkdir()
    flags = ["--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={meet}", "--rdzv-id=warm"]
    flags += ["--preload=decimal"]
    env = {"FINISH": str(finish)}
    first, second = (launch(SCRIPT, *flags, nproc=1, env=env, standalone=False) for _ in range(2))
    for job in (first, second):
        ((_, _, *words),) = job.reports()
        assert words == ["runs", "False"]
    waiting = launch(SCRIPT, *flags, nproc=1, env=env, standalone=False)
    assert waiting.await_event("template.ready")["modules"] == ["decimal"]
    second.kill_family()
    ((_, _, *words),) = waiting.reports()
    assert words == ["runs", "True"]
    finish.touch()
    assert [first.finish(), waiting.finish()] == [0, 0], waiting.output
    assert [each["forked"] for each in waiting.events("attempt.started")] == [[1]]


HOLDING = ELASTIC_SCRIPT.replace('step == int(os.environ["HOLD"])', "step in (5, 8)")
"""The ranks stop at step 8 as well, so that the job goes on after the loss of a host."""


def pids_of_standbys(job: Job, count: int) -> list[int]:
    """Wait until `count` standbys of a host have come to their wrapped call; return their pids."""

    def found() -> list[int]:
        pids = [event["pid"] for event in job.events("standby.ready")]
        return pids if len(pids) >= count else []

    job.await_event("standby.ready")
    return wait_until(found, lambda: f"{count} standbys; {job.output}", 60.0)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.thorough),
        ("--preload=regrow.inprocess,numpy",),
    ],
)
def test_the_first_workers_of_a_host_that_waited_are_its_standbys(
    launch: Launch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    undisturbed = Elastic(launch, tmp_path, "2:2")
    expected = undisturbed.finish([undisturbed.agent(nproc=2) for _ in range(2)])
    job = Elastic(launch, tmp_path, "2:2", "--standby=1", *flags, script=HOLDING)
    agents, first, before = job.begin(2, nproc=2)
    waiting = job.agent(nproc=2)
    killed, *_ = pids_of_standbys(waiting, 2)
    os.kill(killed, signal.SIGKILL)
    _, *standbys = pids_of_standbys(waiting, 3)
    job.lose(agents, before, 2, 3)
    _, after = job.world(4, after=first)
    assert [after[rank] for rank in (0, 1)] == [before[rank] for rank in (0, 1)]
    assert {after[rank] for rank in (2, 3)} == set(standbys)
    next_standby = pids_of_standbys(waiting, 4)[-1]
    assert job.finish([*agents, waiting]) == expected
    (started,) = waiting.events("attempt.started")
    assert (started["stood_by"], started["forked"]) == ([2, 3], [])
    assert not alive(next_standby)


@pytest.mark.thorough
def test_a_standby_that_hangs_at_its_place_costs_its_worker_a_start(
    launch: Launch, tmp_path: Path
) -> None:
    job = Elastic(launch, tmp_path, "2:2", "--standby=1", "--preload=regrow.inprocess,numpy")
    agents, first, before = job.begin(2, nproc=2)
    waiting = job.agent(nproc=2)
    hung, standby = pids_of_standbys(waiting, 2)
    waiting.await_event("template.ready")
    os.kill(hung, signal.SIGSTOP)
    job.lose(agents, before, 2, 3)
    _, after = job.world(4, after=first)
    assert standby in {after[rank] for rank in (2, 3)}
    assert hung not in after.values()
    assert len(job.finish([*agents, waiting])) == 1
    (started,) = waiting.events("attempt.started")
    assert len(started["stood_by"]) == 1


@pytest.mark.thorough
def test_a_script_that_needs_its_round_too_early_has_standbys_in_its_attempts_only(
    launch: Launch, tmp_path: Path
) -> None:
    script = HOLDING.replace("\nFOLDER", "\nint(os.environ['WORLD_SIZE'])\nFOLDER", 1)
    job = Elastic(launch, tmp_path, "2:2", "--standby=1", script=script)
    agents, first, before = job.begin(2)
    waiting = job.agent()
    gone = waiting.await_event("standby.gone")
    assert "the script reads WORLD_SIZE before its wrapped call" in gone["reason"]
    assert not gone["is_final"]
    job.lose(agents, before, 1)
    job.world(2, after=first)
    waiting.await_event("standby.ready")
    assert len(job.finish([*agents, waiting])) == 1
    (started,) = waiting.events("attempt.started")
    assert started["stood_by"] == []
    assert len(waiting.events("standby.gone")) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_standby_outlives_a_host_that_waited(
    launch: Launch, tmp_path: Path, signum: signal.Signals
) -> None:
    job = Elastic(launch, tmp_path, "2:2", "--standby=1")
    waiting = job.agent(nproc=2)  # for another host
    standbys = pids_of_standbys(waiting, 2)
    waiting.signal(signum)
    assert waiting.finish() == (143 if signum == signal.SIGTERM else -signum)
    assert not any(map(alive, standbys))
