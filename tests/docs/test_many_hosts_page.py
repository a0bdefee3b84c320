"""The pages about many hosts agree with the command: manifests, scripts, keys."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.commands import run
from helpers.pages import PAGES, blocks, commands
from regrow.cli.args.fill_in import fill_in
from regrow.cli.args.parser import GivenFlags, build_parser
from regrow.rendezvous.utils import unknown_config_keys

MANY, SLURM, KUBERNETES = (
    f"docs/guides/{name}.md" for name in ("many-hosts", "slurm", "kubernetes")
)
SCRIPT = next(block.text for block in blocks("bash", SLURM))
MANIFESTS = [m for block in blocks("yaml", KUBERNETES) for m in yaml.safe_load_all(block.text)]


def flags(command: str) -> GivenFlags:
    """Return the arguments of the `regrow run` in a command."""
    words = shlex.split(command)
    args = build_parser().parse_args(words[words.index("run") + 1 :])
    assert isinstance(args, GivenFlags)
    assert args.training_script == "train.py"
    return args


def containers(found: Any) -> list[dict[str, Any]]:
    """The containers of a manifest, at any depth."""
    if isinstance(found, list):
        return [c for item in found for c in containers(item)]
    if not isinstance(found, dict):
        return []
    below = [c for item in found.values() for c in containers(item)]
    return [*found.get("containers", []), *below]


def test_every_backend_but_the_fixed_one_has_a_command() -> None:
    runs = [command for command in commands(MANY) if "regrow run" in command]
    assert {flags(c).rdzv_backend for c in runs} >= {"c10d", "etcd", "file"}


def test_the_script_for_slurm_leaves_the_requeue_to_the_agents(tmp_path: Path) -> None:
    tools = {
        "srun": '#!/bin/bash\necho "$@" > asked\nexit 143\n',
        "scontrol": '#!/bin/bash\necho "$@" > requeued\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234"}
    ended = run(["bash", "-c", SCRIPT], cwd=tmp_path, env=environ)
    assert ended.code == 143, ended.output
    assert not (tmp_path / "requeued").exists()
    args = flags((tmp_path / "asked").read_text())
    assert (args.nnodes, args.max_restarts, args.shutdown_timeout) == ("3:4", 3, 100)
    assert args.requeue


@pytest.mark.parametrize(
    ("kind", "pods", "endpoint", "run_id"),
    [
        ("Job", ["train-{}"], "train-{}.train.default.svc.cluster.local:29400", "uid-of-the-job"),
        ("JobSet", ["pytorch-workers-0-{}"], "pytorch-workers-0-{}.pytorch:29400", "pytorch-1"),
    ],
)
def test_a_manifest_makes_its_pods_one_job(
    kind: str,
    pods: list[str],
    endpoint: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (manifest,) = (m for m in MANIFESTS if m["kind"] == kind)
    (container,) = containers(manifest)
    labels = {
        "batch.kubernetes.io/controller-uid": "uid-of-the-job",
        "jobset.sigs.k8s.io/jobset-name": "pytorch",
        "jobset.sigs.k8s.io/replicatedjob-name": "workers",
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        "jobset.sigs.k8s.io/restart-attempt": "1",
    }
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            path = re.fullmatch(r"metadata.labels\['(.*)'\]", source["fieldRef"]["fieldPath"])
            assert path is not None
            value = labels[path[1]]
        else:
            value = "the token" if "secretKeyRef" in source else variable["value"]
        monkeypatch.setenv(variable["name"], value)
    assert container["command"][:2] == ["regrow", "run"]
    for index in (0, 3):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setenv("HOSTNAME", pods[0].format(index))
        args = flags(shlex.join(container["command"]))
        pod, hosts_file = pods[0].format(index), tmp_path / "hosts"
        hosts_file.write_text(f"10.244.1.5\t{pod}.train.default.svc.cluster.local\t{pod}\n")
        fill_in(args, os.environ, hosts_file)
        assert (args.nnodes, args.node_rank, args.rdzv_backend) == ("4", index, "c10d")
        assert args.rdzv_endpoint == ",".join(map(endpoint.format, range(3)))
        assert args.rdzv_id == run_id


def test_the_pods_of_the_indexed_job_find_each_other_and_fail_for_good_reasons() -> None:
    service, job = (m for m in MANIFESTS if m["kind"] in ("Service", "Job"))
    name = job["metadata"]["name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 70]


def test_the_settings_are_those_that_the_rendezvous_knows() -> None:
    table = PAGES[MANY].partition("## Settings")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall("`(.*?)`", cell)]
    assert len(keys) > 10
    assert unknown_config_keys("c10d", keys) == []
