"""`regrow.should_stop`: all ranks of a job stop at the same step, whenever it is asked to end."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.jobs.agents import Hosts
from helpers.jobs.e2e_job import Job
from helpers.stories import without_times
from regrow.utils import PortReservation

pytestmark = pytest.mark.timeout(120)

# Each rank has a pace of its own, and no collective keeps the ranks together.
TRAIN = """
import random, time, regrow
pace = random.Random(int(rank))
step = 0
while step < 100_000:
    step += 1
    time.sleep(pace.random() * 0.004)
    if step == 3:
        open(f"running-{rank}", "w").close()
    if regrow.should_stop():
        open(f"stopped-{rank}", "w").write(f"{step} {regrow.deadline()}")
        break
"""
MEET = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"
RUNS = int(os.environ.get("REGROW_STOP_RUNS", "2"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with PortReservation() as free:
        made = Hosts(tmp_path, free.port)
    yield made
    made.close()


def steps(hosts: Hosts) -> dict[str, int]:
    """Return the step at which each rank has stopped."""
    found = hosts.folder.glob("stopped-*")
    return {path.name: int(path.read_text().split()[0]) for path in found}


@pytest.mark.parametrize("number", range(RUNS))
def test_four_ranks_on_two_hosts_stop_at_the_same_step(hosts: Hosts, number: int) -> None:
    chance = random.Random(number)
    agents = [hosts.start(f"{MEET} --node-rank {n} --log-dir logs", TRAIN) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    with pytest.raises(subprocess.TimeoutExpired):
        agents[0].wait(chance.random() * 0.5)
    signum = chance.choice([signal.SIGTERM, signal.SIGUSR1])
    for agent in chance.choice([agents[:1], agents[1:], agents]):
        agent.send_signal(signum)
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [85, 85], ended
    found = steps(hosts)
    assert len(found) == 4, ended
    assert len(set(found.values())) == 1, found


def test_every_host_names_the_host_that_got_the_signal_and_the_step(hosts: Hosts) -> None:
    script = TRAIN.replace("    if step == 3", "    regrow.step(step)\n    if step == 3")
    agents = [hosts.start(f"{MEET} --node-rank {n}", script) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    agents[1].send_signal(signal.SIGTERM)
    ended = [" ".join(without_times(hosts.ended(agent)[1]).split()) for agent in agents]
    (step,) = set(steps(hosts).values())
    name = f"SIGTERM on host {socket.gethostname()} (127.0.0.1)"
    for output in ended:
        assert (
            f"{name} asks the job to stop: the ranks wait until the agents choose the step"
            in output
        )
        (left,) = re.findall(
            rf"all ranks stop at call {step} of should_stop, within (\S+) s", output
        )
        assert 20 < float(left) <= 30
        assert f" at step {step}: all ranks stopped at the same step, by {name}; run" in output


def test_regrow_stop_reaches_a_job_at_its_endpoint(hosts: Hosts) -> None:
    agents = [hosts.start(f"{MEET} --node-rank {n} --rdzv-id mine", TRAIN) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    asked = hosts.regrow("stop --rdzv-endpoint 127.0.0.1:PORT --rdzv-id mine")
    assert asked.code == 0, asked
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [85, 85], ended
    (step,) = set(steps(hosts).values())
    assert f"all ranks stop at call {step} of should_stop" in asked.output
    assert "by regrow stop" in ended[0][1]


def test_regrow_stop_on_one_host_stops_all_hosts_of_an_elastic_job(hosts: Hosts) -> None:
    flags = MEET.replace("--nnodes 2", "--nnodes 1:2")
    script = TRAIN.replace("regrow.should_stop()", "False")
    agents = [hosts.start(f"{flags} --node-rank {n} --log-dir logs{n}", script) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    assert hosts.regrow("stop logs1").code == 0
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [143, 143], ended
    assert all("regrow stop" in output.split(" regrow: job ")[-1] for _, output in ended), ended


def test_regrow_stop_names_a_job_that_does_not_run_there(hosts: Hosts) -> None:
    asked = hosts.regrow("stop --rdzv-endpoint 127.0.0.1:PORT --rdzv-id other")
    assert asked.code == 75
    assert "job 'other': 127.0.0.1" in asked.output


# --- one host

Launch = Callable[..., Job]
LOOP = """
import regrow
step = 0
while step < 100_000:
    step += 1
    time.sleep(0.002)
    if step == 3:
        report("running", os.getpid())
    if regrow.should_stop():
        report("stopped", step)
        break
