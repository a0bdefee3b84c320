"""The placement of an agent by a scheduler, from recorded or assembled environments."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.jobs.environments import recorded
from regrow.launch.placement import (
    FIRST_PORT,
    PORTS,
    NotProvided,
    Placement,
    first_hosts,
    output_rank,
    where,
)

THREE = ("n1", "n2", "n3")


def place(name: str, text: str = "", /, **changes: str | None) -> Placement:
    found = where(recorded(name, **changes), text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "slurm22-step-of-4",
            ("Slurm step 1.0", 4, 2, THREE, FIRST_PORT + 8, "slurm-1.0"),
        ),
        (
            "slurm22-step-in-batch",
            ("Slurm step 2.0", 4, 1, THREE, FIRST_PORT + 16, "slurm-2.0"),
        ),
        ("slurm22-step-of-1-in-4", ("Slurm step 2.1", 1, 0, ("n1",), FIRST_PORT + 17, "slurm-2.1")),
        ("slurm22-array", ("Slurm step 3.0", 2, 1, ("n3", "n4"), FIRST_PORT + 24, "slurm-3.0")),
        ("slurm22-het", ("Slurm step 9.0", 3, 2, THREE, FIRST_PORT + 72, "slurm-9.0")),
        (
            "slurm24-shell-in-a-step",
            ("Slurm step 22902023.0", 1, 0, ("c05",), 22584, "slurm-22902023.0"),
        ),
        (
            "openmpi4-rank-0-of-2",
            ("Open MPI job 1235943425", 2, 0, ("192.0.2.2",), 25917, "mpi-1235943425"),
        ),
        (
            "openmpi4-rank-1-of-2",
            ("Open MPI job 115933185", 2, 1, ("192.0.2.2",), 23850, "mpi-115933185"),
        ),
        *(
            (
                f"openmpi5-rank-{rank}-of-2",
                (
                    "Open MPI job prterun-f5n18-3903919@1",
                    *(2, rank, ("f5n18",), 27322),
                    "mpi-prterun-f5n18-3903919@1",
                ),
            )
            for rank in (0, 1)
        ),
    ],
)
def test_an_agent_that_a_scheduler_started_knows_where_it_is(
    name: str, expected: tuple[Any, ...]
) -> None:
    assert place(name) == Placement(*expected)


@pytest.mark.parametrize(
    "name",
    [
        "slurm22-salloc-shell",
        "slurm22-batch-script",
        "slurm22-interactive-step",
        "slurm23-interactive-step",
    ],
)
def test_a_process_in_an_allocation_that_is_no_task_has_no_placement(name: str) -> None:
    assert where(recorded(name)) is None


def test_a_worker_of_another_job_that_launches_its_own_is_alone() -> None:
    assert where(recorded("slurm22-step-of-4", TORCHELASTIC_RUN_ID="job")) is None


def test_mpirun_has_priority_over_the_slurm_steps_that_it_uses() -> None:
    daemons_step = recorded("slurm22-step-of-1-in-4")
    found = where(daemons_step | recorded("openmpi4-rank-1-of-2"))
    assert found == place("openmpi4-rank-1-of-2")


def test_a_process_without_a_scheduler_has_no_placement() -> None:
    assert where({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("name", "what", "command"),
    [
        ("slurm22-crowded", "8 tasks on 4 nodes", "srun --ntasks-per-node=1 regrow run"),
        ("openmpi4-crowded", "2 processes on this host", "mpirun --map-by ppr:1:node regrow run"),
    ],
)
def test_several_agents_on_a_node_get_the_command_to_start_one(
    name: str, what: str, command: str
) -> None:
    nodes = place(name).nodes
    assert isinstance(nodes, NotProvided)
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
        host = place(name, **changes).hosts
        assert isinstance(host, NotProvided)
        assert "rank 0 runs on another host: give --rdzv-endpoint HOST:PORT" in host
    silent = place("openmpi4-rank-1-of-2", OMPI_MCA_orte_hnp_uri=None).hosts
    assert isinstance(silent, NotProvided)
    assert "does not provide the host of mpirun: give --rdzv-endpoint HOST:PORT" in silent


def test_an_indexed_job_provides_the_rank_and_errors_name_the_missing_settings() -> None:
    job = place("kubernetes-indexed-job")
    assert (job.source, job.node_rank, job.run_id) == (
        "Kubernetes Job example-job",
        2,
        "example-job",
    )
    assert isinstance(job.nodes, NotProvided)
    assert "set --nnodes or PET_NNODES" in job.nodes
    assert isinstance(job.hosts, NotProvided)
    assert "--rdzv-endpoint example-job-0.SERVICE, or PET_RDZV_ENDPOINT" in job.hosts


POD_HOSTS = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-mcastprefix
10.244.1.5\texample-job-2.headless-svc.default.svc.cluster.local\texample-job-2
"""
"""`/etc/hosts` of a pod, as the kubelet writes it (`managedHostsFileContent`)."""


