"""`config_from_args` and that of the installed torchrun parse command lines alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regrow.cli.args.flags import FLAGS

ASK = Path(__file__).with_name("ask_torchrun.py")

# Flags that torchrun lacks.
OWN = {flag.attribute for flag in FLAGS if flag.added}

# Words of a command line; {tmp} is a folder, {file} a file.
COMMAND_LINES = """
train.py
train.py --lr 0.1 --nnodes 3
--nnodes 4 train.py
--nnodes=2:4 train.py
--nnodes 1:2:3 train.py
--nnodes abc train.py
--nnodes 0 train.py
--nnodes 3:2 train.py
--nnodes -1 train.py
--nproc-per-node 8 train.py
--nproc_per_node=cpu train.py
--nproc-per-node many train.py
--nproc-per-node 1.5 train.py
--max-restarts 3 train.py
--max-restarts -1 train.py
--max-restarts x train.py
--monitor-interval 5 train.py
--start-method fork train.py
--start-method clone train.py
--rdzv-backend c10d --rdzv-endpoint localhost:1234 --rdzv-id job train.py
--rdzv_backend c10d --rdzv_endpoint localhost:1234 --rdzv_id job train.py
--rdzv-backend c10d --node-rank 3 train.py
--rdzv-backend c10d --rdzv-conf join_timeout=10,last_call_timeout=5 train.py
--rdzv-backend etcd --rdzv-endpoint host:2379 --rdzv-conf etcd_prefix=/a train.py
--rdzv-conf timeout=7 train.py
--rdzv-conf timeout train.py
--rdzv-conf =7 train.py
--rdzv-conf timeout= train.py
--node-rank 1 --nnodes 2 --master-addr 10.0.0.1 --master-port 2950 train.py
--master-addr [::1] --master-port 1 train.py
--rdzv-endpoint host:99 train.py
--local-addr 10.0.0.2 train.py
--role trainer --event-log-handler console train.py
-m package.module --flag
--module package.module
--no-python ./run.sh a b
--no-python -m train.py
--run-path /abs/train.py a b
--run-path --no-python /abs/train.py
--log-dir {tmp}/logs train.py
--log-dir {file} train.py
--log-dir /dev/null train.py
-r 3 -t 1 train.py
--redirects 0:1,1:2 --tee 1:3 train.py
--redirects 4 train.py
--tee 0:x train.py
--local-ranks-filter 0,2 train.py
--local_ranks_filter 0,x train.py
--local-ranks-filter , train.py
--duplicate-stdout-filters a,b,,c --duplicate_stderr_filters x train.py
--logs-specs nobody train.py
--numa-binding node train.py
--numa-binding core-complex train.py
--numa-binding x train.py
--signals-to-handle SIGTERM,SIGUSR1 train.py
--shutdown-timeout 5 train.py
--shutdown-timeout 0 train.py
--shutdown-timeout -1 train.py
--virtual-local-rank --nproc-per-node 2 train.py
--unknown train.py
--standalone train.py
--rdzv x train.py
--max 2 --mon 1 --sta train.py
--nproc-per 2 --master-a host --master-p 1 train.py ${local_rank}
--
""".strip().splitlines()

ENVIRONMENTS: list[dict[str, str]] = [
    {"PET_NNODES": "2:3"},
    {"PET_NPROC_PER_NODE": "4", "OMP_NUM_THREADS": "3"},
    {"PET_NPROC_PER_NODE": "4"},
    {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "host:1", "PET_RDZV_ID": "id"},
    {"PET_RDZV_CONF": "a=1"},
    {"PET_MAX_RESTARTS": "2", "PET_MONITOR_INTERVAL": "9", "PET_START_METHOD": "fork"},
    {"PET_MAX_RESTARTS": "two"},
    {"PET_MODULE": "1"},
    {"PET_NO_PYTHON": "1"},
    {"PET_RUN_PATH": "1"},
    {"PET_RUN_PATH": "0"},
    {"PET_STANDALONE": "maybe"},
    {"PET_REDIRECTS": "3", "PET_TEE": "1"},
    {"PET_DUPLICATE_STDOUT_FILTERS": "a,,b,c"},
    {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "host", "PET_MASTER_PORT": "7"},
    {"PET_SHUTDOWN_TIMEOUT": "3", "PET_SIGNALS_TO_HANDLE": "SIGUSR2"},
    {"PET_LOGS_SPECS": "nobody", "PET_NUMA_BINDING": "x"},
    {"PET_VIRTUAL_LOCAL_RANK": "1", "PET_LOCAL_ADDR": "me", "PET_ROLE": "r"},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}: "},
    {"PYTHON_EXEC": "/opt/python"},
]


def ask(module: str, questions: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Ask in another process, so that this one neither loads torch nor gets OMP's variables."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "OMP_", "TORCH"))
    } | {"TMPDIR": str(folder)}
    run = subprocess.run(
        [sys.executable, str(ASK), module],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


@pytest.mark.training
@pytest.mark.timeout(120)
def test_flags_and_command_lines_mean_what_they_mean_to_torchrun(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = {"{tmp}": str(tmp_path), "{file}": str(tmp_path / "file")}
    questions: list[dict[str, Any]] = []
    for line in COMMAND_LINES:
        for place, path in places.items():
            line = line.replace(place, path)
        questions.append({"argv": line.split(), "env": {}})
    questions += [{"argv": ["train.py", "-x"], "env": env} for env in ENVIRONMENTS]
    questions.append({"argv": ["--max-restarts", "5", "t"], "env": {"PET_MAX_RESTARTS": "2"}})

    theirs, ours = (
        ask("torch.distributed.run", questions, tmp_path),
        ask("regrow.run", questions, tmp_path),
    )

    assert not OWN & {row["dest"] for row in theirs["table"].values()}
    table = {spelling: row for spelling, row in ours["table"].items() if row["dest"] not in OWN}
    assert table == theirs["table"]
    for abbreviation, flags in theirs["abbreviations"].items():
        if len(flags) == 1:
            assert ours["abbreviations"][abbreviation] == flags, abbreviation
    kinds = Counter(next(iter(answer)) for answer in theirs["answers"])
    assert kinds["command"] > 50, kinds
    assert kinds["error"] > 20, kinds
    assert kinds["exit"] > 5, kinds
    for question, answer, expected in zip(
        questions, ours["answers"], theirs["answers"], strict=True
    ):
        if question["argv"][:2] == ["--rdzv-backend", "c10d"] and "--node-rank" in question["argv"]:
            # torchrun warns and drops the rank; regrow treats it as the rank that the node prefers.
            expected["config"]["rdzv_configs"]["rank"] = 3
        assert answer == expected, question


def test_an_abbreviation_of_both_spellings_of_a_flag_is_not_ambiguous(tmp_path: Path) -> None:
    """A difference from torchrun before Python 3.12.8, which refuses `--nproc`."""
    question = {"argv": ["--nproc", "3", "t"], "env": {}}
    (answer,) = ask("regrow.run", [question], tmp_path)["answers"]
    assert answer["config"]["nproc_per_node"] == 3
