"""Workers that hang past the hard time-out, under an agent: all workers share one monitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

HANGS = """
import ctypes
from datetime import timedelta
from pathlib import Path
from regrow.inprocess import CallWrapper, Wrapper

pid = Path({folder!r}, "monitor.0.pid")

@Wrapper(
    soft_timeout=timedelta(seconds=0.4),
    hard_timeout=timedelta(seconds=2.5),
    progress_watchdog_interval=timedelta(seconds=0.1),
    monitor_thread_interval=timedelta(seconds=0.1),
    monitor_process_interval=timedelta(seconds=0.1),
    monitor_process_pidfile=str(pid.parent / "monitor.{{rank}}.pid"),
)
def train(call: CallWrapper):
    if call.iteration == 0 and RANK == 0:
        native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)
    deadline = time.monotonic() + (60 if call.iteration == 0 else 1.2)
    while time.monotonic() < deadline:
        time.sleep(0.01)

while RANK == 1 and not pid.exists():  # so that rank 0 has started the monitor
    time.sleep(0.01)
train()
"""


def test_a_worker_that_holds_the_interpreters_lock_is_ended_by_a_monitor_that_outlives_it(
    launch: Launch, tmp_path: Path
) -> None:
    job = launch(HANGS.format(folder=str(tmp_path)), "--nproc-per-node=2", "--max-restarts=0")
    assert job.finish() == 0, job.output
    (restarted,) = job.events("inprocess.restarted")
    assert (restarted["kind"], restarted["rank"], restarted["lost"]) == ("SOFT_TIMEOUT", 0, [0])
    assert restarted["message"].startswith("no progress for 0.4 s: in train (")
    assert [event["rank"] for event in job.events("inprocess.lost")] == [0]
    assert "starting another one" not in job.output