"""


def running(job: Job, count: int = 2) -> dict[int, int]:
    """Wait until the ranks make steps; return their process ids."""
    return {int(rank): int(pid) for rank, _, _, pid in job.reports(count)}


def same_step(job: Job, count: int = 2) -> bool:
    """Wait until the ranks have stopped; return whether they did at the same step."""
    return len({step for _, _, _, step in job.reports(count)}) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_at_one_worker_ends_it_as_before(launch: Launch, signum: int) -> None:
    job = launch(LOOP)
    os.kill(running(job)[1], signum)
    assert job.finish() == 1, job.output
    (failed,) = [each for each in job.events("worker.failed") if each["root_cause"]]
    assert (failed["rank"], failed["exit_code"]) == (1, -signum)


def test_a_signal_at_all_processes_of_a_job_is_one_request(launch: Launch) -> None:
    job = launch(LOOP)
    for pid in (*running(job).values(), job.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert same_step(job)
    assert job.finish() == 85, job.output
    assert job.events("job.finished")[0]["state"] == "STOPPED"


def test_sigusr1_while_workers_start_again_counts_at_their_first_call(launch: Launch) -> None:
    quiet = LOOP.replace("step == 3", "False")  # it may stop before that step
    job = launch("if ATTEMPT < 2: sys.exit(3)\n" + quiet, "--max-restarts=3")
    job.await_event("job.restarting", lambda event: event["delay_s"] > 0.5)
    job.signal(signal.SIGUSR1)
    assert same_step(job)
    assert job.finish() == 85, job.output
    assert [each["why"] for each in job.events("stop.requested")] == ["SIGUSR1"]
    assert job.output.count("SIGUSR1: the job stops when a worker calls should_stop") == 1


def test_regrow_stop_is_named_as_the_reason_of_the_stop(launch: Launch) -> None:
    job = launch(LOOP)
    running(job)
    asked = run([sys.executable, "-m", "regrow", "stop", str(job.log_dir)])
    assert asked.code == 0, asked.output
    assert same_step(job)
    assert job.finish() == 85, job.output
    assert [each["why"] for each in job.events("stop.requested")] == ["regrow stop"]


def test_the_time_limit_stops_the_job(launch: Launch) -> None:
    job = launch(LOOP, "--time-limit=4s", "--shutdown-timeout=2")
    running(job)
    assert same_step(job)
    assert job.finish() == 85, job.output
    assert job.events("stop.requested")[0]["why"] == "the time limit of 4 s"
    assert job.output.count("the time limit of 4 s asks the job to stop") == 1
    assert "is nearly over" not in job.output


def test_the_time_limit_stops_workers_that_do_not_call_should_stop(launch: Launch) -> None:
    job = launch("report('runs')\nforever()", "--time-limit=2s", "--shutdown-timeout=1")
    job.reports(2)
    assert job.finish() == 143, job.output


def test_a_worker_that_does_not_reach_the_step_gets_the_signal_at_last(launch: Launch) -> None:
    job = launch(LOOP + "    if RANK == 1 and step == 3: forever()\n", "--shutdown-timeout=2")
    running(job)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143, job.output
    assert job.events("stop.decided"), job.output
    assert job.events("job.stopping")[0]["grace_s"] < 2, "the rest of the grace"


def test_a_save_may_use_the_whole_grace(launch: Launch) -> None:
    # The signal at the end of the grace comes after 4 s.
    save = LOOP + "end = time.monotonic() + 4.2\nwhile time.monotonic() < end: time.sleep(0.01)\n"
    job = launch(save + "report('saved')", "--shutdown-timeout=5")
    running(job)
    job.signal(signal.SIGTERM)
    assert same_step(job)
    assert [words[2] for words in job.reports(2)] == ["saved", "saved"]
    assert job.finish() == 85, job.output


def test_a_save_that_takes_longer_than_the_grace_is_killed(launch: Launch) -> None:
    job = launch(LOOP + "forever()", "--shutdown-timeout=1")
    running(job)
    job.signal(signal.SIGTERM)
    assert same_step(job)
    assert job.finish() == 143, job.output


def test_a_failure_meanwhile_ends_the_job_as_the_signal_does(launch: Launch) -> None:
    fails = """\