def test_an_indexed_job_with_a_headless_service_provides_the_hosts_of_its_first_pods() -> None:
    job = place("kubernetes-indexed-job", POD_HOSTS)
    assert job.run_id == "example-job"
    assert job.hosts == tuple(
        f"example-job-{pod}.headless-svc.default.svc.cluster.local" for pod in range(3)
    )


@pytest.mark.parametrize("text", ["", "10.244.1.5\texample-job-2\n", "# x example-job-2.svc", "\0"])
def test_an_indexed_job_without_a_service_provides_no_hosts(text: str) -> None:
    assert isinstance(place("kubernetes-indexed-job", text).hosts, NotProvided)


def test_a_pod_with_its_full_name_as_host_name_is_placed_as_with_its_short_name() -> None:
    full = "example-job-2.headless-svc.default.svc.cluster.local"
    named = place("kubernetes-indexed-job", POD_HOSTS, HOSTNAME=full)
    assert named == place("kubernetes-indexed-job", POD_HOSTS)


@pytest.mark.parametrize("host", ["ip-10-0-0-2.ec2.internal", "ip-10-0-0-7"])
def test_a_pod_with_its_hosts_name_does_not_know_its_job(host: str) -> None:
    job = place("kubernetes-host-network", HOSTNAME=host)
    assert (job.source, job.node_rank, job.run_id) == ("Kubernetes Job", 2, None)
    assert isinstance(job.hosts, NotProvided)
    assert "JOB-0.SERVICE" in job.hosts


@pytest.mark.parametrize(
    ("replicas", "pods"),
    [("1", "0-0 0-1 0-2"), ("3", "0-0 1-0 2-0"), ("4", "0-0 1-0 2-0"), ("2", "0-0"), (None, "0-0")],
)
def test_a_job_set_provides_the_hosts_of_its_first_pods(replicas: str | None, pods: str) -> None:
    job = place("kubernetes-jobset", REPLICATED_JOB_REPLICAS=replicas)
    assert (job.source, job.node_rank) == ("JobSet pytorch", 1)
    assert job.hosts == tuple(f"pytorch-workers-{pod}.pytorch" for pod in pods.split())
    assert job.port == 29400
    assert job.run_id == "pytorch-2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID='two' is not a whole number"),
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
        ("n[1-4]", "n1 n2 n3"),
        ("gpu[009-012],cpu3", "cpu3 gpu009 gpu010"),
        ("n[10,9]", "n9 n10"),
        ("r[1-2]n[01-04]", "r1n01 r1n02 r1n03"),
        ("host-a.example.com,host-b.example.com", "host-a.example.com host-b.example.com"),
    ],
)
def test_lists_of_hosts_have_first_ones_that_all_agree_on(hosts: str, first: str) -> None:
    assert first_hosts(hosts) == tuple(first.split())


def test_a_list_of_hosts_that_makes_no_sense_is_shown() -> None:
    error = first_hosts("n[1-4")
    assert isinstance(error, NotProvided)
    assert "cannot parse Slurm's list of hosts, 'n[1-4'" in error


def test_without_the_library_the_extra_is_named_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ClusterShell.NodeSet", None)
    hosts = place("slurm22-step-of-4").hosts
    assert isinstance(hosts, NotProvided)
    assert "pip install ClusterShell" in hosts
    assert place("slurm22-step-of-1-in-4").hosts == ("n1",)


@pytest.mark.parametrize(
    ("name", "changes", "rank"),
    [
        ("slurm22-step-of-4", {}, 2),
        ("slurm22-step-in-batch", {}, 1),
        ("slurm22-het", {}, 2),
        ("slurm22-crowded", {"SLURM_PROCID": "3"}, 3),
        ("slurm22-step-of-1-in-4", {}, None),
        ("slurm22-batch-script", {}, None),
        ("slurm22-salloc-shell", {}, None),
        ("openmpi4-rank-1-of-2", {}, 1),
        ("openmpi5-rank-0-of-2", {}, 0),
        ("kubernetes-indexed-job", {}, None),  # each pod has a log of its own
        ("slurm22-step-of-4", {"TORCHELASTIC_RUN_ID": "outer"}, None),  # started by a worker
        ("slurm22-step-of-4", {"SLURM_PROCID": None}, None),
        ("slurm22-step-of-4", {"SLURM_STEP_NUM_TASKS": "many"}, None),
    ],
)
def test_agents_with_a_common_output_know_their_rank(
    name: str, changes: dict[str, str | None], rank: int | None
) -> None:
    assert output_rank(recorded(name, **changes)) == rank
