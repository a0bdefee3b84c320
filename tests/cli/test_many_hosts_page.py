"""What docs/many-hosts.md says is what the command does: commands, manifests, keys, codes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, run

from regrow.cli._parser import Said, build_parser
from regrow.cli._placement import fill_in
from regrow.rendezvous.utils import unknown_config_keys

PAGE = (ROOT / "docs" / "many-hosts.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [line[2:] for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
(SCRIPT,) = (block for kind, block in BLOCKS if kind == "bash")
MANIFESTS = [m for kind, block in BLOCKS if kind == "yaml" for m in yaml.safe_load_all(block)]


def flags(command: str) -> Said:
    """What the `regrow run` of a command is told."""
    words = shlex.split(command)
    args = build_parser().parse_args(words[words.index("run") + 1 :])
    assert isinstance(args, Said)
    assert args.training_script == "train.py"
    return args


def containers(found: Any) -> list[dict[str, Any]]:
    """The containers of a manifest, however deep they are in it."""
    if isinstance(found, list):
        return [c for item in found for c in containers(item)]
    if not isinstance(found, dict):
        return []
    below = [c for item in found.values() for c in containers(item)]
    return [*found.get("containers", []), *below]


def test_every_command_is_one_that_regrow_understands() -> None:
    runs = [command for command in COMMANDS if "regrow run" in command]
    assert len(runs) == len(COMMANDS) - 1
    for command in runs:
        flags(command)
    assert {flags(c).rdzv_backend for c in runs} >= {"c10d", "etcd", "file"}


@pytest.mark.parametrize(
    ("codes", "requeued"), [("0 0", False), ("0 1", False), ("75 143", True), ("75 75", True)]
)
def test_the_script_for_slurm_requeues_what_may_succeed_when_run_again(
    codes: str, requeued: bool, tmp_path: Path
) -> None:
    tools = {
        "srun": f'#!/bin/bash\necho "$@" > asked\nprintf "%s\\n" {codes} | sort -n | tail -1 > rc\n'
        "exit $(cat rc)\n",
        "scontrol": '#!/bin/bash\necho "$@" > requeued\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234"}
    ended = run(["bash", "-c", SCRIPT], cwd=tmp_path, env=environ)
    assert ended.code == max(map(int, codes.split())), ended.output
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 1234\n"
    args = flags((tmp_path / "asked").read_text())
    assert (args.nnodes, args.max_restarts, args.shutdown_timeout) == ("3:4", 3, 100)


@pytest.mark.parametrize(
    ("kind", "pods", "endpoint", "run_id"),
    [
        ("Job", ["train-{}"], "train-0.train", "uid-of-the-job"),
        ("JobSet", ["pytorch-workers-0-{}"], "pytorch-workers-0-0.pytorch:29400", "pytorch-1"),
    ],
)
def test_a_manifest_makes_its_pods_one_job(
    kind: str, pods: list[str], endpoint: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (manifest,) = (m for m in MANIFESTS if m["kind"] == kind)
    (container,) = containers(manifest)
    labels = {
        "batch.kubernetes.io/controller-uid": "uid-of-the-job",
        "jobset.sigs.k8s.io/jobset-name": "pytorch",
        "jobset.sigs.k8s.io/replicatedjob-name": "workers",
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
        fill_in(args, os.environ)
        assert (args.nnodes, args.node_rank, args.rdzv_backend) == ("4", index, "c10d")
        assert (args.rdzv_endpoint, args.rdzv_id) == (endpoint, run_id)


def test_the_pods_of_the_indexed_job_find_each_other_and_fail_for_good_reasons() -> None:
    service, job = (m for m in MANIFESTS if m["kind"] in ("Service", "Job"))
    name = job["metadata"]["name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 70]


def test_the_settings_are_those_that_the_rendezvous_knows() -> None:
    table = PAGE.partition("## Settings")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall("`(.*?)`", cell)]
    assert len(keys) > 10
    assert unknown_config_keys("c10d", keys) == []


def test_every_variable_that_is_named_is_read_or_set_somewhere() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r"`(REGROW_[A-Z_]+)`", PAGE))
    assert len(names) > 4
    assert {name for name in names if f'"{name}"' not in sources} == set()


def test_every_place_that_is_linked_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, heading = target.partition("#")
        if target.startswith("https://"):
            continue
        text = (ROOT / "docs" / file).read_text() if file else PAGE
        headings = [line.strip("# ").lower() for line in text.splitlines() if line[:1] == "#"]
        assert not heading or heading.replace("-", " ") in headings, target
