"""`ProcessFailure` and `ChildFailedError`: the root cause, and the report."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from regrow.workers.errors import ChildFailedError, ProcessFailure

SINCE_EPOCH = "%Y-%m-%d_%H:%M:%S"


def error_file(folder: Path, content: Any, name: str = "error.json") -> str:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def exception(message: str, **extra: object) -> dict[str, object]:
    return {"message": {"message": message, "extraInfo": extra}}


def test_an_exception_is_read_from_its_file(tmp_path: Path) -> None:
    data = exception(
        "ValueError: x", py_callstack="Traceback\nValueError: x", timestamp="1700000000"
    )
    path = error_file(tmp_path, data)
    failure = ProcessFailure(1, 12, 1, path)
    assert failure.error_file == path
    assert failure.error_file_data == data
    assert failure.message == data["message"]
    assert failure.timestamp == 1700000000
    assert failure.summary == "ValueError: x"
    assert failure.traceback == "Traceback\nValueError: x"
    stamp = time.strptime(failure.timestamp_isoformat(), SINCE_EPOCH)
    assert time.mktime(stamp) == 1700000000


def test_the_flat_format_is_read(tmp_path: Path) -> None:
    data = {"message": "CUDA error", "timestamp": "1700000000", "errorTraits": {"category": "x"}}
    failure = ProcessFailure(1, 12, 1, error_file(tmp_path, data))
    assert (failure.message, failure.timestamp) == ("CUDA error", 1700000000)
    assert failure.error_file_data == data
    assert failure.summary == "CUDA error"
    assert failure.traceback is None


def test_a_message_that_is_a_traceback_is_summed_up_by_its_last_line(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\n  File x\nValueError: y\n"
    failure = ProcessFailure(0, 1, 1, error_file(tmp_path, {"message": text}))
    assert failure.summary == "ValueError: y"


@pytest.mark.parametrize("path", ["", "/nonexistent/error.json", os.devnull])
def test_a_process_that_exits_without_a_file_has_a_hint_for_a_message(path: str) -> None:
    failure = ProcessFailure(0, 12, 3, path)
    assert failure.error_file == "<N/A>"
    assert str(failure.message).startswith("To enable traceback see: https://")
    assert failure.summary == "exit code 3"
    assert failure.error_file_data["message"] == "<NONE>"
    assert failure.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    assert abs(failure.timestamp - time.time()) < 60


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGSEGV, "SIGSEGV"),
        (signal.SIGRTMIN + 3, "SIGRTMIN+3"),
        (99, "<N/A>"),
    ],
)
def test_a_process_killed_by_a_signal_is_reported_with_its_name(number: int, name: str) -> None:
    failure = ProcessFailure(0, 12, -number, "")
    assert failure.signal_name() == name
    assert failure.message == f"Signal {int(number)} ({name}) received by PID 12"
    assert failure.summary == failure.message


def test_failures_do_not_share_their_error_file_data() -> None:
    ProcessFailure(0, 12, 3, "")
    assert ProcessFailure(1, 13, -9, "").error_file_data == {"message": "<NONE>"}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{half", "is not valid JSON: Expecting property name"),
        ("", "is not valid JSON: Expecting value"),
        ("\x00", "is not valid JSON"),
        (b"\x93\xfa\x00\xff", "is not valid JSON: 'utf-8' codec can't decode"),
        (
            '{"message": "\u00e4"}'.encode("latin-1"),
            "is not valid JSON: 'utf-8' codec can't decode",
        ),
        pytest.param("[" * 100_000, "is not valid JSON", id="deep"),
        pytest.param(b" " * (4 << 20) + b"{}", "is longer than 4194304 bytes", id="huge"),
        ("[1]", "has no message"),
        ('{"text": 1}', "has no message"),
        ('{"message": 5}', "has no message"),
    ],
)
def test_an_unusable_error_file_is_reported_in_the_message(
    tmp_path: Path, content: str | bytes, why: str
) -> None:
    path = error_file(tmp_path, content)
    failure = ProcessFailure(0, 12, 1, path, exited_monotonic=5.0)
    assert str(failure.message).startswith(f"error file {path} {why}")
    assert failure.error_file == path
    assert failure.traceback is None
    assert failure.failed_monotonic == 5.0
    killed = ProcessFailure(0, 12, -9, path)
    assert str(killed.message).startswith(
        f"Signal 9 (SIGKILL) received by PID 12; error file {path} {why}"
    )


def test_an_error_file_that_cannot_be_read_is_the_message(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.symlink_to("/proc/self/mem")  # even root cannot read its first byte
    failure = ProcessFailure(0, 12, 1, str(path))
    assert failure.summary == f"error file {path} cannot be read: Input/output error"


def test_a_message_that_is_no_text_cannot_break_the_report(tmp_path: Path) -> None:
    nested = "[" * 850 + "]" * 850  # its file can be read here, and its text not be made below
    path = error_file(tmp_path, f'{{"message": {{"message": {nested}}}}}')
    failure = ProcessFailure(0, 12, 1, path)
    assert isinstance(failure.message, dict)

    def report(frames: int) -> tuple[str, str]:
        if frames:
            return report(frames - 1)
        return failure.summary, str(ChildFailedError("train.py", {0: failure}))

    summary, text = report(300)
    assert summary in text


def test_a_directory_is_no_error_file(tmp_path: Path) -> None:
    assert ProcessFailure(0, 12, 3, str(tmp_path)).summary == "exit code 3"


def test_a_message_of_megabytes_is_shown_in_part(tmp_path: Path) -> None:
    failure = ProcessFailure(0, 12, 1, error_file(tmp_path, {"message": "x" * (1 << 20)}))
    assert failure.summary == "x" * 2000 + "..."
    report = str(ChildFailedError("t", {0: failure}))
    assert f"traceback : [... {(1 << 20) - (64 << 10)} characters cut ...]" in report
    assert len(report) < 70_000


@pytest.mark.parametrize(
    "extra",
    [{}, {"timestamp": "soon"}, {"timestamp": None}, {"timestamp": 1e300}, {"monotonic": "x"}],
)
def test_missing_and_senseless_stamps_fall_back_to_the_files_time(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    failure = ProcessFailure(0, 12, 1, error_file(tmp_path, exception("x", **extra)))
    assert abs(failure.timestamp - time.time()) < 60
    assert abs(failure.failed_monotonic - time.monotonic()) < 60
    failure.timestamp_isoformat()


def test_an_extra_info_of_none_is_accepted(tmp_path: Path) -> None:
    data = {"message": {"message": "x", "extraInfo": None}}
    failure = ProcessFailure(0, 12, 1, error_file(tmp_path, data))
    assert failure.summary == "x"
    assert "traceback : x" in str(ChildFailedError("t", {0: failure}))


def test_the_moment_of_failure_is_the_recorded_one(tmp_path: Path) -> None:
    now = time.monotonic()
    path = error_file(tmp_path, exception("x", timestamp="1700000000", monotonic=now - 7.25))
    assert ProcessFailure(0, 1, 1, path).failed_monotonic == now - 7.25
    assert ProcessFailure(0, 1, 1, path, exited_monotonic=now).failed_monotonic == now - 7.25


def test_the_moment_is_at_the_latest_the_exit(tmp_path: Path) -> None:
    now = time.monotonic()
    path = error_file(tmp_path, exception("x", monotonic=now - 1))
    assert ProcessFailure(0, 1, 1, path, exited_monotonic=now - 3).failed_monotonic == now - 3


@pytest.mark.parametrize("stamp", [-1.0, 1e15, float("nan")])
def test_a_stamp_of_another_clock_is_not_believed(tmp_path: Path, stamp: float) -> None:
    path = error_file(tmp_path, exception("x", monotonic=stamp))
    failure = ProcessFailure(0, 1, 1, path, exited_monotonic=12.5)
    assert failure.failed_monotonic == 12.5


def test_torchs_error_file_is_placed_by_the_time_it_was_written(tmp_path: Path) -> None:
    """torch's `record` stamps whole seconds; rank 1 raised first and took long to exit."""
    now, wall = time.monotonic(), time.time()
    path = error_file(tmp_path, exception("x", timestamp=str(int(wall - 10))))
    os.utime(path, (wall - 10, wall - 10))
    raised = ProcessFailure(1, 2, 1, path, exited_monotonic=now - 2)
    killed = ProcessFailure(0, 1, -9, "", exited_monotonic=now - 5)
    assert raised.failed_monotonic == pytest.approx(now - 10, abs=1)
    assert ChildFailedError("t", {0: killed, 1: raised}).get_first_failure() == (1, raised)


