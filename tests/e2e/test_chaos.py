"""`regrow run --chaos`: each fault once, in a whole job, and what a user sees of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job
from helpers.processes import state_of, wait_until
from regrow.agent.features.host_faults import reason_refused
from regrow.chaos import parse
from regrow.cli import main
from regrow.explain import read_explanations as explain_job

Launch = Callable[..., Job]

# Attempt 0 takes steps of 10 ms until it fails; later ones end at once. Rank 0 reports pauses.
WORKS = """
import regrow
report("ready", os.getpid())
last = time.monotonic()
step = 0
while ATTEMPT == 0 and not os.path.exists(os.environ["REPORTS"] + ".end"):
    time.sleep(0.01)
    step += 1
    regrow.step(step)
    if time.monotonic() - last > 0.3:
        report("paused", int(1000 * (time.monotonic() - last)))
    last = time.monotonic()
"""
WITHOUT_REGROW = WORKS.replace("import regrow", "import sys").replace("regrow.step(step)", "pass")


def end(job: Job) -> int:
    """Let the workers of the first attempt end by themselves, and the job with them."""
    (job.script.parent / "reports.end").touch()
    return job.finish()


@pytest.mark.parametrize(
    ("fault", "signame", "text"),
    [
        ("kill", "SIGKILL", "SIGKILL"),
        ("segfault", "SIGSEGV", "SIGSEGV"),
        ("raise", None, "InjectedFault: injected by regrow run --chaos"),
    ],
)
def test_a_fault_that_ends_a_worker_is_healed_and_marked_as_injected(
    launch: Launch, fault: str, signame: str | None, text: str
) -> None:
    job = launch(WORKS, "--max-restarts=1", f"--chaos={fault} rank=1 at=300ms")
    assert job.finish() == 0, job.output
    (injected,) = job.events("chaos.injected")
    (failed,) = job.events("worker.failed")
    assert (injected["fault"], injected["rank"], injected["pid"]) == (fault, 1, failed["pid"])
    assert injected["at_s"] >= 0.3
    assert injected["monotonic"] <= failed["failed_monotonic"]
    assert (failed["rank"], failed["signal"], failed["injected"]) == (1, signame, fault)
    assert text in failed["message"]
    assert f"--chaos: injected {fault} into rank 1 (pid {failed['pid']})" in job.stderr
    (started,) = job.events("job.started")
    assert started["chaos"] == f"{fault} rank=1 at=300ms"


WRAPPED = """
import regrow
from regrow.inprocess import CallWrapper, Wrapper
reached = 0

@Wrapper()
def train(call: CallWrapper):
    global reached
    for step in range(max(reached - 5, 0) + 1, 10**6):
        if call.iteration and step > reached + 5:
            return
        time.sleep(0.02)
        regrow.step(step)
        reached = max(step, reached) if not call.iteration else reached

train()
"""


@pytest.mark.parametrize(("script", "rung"), [(WORKS, 3), (WRAPPED, 1)])
def test_the_ledger_keeps_what_an_injected_fault_cost_apart(
    launch: Launch, capsys: pytest.CaptureFixture[str], script: str, rung: int
) -> None:
    job = launch(script, "--max-restarts=1", "--chaos=raise rank=1 at=1s")
    assert job.finish() == 0, job.output
    (explained,) = explain_job([str(job.log_dir)], print).popitem()[1]
    assert (explained.injected, explained.rung) == ("raise", rung)
    assert main(["goodput", "--json", str(job.log_dir)]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["injected_faults"] == 1
    assert explained.cost.worker_seconds
    assert ledger["injected_worker_seconds"] == pytest.approx(
        explained.cost.worker_seconds, rel=0.05, abs=0.02
    )
    lost = ledger["worker_seconds"] - ledger["buckets"]["productive"]
    assert 0 < ledger["injected_worker_seconds"] < lost
    assert main(["goodput", str(job.log_dir)]) == 0
    assert "of which injected by --chaos: " in capsys.readouterr().out


def test_a_stopped_worker_is_resumed_after_its_time(launch: Launch) -> None:
    job = launch(WORKS, "--chaos=stop rank=1 at=200ms for=1s")
    (injected,) = [job.await_event("chaos.injected")]
    suspended = job.await_event("worker.suspended")
    resumed = job.await_event("worker.resumed")
    assert (suspended["rank"], suspended["pid"]) == (1, injected["pid"])
    assert resumed["monotonic"] >= injected["until_monotonic"] - 0.01
    assert injected["for_s"] == 1
    assert end(job) == 0, job.output


def test_a_worker_that_is_stopped_without_a_time_stays_stopped(launch: Launch) -> None:
    job = launch(WORKS, "--chaos=stop rank=0 at=200ms", "--shutdown-timeout=1")
    pid = job.await_event("worker.suspended")["pid"]
    assert state_of(pid) == "T"
    assert job.events("chaos.injected")[0]["until_monotonic"] is None
    job.signal(signal.SIGTERM)
    assert job.finish() == 143, job.output


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_a_worker_pauses_for_the_time_of_the_fault(launch: Launch, fault: str) -> None:
    # Repeated, because the first one may come while the worker begins.
    job = launch(WORKS, f"--chaos={fault} rank=1 every=2s for=1s")
    while True:
        ((rank, _, word, number),) = job.reports()
        if (rank, word) == ("1", "paused") and int(number) > 900:
            break
    assert end(job) == 0, job.output


def test_a_slow_worker_takes_longer_for_its_steps(launch: Launch) -> None:
    counts = """
