"""`--heartbeat`: a script's own settings take effect; ranks without a heartbeat are named."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import jumping_clock
from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

ON_FAILURE = """
import threading
from regrow import heartbeat
notified = threading.Event()
def on_failure(failure):
    report("notified", failure.kind, *failure.ranks)
    notified.set()
"""


@pytest.mark.thorough
def test_a_script_sets_on_failure_though_the_launcher_began_the_heartbeat(
    launch: Launch,
) -> None:
    job = launch(
        ON_FAILURE
        + """
event = heartbeat.start(
    60, on_failure=on_failure, stalled_after=2, on_stall="fatal", start_timeout=30
)
assert heartbeat.start(60, on_failure=print) is event
with open("/proc/self/timers") as timers:
    report("kernel", timers.read().count("ClockID"))
heartbeat.step(0)
while not notified.wait(0.01):
    if RANK == 0:
        heartbeat.step(int(time.monotonic() * 100))
event.wait(30)
report("lives")
""",
        "--heartbeat=0.1",
    )
    reports = sorted(job.reports(6))
    assert job.finish() == 0, job.output
    assert reports == [
        [rank, "0", *words]
        for rank in "01"
        for words in (["kernel", "0"], ["lives"], ["notified", "stalled", "1"])
    ]
    assert job.events("worker.failed") == []
    output = " ".join(job.stderr.split())
    assert output.count("`regrow run --heartbeat` has already started a heartbeat every 0.1 s") == 2
    assert output.count("this call of heartbeat.start is ignored") == 2


@pytest.mark.training
def test_a_worker_that_never_imports_regrow_is_named_and_a_script_may_give_up_on_it(
    launch: Launch,
) -> None:
    job = launch(
        """
if RANK == 1:
    forever()
from regrow import heartbeat
heartbeat.start(60, start_timeout=12)
""",
        "--heartbeat=0.1",
    )
    assert job.finish() == 1, job.output
    (failed,) = [event for event in job.events("worker.failed") if event["root_cause"]]
    assert failed["rank"] == 0
    output = " ".join(job.stderr.split())
    assert "heartbeat of rank 0 of 2, beat 0: rank 1 did not arrive within 12 s" in output
    # One line of the worker that waits, and one of the agent, which does not wait.
    assert "heartbeat: rank 1 of 2 has not started heartbeats" in output
    assert "no heartbeat yet from rank 1, although --heartbeat is set" in output


@pytest.mark.training
def test_a_job_whose_script_never_imports_regrow_gets_a_warning_about_its_heartbeat(
    launch: Launch,
) -> None:
    job = launch("forever()", "--heartbeat=0.1")
    text = "no heartbeat yet from ranks 0, 1, although --heartbeat is set"
    deadline = time.monotonic() + 40
    while text not in " ".join(job.stderr.split()):
        assert time.monotonic() < deadline, job.output
        time.sleep(0.02)
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.output


@pytest.mark.training
def test_a_worker_that_hangs_is_killed_by_its_agent_though_its_script_sets_on_failure(
    launch: Launch,
) -> None:
    job = launch(
        ON_FAILURE
        + """
heartbeat.start(60, on_failure=on_failure, start_timeout=30)
if ATTEMPT == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if ATTEMPT == 0:
    forever()
""",
        "--heartbeat=0.1",
        "--max-restarts=1",
    )
    assert job.finish() == 0, job.output
    (expired,) = job.events("timer.expired")
    assert (expired["heartbeat"], expired["rank"]) == (True, 1)


@pytest.mark.training
@pytest.mark.skipif(not jumping_clock.COMPILER, reason="needs a C compiler")
def test_jumps_of_the_wall_clock_affect_neither_a_job_nor_the_end_of_a_hang(
    launch: Launch, tmp_path: Path
) -> None:
    """The agent, its guardian, the store's server and the workers all see it jump."""
    job = launch(
        f"""
sys.path.insert(0, {str(Path(jumping_clock.__file__).parent)!r})
from helpers import jumping_clock
from regrow import heartbeat
event = heartbeat.start(60, start_timeout=30)
report("jumps", jumping_clock.jumps(), *jumping_clock.clocks_of_timers(os.getpid()))
heartbeat.step(RANK)
while RANK == 1 and [row.step for row in heartbeat.progress()] != [0, 1]:
    time.sleep(0.005)  # until the other one has reported it, too
if ATTEMPT == 1 and RANK == 0:
    event.wait(30)  # until the other one leaves
if ATTEMPT == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if ATTEMPT == 0:
    forever()
""",
        "--heartbeat=0.5",
        "--max-restarts=1",
        env={"LD_PRELOAD": jumping_clock.library(tmp_path)},
    )
    assert job.finish() == 0, job.output
    assert sorted(job.reports(4)) == [
        [rank, attempt, "jumps", "True", "1"] for rank in "01" for attempt in "01"
    ]
    (expired,) = job.events("timer.expired")
    assert (expired["heartbeat"], expired["rank"], expired["attempt"]) == (True, 1, 0)
    failed = [event for event in job.events("worker.failed") if event["root_cause"]]
    assert [(event["attempt"], event["rank"]) for event in failed] == [(0, 1)]
