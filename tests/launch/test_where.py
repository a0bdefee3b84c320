"""What schedulers say of an agent, in environments recorded or put together; see their comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regrow.launch._hostlist import first_host
from regrow.launch._where import FIRST_PORT, PORTS, Placement, Untold, where

ENVIRONMENTS = Path(__file__).with_name("environments")


def recorded(name: str, **changes: str | None) -> dict[str, str]:
    """An environment of the folder, but for some variables; None takes one away."""
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    changed = {**environ, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def place(name: str, **changes: str | None) -> Placement:
    found = where(recorded(name, **changes), first_host)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("slurm22-step-of-4", ("Slurm step 1.0", 4, 2, "n1", FIRST_PORT + 8, "slurm-1.0")),
        ("slurm22-step-in-batch", ("Slurm step 2.0", 4, 1, "n1", FIRST_PORT + 16, "slurm-2.0")),
        ("slurm22-step-of-1-in-4", ("Slurm step 2.1", 1, 0, "n1", FIRST_PORT + 17, "slurm-2.1")),
        ("slurm22-array", ("Slurm step 3.0", 2, 1, "n3", FIRST_PORT + 24, "slurm-3.0")),
        ("slurm22-het", ("Slurm step 9.0", 3, 2, "n1", FIRST_PORT + 72, "slurm-9.0")),
        (
            "slurm24-shell-in-a-step",
            ("Slurm step 22902023.0", 1, 0, "c05", 22584, "slurm-22902023.0"),
        ),
        (
            "openmpi4-rank-0-of-2",
            ("Open MPI job 1235943425", 2, 0, "192.0.2.2", 25917, "mpi-1235943425"),
        ),
        (
            "openmpi4-rank-1-of-2",
            ("Open MPI job 115933185", 2, 1, "192.0.2.2", 23850, "mpi-115933185"),
        ),
        *(
            (
                f"openmpi5-rank-{rank}-of-2",
                (
                    "Open MPI job prterun-f5n18-3903919@1",
                    *(2, rank, "f5n18", 27322),
                    "mpi-prterun-f5n18-3903919@1",
                ),
            )
            for rank in (0, 1)
        ),
    ],
)
def test_an_agent_that_a_scheduler_started_knows_where_it_is(
    name: str, said: tuple[Any, ...]
) -> None:
    assert place(name) == Placement(*said)


@pytest.mark.parametrize(
    "name",
    [
        "slurm22-salloc-shell",
        "slurm22-batch-script",
        "slurm22-interactive-step",
        "slurm23-interactive-step",
    ],
)
def test_who_is_in_an_allocation_without_being_a_task_is_alone(name: str) -> None:
    assert where(recorded(name), first_host) is None


def test_a_worker_of_another_job_that_launches_its_own_is_alone() -> None:
    assert where(recorded("slurm22-step-of-4", TORCHELASTIC_RUN_ID="job"), first_host) is None


def test_mpirun_is_asked_before_the_slurm_whose_steps_it_uses() -> None:
    daemons_step = recorded("slurm22-step-of-1-in-4")
    found = where(daemons_step | recorded("openmpi4-rank-1-of-2"), first_host)
    assert found == place("openmpi4-rank-1-of-2")


def test_a_process_that_nobody_placed_is_alone() -> None:
    assert where({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}, first_host) is None


@pytest.mark.parametrize(
    ("name", "what", "command"),
    [
        ("slurm22-crowded", "8 tasks on 4 nodes", "srun --ntasks-per-node=1 regrow run"),
        ("openmpi4-crowded", "2 processes on this host", "mpirun --map-by ppr:1:node regrow run"),
    ],
)
def test_several_on_a_node_are_told_how_to_start_one(name: str, what: str, command: str) -> None:
    nodes = place(name).nodes
    assert isinstance(nodes, Untold)
    assert what in nodes
    assert command in nodes
    assert "--standalone" in nodes


def test_a_job_that_is_requeued_has_another_id() -> None:
    assert place("slurm22-step-of-4", SLURM_RESTART_COUNT="2").run_id == "slurm-1.0-2"
    assert place("slurm22-step-of-4", SLURM_RESTART_COUNT="0").run_id == "slurm-1.0"


@pytest.mark.thorough
def test_jobs_that_may_share_a_host_meet_at_ports_of_their_own() -> None:
    ports = {
        place("slurm22-step-of-4", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)).port
        for job in range(7_000_000, 7_000_000 + PORTS // 8)
        for step in range(8)
    }
    assert len(ports) == PORTS
    assert (min(ports), max(ports)) == (FIRST_PORT, 28671)


def test_a_meeting_at_mpiruns_host_needs_an_agent_there() -> None:
    for name, changes in (
        ("openmpi4-rank-0-elsewhere", {}),
        ("openmpi5-rank-0-of-2", {"PMIX_HOSTNAME": "f5n17"}),
    ):
        host = place(name, **changes).host
        assert isinstance(host, Untold)
        assert "not the host of its rank 0: give --rdzv-endpoint HOST:PORT" in host
    silent = place("openmpi4-rank-1-of-2", OMPI_MCA_orte_hnp_uri=None).host
    assert isinstance(silent, Untold)
    assert "does not say on which host mpirun runs: give --rdzv-endpoint HOST:PORT" in silent


def test_an_indexed_job_says_the_rank_and_what_else_is_to_be_given() -> None:
    job = place("kubernetes-indexed-job")
    assert (job.source, job.node_rank, job.run_id) == (
        "Kubernetes Job example-job",
        2,
        "example-job",
    )
    assert isinstance(job.nodes, Untold)
    assert "give --nnodes or PET_NNODES" in job.nodes
    assert isinstance(job.host, Untold)
    assert "PET_RDZV_ENDPOINT, example-job-0.SERVICE" in job.host


def test_a_pod_with_its_hosts_name_does_not_know_its_job() -> None:
    job = place("kubernetes-host-network")
    assert (job.source, job.node_rank, job.run_id) == ("Kubernetes Job", 2, None)
    assert isinstance(job.host, Untold)
    assert "JOB-0.SERVICE" in job.host


def test_a_job_set_says_where_its_first_pod_is() -> None:
    job = place("kubernetes-jobset")
    assert (job.source, job.node_rank) == ("JobSet pytorch", 1)
    assert (job.host, job.port) == ("pytorch-workers-0-0.pytorch", 29400)
    assert job.run_id == "pytorch-2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID='two' is not a number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(
    changes: dict[str, str | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        place("slurm22-step-of-4", **changes)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[009-012],cpu3", "cpu3"),
        ("n[10,9]", "n9"),
        ("r[1-2]n[01-04]", "r1n01"),
        ("host-a.example.com,host-b.example.com", "host-a.example.com"),
    ],
)
def test_lists_of_hosts_have_a_first_one_that_all_agree_on(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_list_of_hosts_that_makes_no_sense_is_shown() -> None:
    told = first_host("n[1-4")
    assert isinstance(told, Untold)
    assert "'n[1-4', makes no sense" in told


def test_without_the_library_the_extra_is_named_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ClusterShell.NodeSet", None)
    host = place("slurm22-step-of-4").host
    assert isinstance(host, Untold)
    assert "pip install 'regrow[slurm]'" in host
    assert place("slurm22-step-of-1-in-4").host == "n1"
