"""An exception that ends a worker is in its error file, without any change to the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import PATIENCE
from regrow.workers import DefaultLogsSpecs, ProcessFailure, Std, start_processes

HELPER = """
import subprocess, sys
import regrow
subprocess.run([sys.executable, "-c", "import regrow; 1 / 0"])
sys.exit(3)
"""
RECORDED = """
import regrow
from regrow.workers.errors import ErrorHandler, record

class Handler(ErrorHandler):
    def record_exception(self, e):
        self._write_json(self._get_error_file_path(), {"message": "the user's own record"})

@record(error_handler=Handler())
def main():
    1 / 0

main()
"""


def failure_of(folder: Path, script: str) -> ProcessFailure:
    """Run a script as the only worker; return its failure."""
    context = start_processes(
        "test",
        sys.executable,
        {0: ("-c", script)},
        {0: {}},
        DefaultLogsSpecs(str(folder), redirects=Std.ALL),
        signals_to_handle="",
    )
    result = context.wait(PATIENCE)
    context.close()
    assert result is not None
    return result.failures[0]


def log(folder: Path, name: str) -> str:
    (file,) = folder.rglob(f"{name}.log")
    return file.read_text()


def test_an_exception_of_a_script_that_imports_regrow_is_recorded(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "import regrow\n1 / 0")
    assert failure.exitcode == 1
    assert failure.traceback is not None
    assert failure.traceback.endswith("ZeroDivisionError: division by zero\n")
    assert "ZeroDivisionError" in log(tmp_path, "stderr")


def test_an_exception_of_a_helper_is_not_the_workers(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, HELPER)
    assert (failure.exitcode, failure.has_error_file) == (3, False)


def test_what_record_has_written_stays(tmp_path: Path) -> None:
    assert failure_of(tmp_path, RECORDED).summary == "the user's own record"


def test_a_hook_of_the_users_is_called_as_before(tmp_path: Path) -> None:
    hook = "import sys; sys.excepthook = lambda kind, *_: print(kind.__name__)"
    failure = failure_of(tmp_path, f"{hook}\nimport regrow\n1 / 0")
    assert failure.has_error_file
    assert log(tmp_path, "stdout") == "ZeroDivisionError\n"
    assert log(tmp_path, "stderr") == ""


@pytest.mark.parametrize("end", ["sys.exit('no')", "raise KeyboardInterrupt"])
def test_an_exit_and_ctrl_c_are_not_recorded(tmp_path: Path, end: str) -> None:
    assert not failure_of(tmp_path, f"import regrow, sys\n{end}").has_error_file


def test_outside_of_a_worker_the_hook_stays_pythons() -> None:
    script = "import regrow, sys; print(sys.excepthook is sys.__excepthook__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout == b"True\n"