import regrow
report("ready", os.getpid())
done = 0
while not os.path.exists(os.environ["REPORTS"] + ".end"):
    begun = time.monotonic()
    for _ in range(50_000):
        pass
    done = max(done, time.monotonic() - begun)
    if done > 0.15:  # 50,000 turns take 2 ms; a held GIL adds 190 ms
        report("slow", int(1000 * done))
        done = 0
    time.sleep(0)
"""
    job = launch(counts, "--chaos=slow rank=0 at=200ms by=100 for=30s", nproc=1)
    assert job.reports()[0][2] == "ready"
    job.await_event("chaos.injected")
    end(job)


def test_a_hang_without_end_is_noticed_by_the_means_of_the_job(launch: Launch) -> None:
    timed = """
import regrow
while ATTEMPT == 0:
    with regrow.expires(after=1):
        for _ in range(30):
            time.sleep(0.01)
"""
    job = launch(timed, "--timers", "--max-restarts=1", "--chaos=hang rank=1 at=300ms")
    assert job.finish() == 0, job.output
    (expired,) = job.events("timer.expired")
    (failed,) = job.events("worker.failed")
    assert (expired["injected"], failed["injected"]) == ("hang", "hang")
    assert "_injected_hang" in expired["stood"]


def test_a_worker_fault_waits_until_the_worker_has_imported_regrow(launch: Launch) -> None:
    late = "report('waits')\ntime.sleep(1)\n" + WORKS
    job = launch(late, "--max-restarts=1", "--chaos=raise rank=1 at=0s")
    assert job.finish() == 0, job.output
    (failed,) = job.events("worker.failed")
    assert failed["injected"] == "raise"
    assert "raise into rank 1 waits: rank 1 " in job.stderr


def test_a_worker_that_never_imports_regrow_gets_process_faults_only(launch: Launch) -> None:
    plan = "--chaos=raise rank=1 at=100ms; hang rank=0 every=200ms times=1; kill rank=0 at=500ms"
    job = launch(WITHOUT_REGROW, "--max-restarts=1", plan)
    assert job.finish() == 0, job.output
    assert [each["fault"] for each in job.events("chaos.injected")] == ["kill"]
    skipped = {each["fault"]: each["reason"] for each in job.events("chaos.skipped")}
    assert skipped["hang"] == "rank 0 has not imported regrow, which hang needs"
    assert skipped["raise"].startswith("until the end of the job: rank 1 has not imported regrow")


def test_random_faults_of_one_seed_strike_the_same_ranks_in_each_run(launch: Launch) -> None:
    plan = "--chaos=mtbf=200ms seed=3 faults=stop for=1ms"
    drawn = []
    for _ in range(2):
        job = launch(WORKS, plan)
        job.await_event("chaos.injected", lambda event: event["at_s"] > 0.5)
        assert end(job) == 0, job.output
        done = job.events("chaos.injected") + job.events("chaos.skipped")
        drawn.append([each["rank"] for each in sorted(done, key=lambda e: e["monotonic"])[:2]])
    assert drawn[0] == drawn[1]


def test_without_the_flag_a_variable_injects_nothing(launch: Launch) -> None:
    job = launch(WORKS, env={"PET_CHAOS": "kill rank=0 every=100ms", "REGROW_CHAOS": "nobody"})
    job.reports(2)
    assert end(job) == 0, job.output
    assert job.events("chaos.injected") == []


# --- faults of the host


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 4 MB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() or subprocess.run(mounted, check=False).returncode:
        pytest.skip("this process cannot mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@pytest.mark.hosts
def test_a_disk_is_full_for_its_time_and_empty_afterwards(launch: Launch, small_disk: Path) -> None:
    before = free(small_disk)
    job = launch(WORKS, f"--chaos=fill path={small_disk} at=200ms for=1s")
    wait_until(lambda: free(small_disk) == 0, "full")
    wait_until(lambda: free(small_disk) == before, "empty")
    assert end(job) == 0, job.output
    assert job.events("chaos.injected")[0]["path"] == str(small_disk)


@pytest.mark.hosts
def test_a_full_disk_is_empty_when_the_agent_has_been_killed(
    launch: Launch, small_disk: Path
) -> None:
    before = free(small_disk)
    job = launch(WORKS, f"--chaos=fill path={small_disk} at=200ms for=1h")
    wait_until(lambda: free(small_disk) == 0, "full")
    job.signal(signal.SIGKILL)
    job.finish()
    wait_until(lambda: free(small_disk) == before, "empty")


SPACE = ["unshare", "--net", "sh", "-c"]
VETH = (
    "ip link set lo up && ip link add v0 type veth peer name v1 && ip link set v0 up"
    " && ip link set v1 up && "
)


def in_a_namespace(
    tmp_path: Path, chaos: str, rest: str = "", path: str = ""
) -> subprocess.Popen[str]:
    """Start a job in a network namespace with two interfaces.

    `rest` runs after it, and the folder `path` precedes those of PATH.
    """
    probe = [*SPACE, VETH + "tc qdisc add dev v0 root pfifo limit 0"]
    if os.geteuid() or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this process cannot make a network namespace")
    script = tmp_path / "train.py"
    script.write_text("import time\nfor _ in range(250): time.sleep(0.01)\n")
    path = f"PATH={path}:$PATH " if path else ""
    job = (
        f"{path}{sys.executable} -m regrow.run --standalone --log-dir={tmp_path} --chaos='{chaos}'"
    )
    watch = "(while sleep 0.1; do tc qdisc show dev v0; done) & watch=$!; "
    return subprocess.Popen(
        [*SPACE, f"{VETH}{watch}{job} {script}; echo over $?; {rest} sleep 0.5; kill $watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.hosts
def test_a_link_is_cut_for_its_time(tmp_path: Path) -> None:
    output, _ = in_a_namespace(tmp_path, "cut rank=0 at=200ms for=1s").communicate(timeout=50)
    assert "injected cut into the host of rank 0 for 1 s" in output
    assert "limit 0p" in output
    assert "limit 0p" not in output.partition("over")[2], output


@pytest.mark.hosts
def test_a_link_is_delayed_for_its_time_where_the_kernel_can_do_it(tmp_path: Path) -> None:
    queue = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    possible = subprocess.run(queue, capture_output=True, check=False).returncode == 0
    plan = "delay rank=0 by=10ms at=200ms for=1s"
    output, _ = in_a_namespace(tmp_path, plan).communicate(timeout=50)
    if not possible:
        assert "--chaos: delay: the kernel has no netem queue" in output
        return
    assert "qdisc netem" in output
    assert "qdisc netem" not in output.partition("over")[2], output


FAKE_TC = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *{fails}*) echo "Error: Specified qdisc kind is unknown." >&2; exit 2;; esac
"""


