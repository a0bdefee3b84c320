"""The README and the reference pages agree with the program: commands, codes, variables."""

from __future__ import annotations

import re
import shutil
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from helpers.commands import ROOT
from helpers.pages import PAGES, TRAIN, commands, typed
from regrow.cli import exit_codes
from regrow.utils import PortReservation

README = PAGES["README.md"]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def goodput_table(page: str) -> list[list[str]]:
    """Return the rows of the table of steps under faults, without its head."""
    _, _, rest = PAGES[page].partition("| | steps done | share of steps |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_goodput_table_is_the_one_of_the_measurements() -> None:
    table = goodput_table("README.md")
    assert [row[0] for row in table] == ["regrow", "torchrun", "nvidia-resiliency-ext"]
    assert table == goodput_table("docs/measurements.md")
    for _, steps, share, *_ in table:
        done, possible = (int(text.replace(",", "")) for text in steps.split(" of "))
        assert share == f"{done / possible:.1%}"


def test_make_knows_its_targets(tmp_path: Path) -> None:
    # The tests of the Makefile and of the demo run the targets; so does a run of this test.
    for name in ("Makefile", "pyproject.toml", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    named = {target for page in PAGES.values() for target in re.findall(r"`(make [a-z]+)", page)}
    targets = {command for command in commands() if command.startswith("make ")}
    assert targets == {"make demo", "make test"} <= named
    for target in sorted(named):
        ended = typed(f"{target} --dry-run", tmp_path, MAKEFLAGS="", MAKELEVEL="")
        assert ended.code == 0, ended.output


def test_the_installed_project_has_the_command() -> None:
    assert "pip install ." in commands("README.md")  # this test needs it, too
    (command,) = entry_points(group="console_scripts", name="regrow")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command.value == project["scripts"]["regrow"]
    assert command.dist is not None
    assert command.dist.version == project["version"]


# Acts as `srun -N2` on one host that has the addresses of two.
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
def test_the_command_for_slurm_needs_no_address(tmp_path: Path) -> None:
    (command,) = (c for c in commands("README.md") if c.startswith("srun"))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with PortReservation() as reserved:
        job = reserved.port  # so that tests that run at the same time have ports of their own
    small = command.replace("per-node 8", "per-node 1")
    line = f"regrow token ~/job.token; PATH=$PWD/bin:$PATH JOB={job} {small}"
    ended = typed(line, tmp_path)
    assert ended.code == 0, ended.output
    for rank in (0, 1):
        assert f"hello from rank {rank} of 2" in ended.output
    assert ended.output.count("regrow: 2 nodes, node rank 0, endpoint 127.0.0.1:") == 1
    assert "node rank 1" not in ended.output


def test_the_exit_codes_are_those_of_the_program() -> None:
    page = PAGES["docs/reference/exit-codes.md"]
    table = re.findall(r"^\| (\d+)(?: \+ n)? \|", page, flags=re.MULTILINE)
    exits = exit_codes.SUCCEEDED, exit_codes.FAILED, exit_codes.USAGE, exit_codes.INTERNAL
    again = exit_codes.RETRY, exit_codes.STOPPED_EARLY
    assert [int(code) for code in table] == [*exits, *again, exit_codes.SIGNALED]


def test_every_variable_that_is_named_is_read_or_set_somewhere() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = {name for page in PAGES.values() for name in re.findall(r"`(REGROW_[A-Z_]+)", page)}
    assert len(named) > 10
    assert {name for name in named if f'"{name}"' not in sources} == set()
    assert named == set(re.findall(r"`(REGROW_[A-Z_]+)", PAGES["docs/reference/environment.md"]))


def test_every_event_is_in_the_reference_and_nothing_else() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    written = re.compile(
        r'"(regrow\.(?:job|round|rendezvous|attempt|lease|log|timer|heartbeat|inprocess|template|standby|state|chaos|stop)\.[a-z_]+'
        r'|regrow\.worker\.(?:failed|first_step|suspended|resumed|vacated|replaced|not_replaced|accounts))"'
    )
    modules = {
        ".".join(p.relative_to(ROOT / "src").with_suffix("").parts)
        for p in (ROOT / "src").rglob("*.py")
    }
    events = {name for name in written.findall(sources) if name not in modules}
    named = set(re.findall(r"`(regrow\.[a-z]+\.[a-z_]+)`", PAGES["docs/reference/events.md"]))
    assert events == named


def test_every_file_that_the_architecture_names_exists() -> None:
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", PAGES["docs/architecture.md"]))
    assert names
    places = ROOT / "src" / "regrow", ROOT
    assert {n for n in names if not any((place / n).exists() for place in places)} == set()
