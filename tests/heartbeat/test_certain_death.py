"""The end of a process after a failed heartbeat, in any state of the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.heartbeats import dying
from helpers.heartbeats.dying import REASON, died
from regrow.heartbeat.death import PID_1_SIGNAL

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@pytest.mark.parametrize(
    ("way", "signum"),
    [
        pytest.param(dying.native_code_with_the_gil, signal.SIGABRT, id="native code with the GIL"),
        pytest.param(
            dying.native_code_with_the_gil_and_a_handler,
            signal.SIGKILL,
            id="a handler",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            dying.native_code_with_the_gil_and_a_mask,
            signal.SIGKILL,
            id="a mask",
            marks=pytest.mark.thorough,
        ),
        pytest.param(dying.stopped, signal.SIGKILL, id="SIGSTOP"),
    ],
)
def test_the_kernel_ends_a_process_that_cannot_run_python(
    way: Callable[[], None], signum: signal.Signals
) -> None:
    code, err = died(way)
    assert code == -signum, err
    if way is dying.native_code_with_the_gil:
        assert "in hold_the_gil" in err  # written by faulthandler


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(dying.sleeping, id="time.sleep"),
        pytest.param(dying.looping, id="endless loop"),
        pytest.param(dying.native_code, id="native code without the GIL"),
        pytest.param(dying.handling, id="SIGABRT has a handler"),
        pytest.param(dying.ignoring, id="SIGABRT is ignored"),
        pytest.param(dying.blocking, id="SIGABRT is blocked"),
        pytest.param(dying.without_timers, id="the kernel gives no timers"),
    ],
)
def test_a_process_ends_from_any_thread_and_writes_its_error_file(
    way: Callable[[], None], tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    code, err = died(way, **{ERROR_FILE: str(path)})
    assert code == -signal.SIGABRT, err
    assert f"{REASON}; this process (" in err
    message = json.loads(path.read_text())["message"]
    assert message["message"] == f"HeartbeatFailure: {REASON}"
    extra = message["extraInfo"]
    assert extra["heartbeat"] == {
        "kind": "missing",
        "ranks": [2],
        "count": 1,
        "beat": 7,
        "seconds": 9.0,
    }
    lines = extra["py_callstack"].splitlines()
    assert lines[1] == "Main thread (most recent call first):"
    assert lines[-2].endswith("in _die_beside") or way.__name__ in lines[-2]


def test_full_output_pipes_delay_neither_the_end_nor_the_error_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "error.json"
    with dying.dying(dying.printing, **{ERROR_FILE: str(path)}) as process:
        assert process.wait(40) == -signal.SIGABRT
    assert REASON in path.read_text()


def test_a_hanging_error_file_does_not_delay_the_end(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    code, err = died(dying.blocked_error_file, path, **{ERROR_FILE: str(path)})
    assert code == -signal.SIGABRT, err
    assert REASON in err


def test_a_full_disk_costs_only_the_error_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    disk = tmp_path / "tiny"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], check=True)
    try:
        (disk / "ballast").write_bytes(b"b" * 4096)
        code, err = died(dying.sleeping, **{ERROR_FILE: str(disk / "error.json")})
        assert code == -signal.SIGABRT, err
        assert REASON in err
        assert f"cannot write the error file {disk / 'error.json'}: [Errno 28]" in err
        assert os.listdir(disk) == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_without_kernel_timers_a_warning_is_logged() -> None:
    _, err = died(dying.without_timers)
    assert err.count("the process is stopped: [Errno 11] timer_create") == 1, err


def test_a_timer_can_be_postponed_and_closed() -> None:
    with dying.dying(dying.putting_off) as process:
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (0, "pending:\n"), err


def test_a_forked_child_has_no_timers_and_cannot_postpone_its_parents() -> None:
    with dying.dying(dying.parent_of_a_child) as process:
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (-signal.SIGABRT, "0 bytes of timers\n"), err


@pytest.mark.parametrize(
    ("way", "ended"),
    [
        pytest.param(dying.sleeping, (-signal.SIGSEGV, 128 + signal.SIGSEGV), id="time.sleep"),
        pytest.param(dying.native_code_with_the_gil_and_a_mask, (PID_1_SIGNAL,), id="with the GIL"),
    ],
)
def test_the_first_process_of_a_container_ends_though_the_kernel_protects_it(
    way: Callable[[], None], ended: tuple[int, ...]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a namespace of processes takes root")
    container = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    code, err = died(way, container=container)
    assert code in ended, err
