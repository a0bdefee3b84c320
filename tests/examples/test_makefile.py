"""The Makefile on machines that are not like ours: `python3` is a script that plays them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from commands import ROOT, Ended, run

# A python3 that fails where FAIL_ON appears in its arguments; asked for an environment it makes
# one whose python does the same. Whatever is run is noted in `calls`.
FAKE_PYTHON = """\
#!/bin/sh
echo "$*" >> {calls}
case "$*" in *"$FAIL_ON"*) exit 1;; esac
case "$1 $2" in
  "-V ") echo "Python 3.9.1";;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile and a project file in it."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python3"
    python.write_text(FAKE_PYTHON.format(calls=tmp_path / "calls"))
    python.chmod(0o755)
    return tmp_path


def make(project: Path, target: str, fail_on: str = "nothing at all") -> Ended:
    """Run `make target` in `project` with the fake python3; forget what was run before."""
    (project / "calls").write_text("")
    path = f"{project}:{os.environ['PATH']}"
    env = {"PATH": path, "FAIL_ON": fail_on, "MAKEFLAGS": "", "MAKELEVEL": ""}
    return run(["make", target], cwd=project, env=env)


@pytest.mark.parametrize(
    ("fail_on", "said"),
    [
        ("version_info", "needs Python 3.11 or newer, 'python3' is 3.9.1"),
        ("ensurepip", "apt-get install python3-venv"),
    ],
)
@pytest.mark.parametrize("target", ["test", "demo"])
def test_a_python_that_will_not_do_is_said_before_anything_is_made(
    project: Path, target: str, fail_on: str, said: str
) -> None:
    ended = make(project, target, fail_on)
    assert ended.code != 0
    assert said in ended.output
    assert not list(project.glob(".venv*"))


def test_a_python_that_is_not_there_is_named(project: Path) -> None:
    ended = run(["make", "test", "PYTHON=python9"], cwd=project, env={"MAKEFLAGS": ""})
    assert ended.code != 0
    assert "'python9' not found" in ended.output


@pytest.mark.parametrize(
    ("target", "extra", "last"),
    [("test", ".[dev]", "-m pytest -n 7"), ("demo", ".[demo]", "examples/demo.py")],
)
def test_a_second_run_uses_the_environment_that_the_first_has_made(
    project: Path, target: str, extra: str, last: str
) -> None:
    assert make(project, target).code == 0
    calls = (project / "calls").read_text()
    assert extra in calls
    assert calls.splitlines()[-1].startswith(last)

    assert make(project, target).code == 0
    assert [line.startswith(last) for line in (project / "calls").read_text().splitlines()] == [
        True
    ]


def test_an_interrupted_installation_is_taken_up_again(project: Path) -> None:
    assert make(project, "test", fail_on="pip install").code != 0
    assert make(project, "test").code == 0
    assert "pip install" in (project / "calls").read_text()


def test_a_suite_that_cannot_be_collected_is_run_to_say_so(project: Path) -> None:
    assert make(project, "test", fail_on="--collect-only").code == 0
    assert make(project, "test").code == 0
    calls = (project / "calls").read_text().splitlines()
    assert [call.startswith("-m pytest") for call in calls] == [True, True]
    assert "--collect-only" in calls[0]


def test_new_dependencies_are_installed(project: Path) -> None:
    assert make(project, "test").code == 0
    made = (project / ".venv" / ".installed").stat().st_mtime_ns
    os.utime(project / "pyproject.toml", ns=(made + 10**9, made + 10**9))
    assert make(project, "test").code == 0
    assert "pip install" in (project / "calls").read_text()


def test_clean_removes_the_environments(project: Path) -> None:
    assert make(project, "test").code == 0
    assert make(project, "demo").code == 0
    assert make(project, "clean").code == 0
    assert not list(project.glob(".venv*"))
