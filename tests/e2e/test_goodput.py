"""`regrow goodput` on a real job: the script measures its sleeps, phases and kills itself.

The script notes for each thing that it does the shortest and the longest time that it can have
taken: from a clock read inside of the marks, and from one around them. So a test machine that
suspends the script between a mark and a clock makes no difference.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs.e2e_job import Job
from regrow.ledger import Ledger, read_ledgers

Launch = Callable[..., Job]
STEP_S, WITHIN = 0.1, 0.02

MARKS = """
import json
from contextlib import contextmanager
from time import monotonic as now
import regrow

truth = os.open(os.environ["TRUTH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def note(what, shortest, longest, **more):
    line = json.dumps(dict(what=what, rank=RANK, shortest=shortest, longest=longest, **more))
    os.write(truth, line.encode() + b"\\n")

# Per open phase, and per step: the shortest and the longest time of the phases within.
within = [[0.0, 0.0]]

def done(what, shortest, longest, **more):
    inner = within.pop()
    within[-1][0] += shortest
    within[-1][1] += longest
    note(what, shortest - inner[1], longest - inner[0], **more)

@contextmanager
def phase(name):
    within.append([0.0, 0.0])
    before = now()
    with regrow.phase(name):
        begun = now()
        yield
        ended = now()
    done("phase:" + name, ended - begun, now() - before)

def step(n, before, begun, attempt=ATTEMPT):
    ended = now()
    regrow.step(n)
    after = now()
    inner = within[0]
    within[0] = [0.0, 0.0]
    note("step", ended - begun - inner[1], after - before - inner[0], step=n, attempt=attempt,
         pid=os.getpid())
    return ended, after

def wait_for_the_end():
    note("wait", 0, 0, since=now())
    with regrow.phase("wait"):
        time.sleep(60)

"""

TRAINING = f"""
resumed, last, how = json.loads(os.environ["PLAN"])[ATTEMPT]
with phase("load"):
    time.sleep(0.3)
within = [[0.0, 0.0]]
before = begun = now()
for n in range(resumed + 1, last + 1):
    with phase("data"):
        time.sleep(0.05)
    time.sleep({STEP_S})
    before, begun = step(n, before, begun)
    if n % 3 == 0:
        with phase("checkpoint"):
            time.sleep(0.2)
            with phase("upload"):
                time.sleep(0.1)
if how != "finish" and RANK == 0:
    wait_for_the_end()
time.sleep(0.6)
shortest, longest = within[0]
what = "finishing" if how == "finish" else "unfinished"
note(what, now() - begun - longest, 0, since=before, phases=shortest)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "exit":
    sys.exit(3)
"""


def finish(launch: Launch, truth: Path, plan: list[Any], status: int, *flags: str) -> Job:
    env = {"PLAN": json.dumps(plan), "TRUTH": str(truth)}
    job = launch(MARKS + TRAINING, "--rdzv-id=job7", *flags, standalone=False, env=env)
    assert job.finish() == status, job.output
    return job


def expected(notes: list[dict[str, Any]], ends: dict[str, float]) -> dict[str, list[float]]:
    """Return the shortest and longest worker-seconds of each bucket in a run.

    Args:
        notes: what the script has noted, in order; the steps have a mark "new" already.
        ends: when the job was known to be over, for what the script cannot measure itself.
    """
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in notes:
        bucket, shortest, longest = each["what"], each["shortest"], each["longest"]
        if bucket == "step":
            bucket = "productive" if each["new"] else "redone"
        if "since" in each:
            bucket = "unfinished" if bucket == "wait" else bucket  # a phase that was cut off
            end = min(at for at in ends.values() if at > each["since"])
            longest = end - each["since"] - each.get("phases", 0)
        found[bucket][0] += shortest
        found[bucket][1] += longest
    return found


def notes_of(truth: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in truth.read_text().splitlines()]


def mark_new_steps(notes: list[list[dict[str, Any]]]) -> set[int]:
    """Mark the steps that are new in the job's life; return the highest step of each attempt.

    The ledger counts the first step after a start as long as the mean of the other ones of the
    process, because it contains the startup. So this is done here, too.
    """
    reached: dict[tuple[int, int], int] = {}
    steps = [(i, each) for i, run in enumerate(notes) for each in run if each["what"] == "step"]
    for run, each in steps:
        key = (run, each["attempt"])
        reached[key] = max(reached.get(key, 0), each["step"])
    for run, each in steps:
        earlier = [step for key, step in reached.items() if key < (run, each["attempt"])]
        each["new"] = each["step"] > max(earlier, default=0)
    firsts = {(run, each["pid"], each["attempt"]): each for run, each in reversed(steps)}
    for first in firsts.values():
        others = [
            each
            for _, each in steps
            if each["pid"] == first["pid"] and all(each is not other for other in firsts.values())
        ]
        for limit in ("shortest", "longest"):
            first[limit] = sum(each[limit] for each in others) / len(others)
    _mark_repeated_phases(notes, firsts.values())
    return set(reached.values())


def _mark_repeated_phases(
    notes: list[list[dict[str, Any]]], firsts: Collection[dict[str, Any]]
) -> None:
    """Mark the phases of repeated steps as redone, except those before the first step."""
    for run in notes:
        since: dict[int, list[dict[str, Any]]] = defaultdict(list)  # the last step of each rank
        for each in run:
            if each["what"].startswith("phase:"):
                since[each["rank"]].append(each)
            elif each["what"] == "step":
                is_first = any(each is first for first in firsts)
                for phase in since.pop(each["rank"], []):
                    phase["what"] = phase["what"] if each["new"] or is_first else "redone"


def wrong(ledger: Ledger, limits: dict[str, list[float]]) -> dict[str, Any]:
    """Return the buckets that differ by more than 2 % from what the script has measured."""
    found = {bucket: ledger.seconds.get(bucket, 0.0) for bucket in limits}
    return {
        bucket: (found[bucket], shortest, longest)
        for bucket, (shortest, longest) in limits.items()
        if not shortest * (1 - WITHIN) <= found[bucket] <= longest * (1 + WITHIN)
    }


def ends_of(job: Job) -> dict[str, float]:
    """Return when the attempts of a run failed, or ended."""
    failed = {f"f{e['attempt']}": e["failed_monotonic"] for e in job.events("worker.failed")}
    return failed | {f"e{e['attempt']}": e["monotonic"] for e in job.events("attempt.ended")}


def test_each_bucket_of_a_killed_and_requeued_job_is_right_within_two_percent(
    launch: Launch, tmp_path: Path
) -> None:
    truths = [tmp_path / "truth0", tmp_path / "truth1"]
    plan = [(0, 12, "kill"), (6, 14, "exit")]
    first = finish(launch, truths[0], plan, 1, "--max-restarts=1")
    ended = time.monotonic()
    left = time.monotonic()  # a scheduler would need longer
    second = finish(launch, truths[1], [(14, 20, "finish")], 0)
    (ledger,) = read_ledgers([str(first.log_dir), str(second.log_dir)], print)

    notes = [notes_of(truth) for truth in truths]
    assert mark_new_steps(notes) == {12, 14, 20}
    limits: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for job, of_job in zip((first, second), notes, strict=True):
        for bucket, (shortest, longest) in expected(of_job, ends_of(job)).items():
            limits[bucket][0] += shortest
            limits[bucket][1] += longest
    for job in (first, second):  # what the agent does after its workers counts for both of them
        over = job.events("job.finished")[-1]["monotonic"]
        limits["finishing"][1] += 2 * (over - job.events("attempt.ended")[-1]["monotonic"])
    (requeued,), (gone,) = second.events("job.started"), first.events("job.finished")
    limits["waiting_for_scheduler"] = [2 * (left - ended), 2 * (requeued["time"] - gone["time"])]
    assert limits.keys() > {"phase:upload", "productive", "redone", "unfinished", "finishing"}
    assert wrong(ledger, limits) == {}, ledger.to_json()
    assert ledger.seconds["unknown"] == pytest.approx(0, abs=0.001)
    assert (ledger.highest_step, ledger.redone_steps) == (20, 6)
    (begun,), (over,) = first.events("job.started"), second.events("job.finished")
    assert ledger.total == pytest.approx(2 * (over["time"] - begun["time"]), rel=0.001)


IN_PROCESS = f"""
from regrow.inprocess import CallWrapper, Wrapper

@Wrapper(replace=True)
def train(call: CallWrapper):
    del within[:]
    within.append([0.0, 0.0])
    with phase("load"):
        time.sleep(0.2)
    within[0] = [0.0, 0.0]
    before = begun = now()
    first, last, faulty = [(1, 6, 0), (4, 9, 1), (7, 12, None)][call.iteration]
    for n in range(first, last + 1):
        with phase("data"):
            time.sleep(0.05)
        time.sleep({STEP_S})
        before, begun = step(n, before, begun, call.iteration)
    if faulty is None:
        return
    if RANK != faulty:
        with regrow.phase("wait"):
            time.sleep(60)
    time.sleep(0.6)
    note("unfinished", now() - begun, 0, since=before)
    if RANK == 0:
        raise ValueError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL)

train()
"""


def test_in_process_restarts_and_a_replaced_process_are_accounted_for(
    launch: Launch, tmp_path: Path
) -> None:
    truth = tmp_path / "truth"
    job = launch(MARKS + IN_PROCESS, "--max-restarts=1", env={"TRUTH": str(truth)})
    assert job.finish() == 0, job.output
    (ledger,) = read_ledgers([str(job.log_dir)], print)
    notes = notes_of(truth)
    assert mark_new_steps([notes]) == {6, 9, 12}
    restarts = {str(e["iteration"]): e["monotonic"] for e in job.events("inprocess.restarted")}
    assert wrong(ledger, expected(notes, restarts)) == {}, ledger.to_json()
    assert (ledger.highest_step, ledger.redone_steps, ledger.attempts) == (12, 6, 1)
    assert ledger.seconds["unknown"] == pytest.approx(0, abs=0.001)
    assert ledger.seconds.keys() > {"detection", "stopping", "meeting", "restart", "phase:wait"}


HANG = f"""
def stop(number, frame):
    begun = now()
    time.sleep(1.0)
    note("stopping", now() - begun, 0)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
done = 0 if ATTEMPT == 0 else 8
before = now()
for n in range(done + 1, done + 9):
    time.sleep({STEP_S})
    regrow.step(n)
    before, length = now(), now() - before
    note("step", length, length, at=before, attempt=ATTEMPT)
if ATTEMPT == 0:
    with regrow.expires(after=1.5 if RANK else 60):
        time.sleep(60)
"""


def test_a_hang_and_a_slow_stop_of_known_length_are_detection_and_stopping(
    launch: Launch, tmp_path: Path
) -> None:
    truth = tmp_path / "truth"
    flags = ("--timers", "--max-restarts=1", "--restart-timeout=5")
    job = launch(MARKS + HANG, *flags, env={"TRUTH": str(truth)})
    assert job.finish() == 0, job.output
    (ledger,) = read_ledgers([str(job.log_dir)], print)
    notes = notes_of(truth)
    failed = min(e["detected_monotonic"] for e in job.events("worker.failed"))
    over = min(e["monotonic"] for e in job.events("attempt.ended"))
    steps = [e for e in notes if e["what"] == "step" and e["attempt"] == 0]
    last = [max(e["at"] for e in steps if e["rank"] == rank) for rank in (0, 1)]
    # The first step of a process counts as long as the mean of the others.
    pace = [
        sum(e["longest"] for e in steps if e["rank"] == rank and e["at"] > first) / 7
        for rank in (0, 1)
        for first in [min(e["at"] for e in steps if e["rank"] == rank)]
    ]
    (slow,) = (e["shortest"] for e in notes if e["what"] == "stopping")
    waited = sum(failed - at - step for at, step in zip(last, pace, strict=True))
    limits = {
        "detection": [waited, waited],
        "unfinished": [sum(pace), sum(pace)],
        "stopping": [2 * slow, 2 * (over - failed)],
        "productive": [16 * STEP_S * 2 * 0.98, 16 * sum(pace)],
    }
    assert waited > 2 * 1.3
    assert wrong(ledger, limits) == {}, ledger.to_json()
