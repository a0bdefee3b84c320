"""Every command of the README is run here, in a copy of the project, as a reader would type it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from commands import ROOT, Ended, run

from regrow.cli import _exit
from regrow.utils import PortReservation

README = (ROOT / "README.md").read_text()
COMMANDS = [line[2:] for line in README.splitlines() if line.startswith("$ ")]

# What a reader would have at hand: a script that runs under torchrun.
TRAIN = """\
import os
# In one piece, or the ranks' words would mix.
os.write(1, "hello from rank {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the project and a `train.py` in it."""
    for name in ("Makefile", "pyproject.toml", "README.md", "examples", "benchmarks"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def typed(command: str, cwd: Path, **env: str) -> Ended:
    """Run a line of shell where the virtual environment is active."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(["bash", "-c", command], cwd=cwd, env={"PATH": path, "HOME": str(cwd), **env})


def test_blocks_of_commands_hold_commands_only() -> None:
    blocks = re.findall(r"```(?:console|bash|sh|shell)\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines == [f"$ {command}" for command in COMMANDS]


def test_make_knows_its_targets(copy: Path) -> None:
    # The targets themselves are run by the tests of the Makefile, of the demo, and by whoever
    # runs this test.
    targets = [command for command in COMMANDS if command.startswith("make ")]
    assert targets == ["make demo", "make test"]
    for target in (*targets, "make bench"):
        ended = typed(f"{target} --dry-run", copy, MAKEFLAGS="", MAKELEVEL="")
        assert ended.code == 0, ended.output
        assert ".venv" in ended.output


def test_the_installed_project_has_the_command() -> None:
    assert "pip install ." in COMMANDS  # that it was, is what brought us here
    (command,) = entry_points(group="console_scripts", name="regrow")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command.value == project["scripts"]["regrow"]
    assert command.dist is not None
    assert command.dist.version == project["version"]


@pytest.mark.timeout(200)
def test_the_commands_of_one_node_do_what_they_say(copy: Path) -> None:
    alone = [c for c in COMMANDS if c.startswith("regrow ") and "token" not in c]
    outputs = {}
    for command in alone:
        ended = typed(command, copy)
        assert ended.code == 0, f"{command}\n{ended.output}"
        outputs[command] = ended.output
    for command, output in outputs.items():
        if command.endswith("examples/hang.py"):
            assert "so it was killed by SIGKILL" in " ".join(output.split())
            assert "rank 3 alone stands in load_batch (hang.py:" in output
        elif command.startswith("regrow run"):
            assert "hello from rank 1 of 2" in output, command
        else:
            assert "SUCCEEDED" in output, command
    assert [c.split()[1] for c in alone] == ["run", "run", "run", "events", "events"]


def made_small(command: str, port: int) -> str:
    """A command for hosts with eight devices each, as it is typed on one with a processor."""
    for written, ours in (("node0:29400", f"127.0.0.1:{port}"), ("per-node 8", "per-node 1")):
        command = command.replace(written, ours)
    return command


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_the_command_that_is_typed_on_every_host_makes_one_job(copy: Path) -> None:
    token, command = (c for c in COMMANDS if "token" in c and not c.startswith("srun"))
    assert "--nnodes 2 " in command
    assert typed(token, copy) == Ended(0, "")
    with PortReservation() as reserved, ThreadPoolExecutor(2) as pool:
        here = made_small(command, reserved.port)
        ended = list(pool.map(lambda _: typed(here, copy), range(2)))
    assert [e.code for e in ended] == [0, 0], ended
    said = "".join(e.output for e in ended)
    assert sorted(re.findall("hello from rank . of 2", said)) == [
        "hello from rank 0 of 2",
        "hello from rank 1 of 2",
    ]


# What `srun -N2` does, on one host that has the addresses of two.
SRUN = """\
#!/bin/bash
[[ $1 == --ntasks-per-node=1 ]] && shift || exit 1
export SLURM_JOB_ID=$JOB SLURM_STEP_ID=0 SLURM_STEP_NODELIST=127.0.0.[1-2]
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@"; second=$?
wait $! && exit $second
"""


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_the_command_for_slurm_needs_no_address(copy: Path) -> None:
    (command,) = (c for c in COMMANDS if c.startswith("srun"))
    (copy / "bin").mkdir()
    srun = copy / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with PortReservation() as reserved:
        job = reserved.port  # so that tests that run at the same time have ports of their own
    line = f"regrow token ~/job.token; PATH=$PWD/bin:$PATH JOB={job} {made_small(command, 0)}"
    ended = typed(line, copy)
    assert ended.code == 0, ended.output
    for rank in (0, 1):
        assert f"hello from rank {rank} of 2" in ended.output
        assert f"2 nodes, node rank {rank}, endpoint 127.0.0.1:" in ended.output


def test_every_command_is_run_by_one_of_these_tests() -> None:
    covered = ("make demo", "make test", "pip install .", "regrow ", "srun ")
    assert [c for c in COMMANDS if not c.startswith(covered)] == []


def test_every_file_that_is_linked_exists() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_exit_codes_are_those_of_the_program() -> None:
    table = re.findall(r"^\| (\d+)(?: \+ n)? \|", README, flags=re.MULTILINE)
    values = (_exit.SUCCEEDED, _exit.FAILED, _exit.USAGE, _exit.INTERNAL, _exit.RETRY)
    assert [int(code) for code in table] == [*values, _exit.SIGNALED]


def test_every_variable_that_is_named_is_read_or_set_somewhere() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r"`(REGROW_[A-Z_]+)`", README))
    assert names
    assert {name for name in names if f'"{name}"' not in sources} == set()


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text))
    assert names
    assert {name for name in names if not (ROOT / "src" / "regrow" / name).exists()} == set()