def test_the_moment_without_any_source_is_now() -> None:
    before = time.monotonic()
    assert before <= ProcessFailure(0, 1, 1, "").failed_monotonic <= time.monotonic()
    assert ProcessFailure(0, 1, 1, "", exited_monotonic=4.5).failed_monotonic == 4.5


def test_the_root_cause_is_the_earliest_failure_within_the_same_second(tmp_path: Path) -> None:
    now, stamp = time.monotonic(), str(int(time.time()))
    failures = {
        rank: ProcessFailure(
            rank,
            100 + rank,
            1,
            error_file(
                tmp_path, exception(f"rank {rank}", timestamp=stamp, monotonic=at), f"{rank}.json"
            ),
        )
        for rank, at in ((0, now - 0.001), (1, now - 0.003), (2, now - 0.002))
    }
    rank, failure = ChildFailedError("train.py", failures).get_first_failure()
    assert (rank, failure.summary) == (1, "rank 1")


def test_the_report_has_the_lines_that_people_look_for(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad'
    now = time.monotonic()
    path = error_file(tmp_path, exception("ValueError: bad", py_callstack=stack, monotonic=now - 9))
    failures = {
        4: ProcessFailure(0, 100, -9, "", exited_monotonic=now - 1),
        5: ProcessFailure(1, 101, 1, path, exited_monotonic=now - 2),
    }
    text = str(ChildFailedError("train.py", failures))
    host = re.escape(os.uname().nodename)
    time_of_day = r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"""
={{60}}
train\.py FAILED
-{{60}}
Failures:
\[0\]:
  time      : {time_of_day}
  host      : {host}
  rank      : 4 \(local_rank: 0\)
  exitcode  : -9 \(pid: 100\) \(SIGKILL\)
  error_file: <N/A>
  traceback : Signal 9 \(SIGKILL\) received by PID 100
-{{60}}
Root Cause \(first observed failure\):
\[1\]:
  time      : {time_of_day}
  host      : {host}
  rank      : 5 \(local_rank: 1\)
  exitcode  : 1 \(pid: 101\)
  error_file: {re.escape(path)}
  traceback : Traceback \(most recent call last\):
    File "train\.py", line 3
  ValueError: bad
={{60}}""",
        text,
    ), text


def test_the_report_of_one_failure_names_no_other_failures() -> None:
    error = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 2, "")})
    assert "Failures:\n  <NO_OTHER_FAILURES>\n" in str(error)
    assert "**" in error.format_msg("*", "~")


def test_an_error_of_no_failures_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one failure"):
        ChildFailedError("train.py", {})


def test_the_error_can_be_pickled() -> None:
    error = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 2, "")})
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.failures, str(again)) == (error.name, error.failures, str(error))
