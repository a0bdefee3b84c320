"""Function workers that have returned wait for the others of their node before they end."""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import PATIENCE, ends, wait_until
from helpers.workers import functions as work
from regrow.launch import LaunchConfig, elastic_launch
from regrow.workers import ChildFailedError, DefaultLogsSpecs, RunProcsResult, start_processes
from regrow.workers.function import let_threads_rest

METHODS = ("spawn", "fork", "forkserver")
#: Seconds for which a test waits for an end that must not come.
LOOK_S = 1.0


def run(
    method: str, log_dir: Path, function: Callable[..., Any], *args: tuple[Any, ...], **more: Any
) -> RunProcsResult:
    context = start_processes(
        "test",
        function,
        dict(enumerate(args)),
        {rank: {} for rank in range(len(args))},
        str(log_dir),
        start_method=method,
        signals_to_handle="",
        **more,
    )
    try:
        result = context.wait(PATIENCE)
        assert result is not None, "the group never ended"
        return result
    finally:
        context.close(signal.SIGKILL, 0)


def saw_the_other_end(rank: int, directory: str) -> bool:
    """Rank 0 returns at once; rank 1 returns whether the process of rank 0 ends before it does."""
    returned = Path(directory, "returned")
    if rank == 0:
        atexit.register(Path(directory, "ended").touch)
        returned.symlink_to(str(os.getpid()))
        return False
    wait_until(returned.is_symlink, "rank 0 has returned")
    pidfd = os.pidfd_open(int(str(returned.readlink())))
    try:
        return ends(pidfd, LOOK_S)
    finally:
        os.close(pidfd)


def return_or_fail(rank: int, directory: str) -> None:
    """Rank 0 ignores SIGTERM and returns; then rank 1 fails."""
    returned = Path(directory, "returned")
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        returned.touch()
    else:
        wait_until(returned.exists, "rank 0 has returned")
        raise ValueError("too late")


def return_or_die(rank: int) -> int:
    if rank == 1:
        work.kill_self()
    return rank


def test_a_worker_that_returned_lives_until_the_others_have_returned(tmp_path: Path) -> None:
    result = run(
        "spawn", tmp_path, saw_the_other_end, *((rank, str(tmp_path)) for rank in range(2))
    )
    assert result.return_values == {0: False, 1: False}
    assert (tmp_path / "ended").exists()


def test_a_worker_that_returned_does_not_delay_the_end_of_a_group_that_failed(
    tmp_path: Path,
) -> None:
    args = [(rank, str(tmp_path)) for rank in range(2)]
    result = run("spawn", tmp_path, return_or_fail, *args, shutdown_timeout=1000.0)
    assert list(result.failures) == [1]


@pytest.mark.parametrize("method", METHODS)
def test_workers_do_not_wait_for_a_lost_worker(tmp_path: Path, method: str) -> None:
    args = [(0,), (1,), (2,)]
    result = run(method, tmp_path, return_or_die, *args, others_continue=lambda rank: rank == 1)
    assert result.return_values == {0: 0, 2: 2}


def test_the_end_of_a_worker_is_known_after_its_group_has_ended(tmp_path: Path) -> None:
    context = start_processes(
        "test", work.vanish, {0: (0,)}, {0: {}}, str(tmp_path), signals_to_handle=""
    )
    assert context.wait(PATIENCE) is not None
    context.close()
    for failure in (context.ended(0), context.first_failure()):
        assert failure is not None
        assert "before vanish returned" in failure.summary


def test_a_function_that_ends_with_os_exit_0_is_a_failure_and_is_started_again(
    tmp_path: Path,
) -> None:
    attempts: list[object] = []
    config = LaunchConfig(
        1,
        1,
        1,
        DefaultLogsSpecs(str(tmp_path)),
        "job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        event_sinks=(lambda event: attempts.append(event.name),),
    )
    with pytest.raises(ChildFailedError, match="before vanish returned"):
        elastic_launch(config, work.vanish)(0)
    assert attempts.count("regrow.attempt.started") == 2


@pytest.mark.parametrize("rests", [True, False])
def test_native_threads_have_limited_time_to_come_to_rest(rests: bool) -> None:
    loops = 500_000 if rests else 3_000_000  # without the interpreter's lock
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha1", b"", b"", loops))
    thread.daemon = True
    thread.start()
    let_threads_rest(PATIENCE if rests else 0.01)
    assert thread.is_alive() != rests
    thread.join()


TRAINING = """
import os, torch, torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    return dist.get_rank()
"""


@pytest.mark.training
@pytest.mark.timeout(400)
@pytest.mark.parametrize("runs", [2, pytest.param(10, marks=pytest.mark.thorough)])
def test_functions_that_return_right_after_a_collective_succeed(
    runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gloo_training.py").write_text(TRAINING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    from importlib import import_module

    train = import_module("gloo_training").train
    for _ in range(runs):
        config = LaunchConfig(
            1,
            1,
            4,
            DefaultLogsSpecs(str(tmp_path / "logs")),
            "job",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        assert elastic_launch(config, train)() == {0: 0, 1: 1, 2: 2, 3: 3}