saved = os.environ["REPORTS"] + ".saved"
if RANK == 0:
    open(saved, "w").close()
    forever()
while not os.path.exists(saved):  # a rank that has not stopped yet is ended
    time.sleep(0.005)
sys.exit(3)
"""
    job = launch(LOOP + fails, "--max-restarts=3", "--shutdown-timeout=4")
    running(job)
    job.signal(signal.SIGTERM)
    assert same_step(job)
    assert job.finish() == 143, job.output
    assert len(job.events("attempt.started")) == 1


def test_a_restart_after_a_failure_does_not_wait_for_a_worker_that_calls_should_stop(
    launch: Launch,
) -> None:
    fails = (
        LOOP
        + """\
    if ATTEMPT == 1:
        break
    if RANK == 0:
        open(os.environ["REPORTS"] + ".calls", "w").close()
    elif os.path.exists(os.environ["REPORTS"] + ".calls"):
        sys.exit(3)
"""
    )
    graces = ("--shutdown-timeout=1000", "--restart-timeout=1000")
    job = launch(fails, "--max-restarts=1", *graces)
    assert job.finish() == 0, job.output  # by its deadline, of far less than 1000 s


# A collective of NCCL after the end of a peer: a wait in native code, which no handler interrupts.
NATIVE_WAIT = """
import ctypes
mutex = (ctypes.c_char * 64)()
library = ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
def wait_in_native_code():
    open(os.environ["REPORTS"] + ".waits", "w").close()
    library.pthread_mutex_lock(mutex)
"""
WAITS = """
    if ATTEMPT == 1:
        break
    if RANK == 0:
        wait_in_native_code()
    elif os.path.exists(os.environ["REPORTS"] + ".waits"):
        sys.exit(3)
"""


def test_a_restart_does_not_wait_for_a_worker_that_calls_should_stop_and_is_in_native_code(
    launch: Launch,
) -> None:
    graces = ("--shutdown-timeout=1000", "--restart-timeout=1000")
    job = launch(NATIVE_WAIT + LOOP + WAITS, "--max-restarts=1", *graces)
    assert job.finish() == 0, job.output  # by its deadline, of far less than 1000 s
    (failed,) = job.events("worker.failed")
    assert failed["rank"] == 1


def test_a_handler_that_the_script_installs_later_has_its_grace(launch: Launch) -> None:
    handles = """
def save(*_):
    time.sleep(1)  # more than an agent waits for a worker in native code
    report("saved")
    os._exit(0)
"""
    later = """
    if step == 2:
        signal.signal(signal.SIGTERM, save)
    if RANK == 0 and step == 4:
        open(os.environ["REPORTS"] + ".handles", "w").close()
    elif RANK == 1 and os.path.exists(os.environ["REPORTS"] + ".handles"):
        sys.exit(3)
"""
    job = launch(handles + LOOP + later)
    assert job.finish() == 1, job.output
    assert "saved" in {words[2] for words in job.unread_reports()}


def test_a_training_that_ends_before_the_stop_has_succeeded(launch: Launch) -> None:
    job = launch(LOOP.replace("100_000", "20"))
    running(job)
    assert job.finish() == 0, job.output


def test_a_signal_ends_workers_that_do_not_call_should_stop_at_once(launch: Launch) -> None:
    job = launch("import regrow\nreport('runs')\nforever()")
    job.reports(2)
    job.signal(signal.SIGUSR1)  # not for this job
    job.signal(signal.SIGTERM)
    assert job.finish() == 143, job.output
    assert not job.events("stop.requested")


def test_ranks_of_a_wrapped_function_stop_at_the_same_step_after_a_restart(launch: Launch) -> None:
    wrapped = """
