"""An exception is recorded although the script imports no regrow, and the script sees no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import PATIENCE
from regrow.workers import DefaultLogsSpecs, ProcessFailure, Std, start_processes
from regrow.workers.guardian.spawn import HOOK, is_python


def run(
    folder: Path, script: str, env: dict[str, str] | None = None, *flags: str
) -> ProcessFailure | None:
    """Run a script as the only worker, with its output on this process's; return its failure."""
    (folder / "s.py").write_text(script)
    context = start_processes(
        "test",
        sys.executable,
        {0: (*flags, str(folder / "s.py"))},
        {0: env or {}},
        DefaultLogsSpecs(str(folder / "logs"), redirects=Std.NONE),
        signals_to_handle="",
    )
    result = context.wait(PATIENCE)
    context.close()
    assert result is not None
    return result.failures.get(0)


@pytest.mark.parametrize(
    ("script", "summary"),
    [
        ("def f():\n    raise ValueError('no')\nf()\n", "ValueError: no"),
        ("x = = 3\n", "SyntaxError: invalid syntax (s.py, line 1)"),
        ("import not_there\n", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise ExceptionGroup('two', [ValueError(1)])\n", "ExceptionGroup: two (1 sub-exception)"),
    ],
)
def test_an_exception_is_recorded_without_any_change_to_the_script(
    tmp_path: Path, script: str, summary: str, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = run(tmp_path, script)
    assert failure is not None
    assert failure.has_error_file
    assert failure.summary == summary
    assert failure.traceback is not None
    assert 's.py", line' in failure.traceback
    printed = capfd.readouterr().err
    assert summary.partition(":")[0] in printed, "Python prints it as always"


SEE = """\
import json, os, subprocess, sys
def seen():
    return [os.environ.get("PYTHONPATH"), [p for p in sys.path if "hook" in p]]
child = "import json, os, sys; print(json.dumps([os.environ.get('PYTHONPATH'), []]))"
child = json.loads(subprocess.check_output([sys.executable, "-c", child]))
json.dump([seen(), child], open("seen", "w"))
"""


@pytest.mark.parametrize("path", ["/a:/b", None])
def test_the_program_and_its_children_see_their_own_pythonpath(
    tmp_path: Path, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert run(tmp_path, SEE, {"PYTHONPATH": path} if path else None) is None
    assert json.loads((tmp_path / "seen").read_text()) == [[path, []], [path, []]]


def test_a_sitecustomize_of_the_user_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import sys\nsys.mine = 1\n")
    script = "import sys, sitecustomize\nassert sys.mine and sitecustomize.sys\n1 / 0\n"
    failure = run(tmp_path, script, {"PYTHONPATH": os.fspath(tmp_path / "mine")})
    assert failure is not None
    assert failure.summary == "ZeroDivisionError: division by zero"


def test_an_exception_in_a_child_of_the_worker_is_not_that_of_the_worker(tmp_path: Path) -> None:
    forked = "import os\nif os.fork() == 0:\n    1 / 0\nos.wait()\nraise SystemExit(3)\n"
    failure = run(tmp_path, forked)
    assert failure is not None
    assert (failure.exitcode, failure.has_error_file) == (3, False)


def test_a_record_of_the_script_is_kept(tmp_path: Path) -> None:
    path = 'os.environ["TORCHELASTIC_ERROR_FILE"]'
    write = f'import json, os\njson.dump({{"message": "mine"}}, open({path}, "w"))\n1 / 0'
    failure = run(tmp_path, write)
    assert failure is not None
    assert failure.summary == "mine"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "-u", "train.py", "-I"], True),
        (["python", "-m", "pkg"], True),
        (["/v/bin/python3.12", "-c", "1"], True),
        (["python", "-I", "x.py"], False),
        (["python", "-u", "-E", "x.py"], False),
        (["python2", "x.py"], False),
        (["bash", "train.sh"], False),
        (["/opt/bin/pythonic"], False),
    ],
)
def test_only_a_python_that_imports_the_hook_gets_its_folder(
    command: list[str], expected: bool
) -> None:
    assert is_python([os.fsencode(word) for word in command]) == expected


def test_the_folder_of_the_hook_is_there() -> None:
    assert (Path(os.fsdecode(HOOK)) / "sitecustomize.py").is_file()


def test_a_long_message_still_gives_an_error_file_that_the_agent_reads(tmp_path: Path) -> None:
    failure = run(tmp_path, "raise ValueError('x' * 10_000_000)")
    assert failure is not None
    assert failure.summary.startswith("ValueError: xxx")


HANDLED = """\
import code, os, sys, threading
def report():
    try:
        1 / 0
    except Exception:
        sys.excepthook(*sys.exc_info())
"""


@pytest.mark.parametrize("imports", ["", "import regrow\n"])
@pytest.mark.parametrize(
    "call",
    [
        "report()",
        "code.InteractiveInterpreter().runsource('1 / 0')",
        "thread = threading.Thread(target=report); thread.start(); thread.join()",
    ],
)
def test_an_exception_that_is_reported_and_handled_is_not_the_cause(
    tmp_path: Path, call: str, imports: str
) -> None:
    failure = run(tmp_path, f"{imports}{HANDLED}{call}\nsys.exit(3)\n")
    assert failure is not None
    assert (failure.exitcode, failure.has_error_file) == (3, False)
    failure = run(tmp_path, f"{imports}{HANDLED}{call}\nraise KeyError('real')\n")
    assert failure is not None
    assert failure.summary == "KeyError: 'real'"


@pytest.mark.parametrize("flags", [["-m", "s"], ["-c", "import s"]])
def test_an_exception_of_a_module_is_recorded(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hook = "import sys\nbefore = sys.excepthook\nsys.excepthook = lambda *error: before(*error)\n"
    failure = run(tmp_path, f"{hook}raise KeyError('real')\n", None, *flags)
    assert failure is not None
    assert failure.summary == "KeyError: 'real'"


def test_the_import_of_regrow_in_a_worker_loads_no_threading() -> None:
    names = ("regrow._uncaught", "threading")
    program = f"import sys, regrow; print(*(name in sys.modules for name in {names}))"
    command = f'REGROW_WORKER_PID=$$ exec {sys.executable} -c "{program}"'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
