"""Only settings that the command line omits are taken from the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.stories import without_times
from regrow import run
from regrow.cli import main
from regrow.launch import LaunchConfig

THREE = "n1:20488,n2:20488,n3:20488"
ENVIRONMENTS = Path(__file__).parents[1] / "launch" / "environments"


class Started:
    """The launch configurations of `regrow run`, and its output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        self.configs: list[LaunchConfig] = []

    def __call__(self, environment: str, flags: str, **variables: str) -> str:
        """Run the command in a recorded environment; return its output without times."""
        lines = (ENVIRONMENTS / f"{environment}.env").read_text().splitlines()
        with self._monkeypatch.context() as patch:
            for line in lines:
                if not line.startswith("#"):
                    patch.setenv(*line.split("=", 1))
            for name, value in variables.items():
                patch.setenv(name, value)
            self.code = main(["run", *flags.split(), "train.py"])
        return without_times(self._capfd.readouterr().err)

    @property
    def config(self) -> LaunchConfig:
        return self.configs[-1]

    @property
    def meeting(self) -> tuple[str, str, object]:
        return (
            self.config.rdzv_backend,
            self.config.rdzv_endpoint,
            self.config.rdzv_configs.get("rank"),
        )


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Started:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    fake = Started(monkeypatch, capfd)

    def launch(config: LaunchConfig, entrypoint: object) -> object:
        fake.configs.append(config)
        return lambda *_: None

    monkeypatch.setattr(run, "elastic_launch", launch)
    return fake


def test_a_task_of_slurm_needs_no_flag_and_prints_its_placement(started: Started) -> None:
    output = started("slurm22-step-of-4", "", REGROW_VERBOSE="1")
    assert output == f"regrow: 4 nodes, node rank 2, endpoints {THREE} from Slurm step 1.0"
    assert (started.config.min_nodes, started.config.max_nodes) == (4, 4)
    assert started.meeting == ("c10d", THREE, 2)
    assert started.config.run_id == "slurm-1.0"


def test_a_process_of_open_mpi_needs_no_flag(started: Started) -> None:
    output = started("openmpi5-rank-1-of-2", "", REGROW_VERBOSE="1")
    assert output.startswith(
        "regrow: 2 nodes, node rank 1, endpoint f5n18:27322 from Open MPI job "
    )
    assert started.meeting == ("c10d", "f5n18:27322", 1)


