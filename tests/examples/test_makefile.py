"""The Makefile and `.ci/run` on other machines: scripts act as their Pythons."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from helpers.commands import ROOT, Ended, run

# A python3 of the version VERSION that fails if FAIL_ON is in its arguments. It creates
# environments with a python that does the same. All calls are recorded in `calls`.
FAKE_PYTHON = """\
#!/bin/sh
echo "$*" >> {calls}
case "$*" in *"$FAIL_ON"*) exit 1;; esac
case "$*" in *'print("%d.%d"'*) echo "{version}";; esac
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
    play_python(tmp_path, "python3", "3.11")
    return tmp_path


def play_python(project: Path, name: str, version: str) -> None:
    """Make a script in `project` that acts as a Python."""
    write_script(project / name, FAKE_PYTHON.format(calls=project / "calls", version=version))


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make(
    project: Path, target: str, fail_on: str = "nothing at all", python: str = "python3"
) -> Ended:
    """Run `make target` in `project` with a fake Python; forget what was run before."""
    (project / "calls").write_text("")
    path = f"{project}:{os.environ['PATH']}"
    env = {"PATH": path, "FAIL_ON": fail_on, "MAKEFLAGS": "", "MAKELEVEL": "", "PYTHON": python}
    return run(["make", target], cwd=project, env=env)


@pytest.mark.parametrize(
    ("fail_on", "message"),
    [
        ("version_info", "needs Python 3.11 or newer, 'python3' is 3.9.1"),
        ("ensurepip", "apt-get install python3-venv"),
    ],
)
@pytest.mark.parametrize("target", ["test", "demo"])
def test_an_unsuitable_python_is_reported_before_anything_is_created(
    project: Path, target: str, fail_on: str, message: str
) -> None:
    ended = make(project, target, fail_on)
    assert ended.code != 0
    assert message in ended.output
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


def test_a_suite_that_cannot_be_collected_is_run_to_report_the_error(project: Path) -> None:
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


def test_each_python_has_environments_of_its_own(project: Path) -> None:
    play_python(project, "python3.13", "3.13")
    assert make(project, "test").code == 0
    assert make(project, "test", python="python3.13").code == 0
    assert "pip install" in (project / "calls").read_text()
    assert make(project, "demo", python="python3.13").code == 0
    made = {path.name for path in project.glob(".venv*")}
    assert made == {".venv", ".venv-3.13", ".venv-demo-3.13"}


def test_a_python_that_does_not_run_is_named(project: Path) -> None:
    # pyenv puts such names on the PATH for versions that are not selected.
    write_script(project / "python3.13", "#!/bin/sh\nexit 127\n")
    assert make(project, "test").code == 0  # its environment is not used instead
    ended = make(project, "test", python="python3.13")
    assert ended.code != 0
    assert "'python3.13' does not run" in ended.output
    assert "pytest" not in (project / "calls").read_text()


def test_clean_removes_the_environments(project: Path) -> None:
    play_python(project, "python3.13", "3.13")
    assert make(project, "test").code == 0
    assert make(project, "demo").code == 0
    assert make(project, "test", python="python3.13").code == 0
    assert make(project, "clean").code == 0
    assert not list(project.glob(".venv*"))


# --- .ci/run

NEEDED = ("ip", "etcd", "etcdctl", "openssl", "cc", "slurmctld", "munged", "mpirun", "chromium")
EVERYTHING = sorted(["lint", "docs", "test", "training", "hosts", "schedulers", "views"])


def check(project: Path, failing: str = "") -> tuple[Ended, list[tuple[str, str]]]:
    """Run `.ci/run`; return how it ended, and the Pythons and targets that it gave to make.

    Args:
        project: its folder.
        failing: a target with which make fails.
    """
    (project / "made").unlink(missing_ok=True)
    write_script(project / ".ci" / "run", (ROOT / ".ci" / "run").read_text())
    shutil.copy(ROOT / "pyproject.toml", project)
    script = f'#!/bin/sh\necho "$*" >> {project}/made\ntest "$2" != "{failing}"\n'
    write_script(project / "bin" / "make", script)
    for name in NEEDED:
        write_script(project / "bin" / name, "#!/bin/sh\n")
    for number in range(11, 20):  # those of this machine
        if not (project / f"python3.{number}").exists():
            write_script(project / f"python3.{number}", "#!/bin/sh\nexit 127\n")
    path = f"{project}:{project}/bin:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(project), "PYENV_ROOT": f"{project}/.pyenv"}
    ended = run([str(project / ".ci" / "run")], cwd=project, env={**env, "FAIL_ON": "nothing"})
    made = (project / "made").read_text().splitlines() if (project / "made").exists() else []
    return ended, [(a.removeprefix("PYTHON="), b) for a, b in map(str.split, made)]


def test_the_check_uses_the_oldest_and_the_newest_python_that_runs(project: Path) -> None:
    newest = str(project / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3")
    play_python(project, "python3.12", "3.12")
    play_python(project, newest, "3.13")
    ended, made = check(project)
    assert ended.code == 0, ended.output
    assert sorted(target for python, target in made if python == "python3") == EVERYTHING
    of_newest = [target for python, target in made if python == newest]
    assert of_newest == [".venv-3.13/.rewritten", "test"]
    assert len(made) == len(EVERYTHING) + len(of_newest)


def test_a_stage_that_fails_beside_another_one_fails_the_check(project: Path) -> None:
    play_python(project, "python3", "3.12")
    for failing in ("docs", "lint", "schedulers", "training", "views", "hosts"):
        ended, made = check(project, failing)
        assert ended.code == 1, ended.output
        assert len(made) == len(EVERYTHING)


def test_the_check_is_content_with_the_only_python(project: Path) -> None:
    play_python(project, "python3", "3.12")
    ended, made = check(project)
    assert ended.code == 0, ended.output
    assert sorted(made) == [("python3", target) for target in EVERYTHING]
    assert "no Python 3.11 on this machine: not tested" in ended.output


def test_a_check_without_any_declared_python_fails(project: Path) -> None:
    play_python(project, "python3", "3.10")
    ended, made = check(project)
    assert ended.code == 1
    assert not made
    assert "no Python that pyproject.toml declares runs on this machine" in ended.output