from regrow.inprocess import CallWrapper, Wrapper
@Wrapper()
def train(call: CallWrapper):
    step = 0
    while step < 100_000:
        step += 1
        time.sleep(0.002)
        if RANK == 1 and call.iteration == 0 and step == 30:
            raise RuntimeError("a fault")
        if call.iteration == 1 and step == 3:
            report("running", os.getpid())
        if regrow.should_stop():
            report("stopped", step)
            break
import regrow
train()
"""
    job = launch(wrapped)
    running(job)
    job.signal(signal.SIGTERM)
    assert same_step(job)
    assert job.finish() == 85, job.output


PROGRAM = """
import os, signal, sys, threading, time
from regrow.launch import LaunchConfig, elastic_launch
from regrow.workers import StoppedEarly

def train():
    import regrow
    calls = 1
    while not regrow.should_stop():
        calls += 1
        if calls == 5:
            open(f"calls-{os.environ['RANK']}", "w").close()
        time.sleep(0.002)
    return calls

def ask():
    while not (os.path.exists("calls-0") and os.path.exists("calls-1")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)

if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append("SIGUSR1"))
    threading.Thread(target=ask, daemon=True).start()
    try:
        elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="c10d", run_id="job"), train)()
    except StoppedEarly as error:
        values = error.return_values
        print(error.why, *received, sorted(values), len(set(values.values())))
"""


def test_a_program_gets_the_results_of_functions_that_stopped_early(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run([sys.executable, "program.py"], cwd=tmp_path)
    assert ended.output.splitlines()[-1] == "SIGUSR1 SIGUSR1 [0, 1] 1", ended.output


# --- elastic jobs


@pytest.mark.hosts
def test_a_host_with_notice_leaves_an_elastic_job_that_goes_on(hosts: Hosts) -> None:
    flags = MEET.replace("--nnodes 2", "--nnodes 1:2")
    script = TRAIN.replace("100_000", '(100_000 if world == "4" else 20)')
    agents = [hosts.start(f"{flags} --node-rank {n}", script) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    agents[1].send_signal(signal.SIGTERM)
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [0, 143], ended
    assert steps(hosts) == {}
    host = f"host {socket.gethostname()} (127.0.0.1)"
    for _, output in ended:
        assert f"SIGTERM on {host}: the ranks wait until the agents decide which" in output
        assert f"{host} leaves after SIGTERM; the others go on" in output
        assert "all ranks stop" not in output


def test_all_hosts_of_an_elastic_job_with_notice_stop_at_the_same_step(hosts: Hosts) -> None:
    flags = MEET.replace("--nnodes 2", "--nnodes 1:2")
    agents = [hosts.start(f"{flags} --node-rank {n}", TRAIN) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [85, 85], ended
    assert len(set(steps(hosts).values())) == 1


def test_a_host_that_stands_by_ends_with_a_job_that_stops(hosts: Hosts) -> None:
    flags = MEET.replace("--nnodes 2", "--nnodes 1:2 --rdzv-id mine")
    agents = [hosts.start(flags, TRAIN) for _ in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    spare = hosts.start(flags, TRAIN)
    assert spare.stdout is not None
    assert any("this node stands by" in line for line in spare.stdout)
    assert hosts.regrow("stop --rdzv-endpoint 127.0.0.1:PORT --rdzv-id mine").code == 0
    codes = [hosts.ended(agent)[0] for agent in agents]
    code, output = hosts.ended(spare)
    assert [*codes, code] == [85, 85, 85], output
    assert "the job was stopped by regrow stop, and this host stood by" in " ".join(output.split())
    assert "rank 0 of" not in output  # it does not go on alone