def test_of_agents_with_a_common_output_only_the_first_prints_its_placement(
    started: Started,
) -> None:
    first = {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    output = started("slurm22-step-of-4", "", **first)
    assert output == f"regrow: 4 nodes, node rank 0, endpoints {THREE} from Slurm step 1.0"
    assert started("slurm22-step-of-4", "") == ""


def test_a_pod_takes_from_variables_what_its_scheduler_does_not_provide(started: Started) -> None:
    output = started("kubernetes-jobset", "")
    assert output.startswith(
        "regrow: node rank 1, endpoints pytorch-workers-0-0.pytorch:29400,pytorch-workers-0-1."
    )
    assert started.config.min_nodes == 4
    output = started("kubernetes-indexed-job", "", PET_NNODES="3", PET_RDZV_ENDPOINT="job-0.svc")
    assert output == "regrow: node rank 2 from Kubernetes Job example-job"
    assert started.meeting == ("c10d", "job-0.svc", 2)


@pytest.mark.parametrize(
    ("flags", "meeting", "nodes"),
    [
        ("--nnodes 2:4", ("c10d", THREE, 2), (2, 4)),
        ("--nnodes 3", ("c10d", THREE, 2), (3, 3)),
        ("--nnodes 1:4", ("c10d", "n1:20488", 2), (1, 4)),
        ("--node-rank 0", ("c10d", THREE, 0), (4, 4)),
        ("--master-port 999", ("c10d", "n1:999,n2:999,n3:999", 2), (4, 4)),
        ("--rdzv-backend static", ("static", "n1:20488", 2), (4, 4)),
        ("--rdzv-endpoint x:1", ("c10d", "x:1", 2), (4, 4)),
        ("--rdzv-backend static --rdzv-endpoint x:1", ("static", "x:1", 2), (4, 4)),
        ("--rdzv-backend etcd --rdzv-endpoint e:1", ("etcd", "e:1", 2), (4, 4)),
        ("--rdzv-backend file", ("file", "", 2), (4, 4)),
        ("--master-addr x", ("static", "x:29500", 2), (4, 4)),
    ],
)
def test_the_command_line_wins(
    flags: str, meeting: object, nodes: object, started: Started
) -> None:
    started("slurm22-step-of-4", flags)
    assert started.meeting == meeting
    assert (started.config.min_nodes, started.config.max_nodes) == nodes


def test_several_agents_on_a_host_are_what_was_asked_for_if_there_is_room_for_all(
    started: Started,
) -> None:
    started("slurm22-crowded", "--nnodes 4:8 --rdzv-endpoint x:1")
    assert (started.config.min_nodes, started.config.max_nodes) == (4, 8)
    started("openmpi4-crowded", "--nnodes 2 --rdzv-endpoint x:1")
    assert started.meeting == ("c10d", "x:1", 0)


def test_an_id_that_was_given_is_kept(started: Started) -> None:
    started("slurm22-step-of-4", "--rdzv-id mine")
    assert started.config.run_id == "mine"


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ("slurm22-step-of-4", "--standalone"),
        ("slurm22-step-of-4", "--nnodes 1"),
        ("slurm22-crowded", "--standalone"),
        ("slurm22-step-of-1-in-4", ""),
        ("slurm22-salloc-shell", ""),
        ("slurm22-batch-script", ""),
        ("slurm22-interactive-step", ""),
        ("slurm24-shell-in-a-step", "--rdzv-id mine"),
        ("openmpi4-crowded", "--standalone"),
    ],
)
def test_a_job_of_one_node_takes_nothing(environment: str, flags: str, started: Started) -> None:
    assert started(environment, flags) == ""
    assert started.code == 0
    assert started.meeting == ("c10d", "localhost:0", None)
    assert started.config.max_nodes == 1
    assert not started.config.run_id.startswith("slurm")


def test_settings_that_are_all_given_print_no_placement(started: Started) -> None:
    assert started("kubeflow-trainer", "--nproc-per-node 1") == ""
    assert started.meeting == ("static", "pytorch-node-0-0.pytorch:29400", 1)
    flags = "--nnodes 8 --node-rank 5 --rdzv-backend c10d --rdzv-endpoint n1:1 --rdzv-id mine"
    assert started("slurm22-crowded", flags) == ""
    assert started.meeting == ("c10d", "n1:1", 5)


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ("slurm22-crowded", "", "has 8 tasks on 4 nodes"),
        ("slurm22-crowded", "--nnodes 4", "the 8 agents that were started: Slurm step 2.2 has"),
        (
            "slurm22-step-of-4",
            "--nnodes 6:8",
            "--nnodes 6:8 needs more nodes than Slurm step 1.0 provides (4)",
        ),
        ("kubernetes-indexed-job", "", "its number of pods: set --nnodes or PET_NNODES"),
        (
            "kubernetes-indexed-job",
            "--nnodes 3",
            "--rdzv-endpoint example-job-0.SERVICE, or PET_RDZV_ENDPOINT",
        ),
        ("openmpi4-rank-0-elsewhere", "", "rank 0 runs on another host: give --rdzv-endpoint"),
    ],
)
def test_a_missing_value_is_requested_in_one_line(
    environment: str, flags: str, words: str, started: Started
) -> None:
    output = started(environment, flags)
    assert started.code == 2
    assert words in output
    assert len(output.splitlines()) == 1
    assert not started.configs
