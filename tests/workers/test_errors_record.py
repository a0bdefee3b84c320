"""`record` and `ErrorHandler`: error files, and exceptions that continue unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.unspeakable import UNSPEAKABLE
from regrow.workers.errors import ChildFailedError, ErrorHandler, ProcessFailure, record


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The error file of this process, which acts as a worker."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@record
def fails() -> None:
    raise ValueError("no such layer")


def exits(code: Any) -> Any:
    @record
    def main() -> None:
        sys.exit(code)

    return main


def left(path: Path) -> Any:
    return json.loads(path.read_text())["message"]


def test_an_uncaught_exception_is_raised_on_and_left_in_the_error_file(error_file: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ValueError, match="no such layer"):
        fails()
    message = left(error_file)
    assert message["message"] == "ValueError: no such layer"
    extra = message["extraInfo"]
    assert extra["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError("no such layer")' in extra["py_callstack"]
    assert abs(int(extra["timestamp"]) - time.time()) < 60
    assert before <= extra["monotonic"] <= time.monotonic()
    assert os.listdir(error_file.parent) == ["error.json"]


def test_return_value_name_and_docstring_of_a_recorded_function_are_kept(error_file: Path) -> None:
    @record
    def add(a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert not error_file.exists()


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_of_success_is_a_return(error_file: Path, code: int | None) -> None:
    assert exits(code)() is None
    assert not error_file.exists()


@pytest.mark.parametrize("code", [3, "a message"])
def test_any_other_exit_is_raised_on_without_a_file(error_file: Path, code: object) -> None:
    with pytest.raises(SystemExit) as caught:
        exits(code)()
    assert caught.value.code == code
    assert not error_file.exists()


def test_ctrl_c_leaves_no_file(error_file: Path) -> None:
    @record
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        main()
    assert not error_file.exists()


def test_a_handler_of_the_users_records_in_both_forms() -> None:
    class Mine(ErrorHandler):
        seen: list[str]

        def initialize(self) -> None:
            self.seen = ["initialized"]

        def record_exception(self, e: BaseException) -> None:
            self.seen.append(str(e))

    def main() -> None:
        raise RuntimeError("boom")

    first, second = Mine(), Mine()
    with pytest.raises(RuntimeError):
        record(error_handler=first)(main)()
    with pytest.raises(RuntimeError):
        record(main, second)()
    assert first.seen == second.seen == ["initialized", "boom"]


@pytest.mark.parametrize("value", [None, ""])
def test_the_exception_is_raised_without_an_error_file_too(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
    with pytest.raises(ValueError, match="no such layer"):
        fails()


def test_an_error_file_that_cannot_be_written_never_masks_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(ValueError, match="no such layer"):
        fails()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"cannot write the error file {path}: [Errno 2]" in err


def test_a_full_disk_leaves_neither_half_a_file_nor_another_exception(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    disk = tmp_path / "tiny"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], check=True)
    try:
        (disk / "ballast").write_bytes(b"b" * 4096)
        script = "from regrow.workers.errors import record\n@record\ndef f(): 1 / 0\nf()"
        env = os.environ | {"TORCHELASTIC_ERROR_FILE": str(disk / "error.json")}
        run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True)
        assert run.returncode == 1
        assert b"No space left on device" in run.stderr
        assert run.stderr.rstrip().endswith(b"ZeroDivisionError: division by zero")
        assert os.listdir(disk) == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_an_exception_that_cannot_be_shown_is_recorded(error_file: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    @record
    def main() -> None:
        raise Mute

    with pytest.raises(Mute):
        main()
    assert left(error_file)["message"] == "Mute: <Mute: str() raises RuntimeError>"


def test_a_fatal_signal_shows_the_stacks() -> None:
    script = (
        "import os, signal\nfrom regrow.workers.errors import record\n"
        "@record\ndef main(): os.kill(os.getpid(), signal.SIGSEGV)\nmain()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert b"Fatal Python error: Segmentation fault" in run.stderr
    assert b"in main" in run.stderr


def test_without_a_stderr_the_function_runs() -> None:
    script = (
        "import sys\nfrom regrow.workers.errors import record\nsys.stderr = None\n"
        "@record\ndef main(): print('ran')\nmain()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert run.stdout == b"ran\n"


def test_a_childs_error_becomes_the_parents_with_its_exit_code(
    tmp_path: Path, error_file: Path
) -> None:
    child = tmp_path / "child.json"
    message: dict[str, Any] = {"message": "child's", "extraInfo": {"timestamp": "5", "more": [1]}}
    data = {"message": message}
    child.write_text(json.dumps(data))
    error_file.write_text("what a child of fork left here by mistake")

    @record
    def parent() -> None:
        raise ChildFailedError("trainer", {0: ProcessFailure(0, 12, -11, str(child))})

    with pytest.raises(ChildFailedError):
        parent()
    message["errorCode"] = -11
    assert json.loads(error_file.read_text()) == data


def test_a_childs_error_of_the_flat_format_is_passed_on_unchanged(
    tmp_path: Path, error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child.json"
    data = {"message": "flat", "timestamp": "5"}
    child.write_text(json.dumps(data))
    ErrorHandler().dump_error_file(str(child), 7)
    assert json.loads(error_file.read_text()) == data
    assert "exit code 7 is not added" in capsys.readouterr().err


NESTED = 100_000
DEEP = f'{{"message": {"[" * NESTED}{"]" * NESTED}}}'


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("content", [None, "{broken", DEEP], ids=["none", "broken", "deep"])
def test_a_childs_error_that_cannot_be_passed_on_masks_nothing(
    tmp_path: Path, error_file: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child.json"
    child.write_text("{}")
    failure = ProcessFailure(0, 12, 1, str(child))
    if content is None:
        child.unlink()
    else:
        child.write_text(content)

    @record
    def parent() -> None:
        raise ChildFailedError("trainer", {0: failure})

    with pytest.raises(ChildFailedError):
        parent()
    assert not error_file.exists()
    assert f"cannot pass on the child's error file {child}: it" in capsys.readouterr().err


def test_a_child_without_an_error_file_leaves_the_parent_without(error_file: Path) -> None:
    @record
    def parent() -> None:
        raise ChildFailedError("trainer", {0: ProcessFailure(0, 12, -9, "")})

    with pytest.raises(ChildFailedError):
        parent()
    assert not error_file.exists()


def test_torchs_module_paths_lead_to_the_same_names() -> None:
    import regrow.multiprocessing.errors.error_handler as theirs
    from regrow.multiprocessing import errors

    from regrow.workers.errors import error_handler, get_error_handler, handlers

    assert errors.record is record
    assert theirs.ErrorHandler is error_handler.ErrorHandler is ErrorHandler
    assert handlers.get_error_handler is get_error_handler
    assert type(get_error_handler()) is ErrorHandler


@pytest.mark.parametrize("kind", UNSPEAKABLE)
def test_the_type_of_an_exception_without_text_is_recorded(
    error_file: Path, kind: type[Exception]
) -> None:
    @record
    def main() -> None:
        raise kind

    with pytest.raises(kind):
        main()
    assert left(error_file)["message"].startswith(f"{kind.__name__}: ")
    assert "raise kind" in left(error_file)["extraInfo"]["py_callstack"]


def test_an_error_handler_that_raises_hides_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            raise OSError("no room")

    @record(error_handler=Broken())
    def main() -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        main()
    assert "no room" in capsys.readouterr().err


def test_a_program_runs_where_no_fault_handler_can_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**where: Any) -> None:
        raise RuntimeError("no fault handler here")

    monkeypatch.setattr("faulthandler.enable", refuse)
    assert record(lambda: "done")() == "done"
    assert "a fatal signal will print no stacks: RuntimeError: no fault handler" in (
        capsys.readouterr().err
    )


def test_other_base_exceptions_are_recorded_and_ctrl_c_is_not(
    error_file: Path,
) -> None:
    class Abort(BaseException):
        pass

    def raises(error: BaseException) -> None:
        @record
        def main() -> None:
            raise error from ValueError("the cause")

        with pytest.raises(type(error)):
            main()

    raises(KeyboardInterrupt())
    assert not error_file.exists()
    raises(Abort("no further restart"))
    assert left(error_file)["message"] == "Abort: no further restart"
    assert "ValueError: the cause" in left(error_file)["extraInfo"]["py_callstack"]