@pytest.mark.hosts
@pytest.mark.parametrize("fails", ["nothing", "v1"])
def test_a_delay_sets_the_queue_of_each_interface_and_removes_it(
    tmp_path: Path, fails: str
) -> None:
    # The kernel may have no netem, so this is the command line only.
    log, fake = tmp_path / "tc.log", tmp_path / "bin" / "tc"
    fake.parent.mkdir()
    fake.write_text(FAKE_TC.format(log=log, fails=fails))
    fake.chmod(0o755)
    plan = "delay rank=0 by=10ms at=200ms for=300ms"
    process = in_a_namespace(tmp_path, plan, path=str(fake.parent))
    output, _ = process.communicate(timeout=50)
    assert "over 0" in output, output
    begun = [f"qdisc add dev {name} root netem delay 10ms" for name in ("v0", "v1")]
    done = [f"qdisc del dev {name} root" for name in ("v0", "v1")]
    lines = log.read_text().splitlines()
    assert lines[0] == "qdisc add dev lo root netem delay 1ms"  # can the kernel do it?
    assert [line for line in lines if " lo " not in line] == [*begun, *done]
    left_out = "--chaos: left out delay into rank 0: tc: Error: Specified qdisc kind is unknown."
    assert (left_out in output) == (fails == "v1"), output


def test_the_machines_own_network_is_never_touched() -> None:
    refused = reason_refused(parse("cut rank=0 at=1s for=1s"))
    own = os.path.exists("/proc/sys/net/core/netdev_budget")
    if os.geteuid():
        assert refused == "cut: only root changes the network of a host"
    elif own and shutil.which("tc"):
        assert refused is not None
        assert "machine's own network namespace" in refused
    assert refused is not None or not own
