"""A wrapped function under Open MPI, with the documented command and recorded environments."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.stores.storing import PATIENCE, master_port

TESTS = Path(__file__).parents[1]
DOCUMENTED = (TESTS.parent / "docs" / "guides" / "in-process-restart.md").read_text()
SCRIPT = """
import os
from regrow.inprocess import CallWrapper, Wrapper

@Wrapper()
def train(call: CallWrapper):
    place = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if call.iteration == 0 and place[0] == "1":
        raise ValueError("a mistake")
    return call.iteration, *place

print(*train())
"""

pytestmark = pytest.mark.training


def command() -> list[str]:
    """The command that `mpirun` runs in each process."""
    found = re.search(r"^\$ mpirun .*? (bash -c .*)$", DOCUMENTED, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def environment(name: str, home: Path, port: int) -> dict[str, str]:
    """A recorded environment, with the paths and addresses of this machine."""
    lines = (TESTS / "launch" / "environments" / f"{name}.env").read_text().splitlines()
    theirs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return theirs | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize("release", ["openmpi4", "openmpi5"])
def test_processes_of_mpirun_restart_together(release: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with master_port() as port:
        ranks = [
            subprocess.Popen(
                command(),
                env=environment(f"{release}-rank-{rank}-of-2", tmp_path, port),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert [out for out, _ in outputs] == ["1 0 2\n", "1 1 2\n"], outputs
