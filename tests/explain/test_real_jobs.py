"""Real jobs that fail: the page names the cause, the evidence, what regrow did, and the cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.commands import run as run_command
from helpers.explained.lost_hosts import HOST_SCENARIOS
from helpers.explained.lost_hosts import run as run_on_hosts
from helpers.explained.scenarios import SCENARIOS, require_limited_memory, run
from helpers.hosts.netns import require_hosts
from regrow.explain import Explanation, page, read_explanations

thorough = pytest.mark.thorough


class Expected(NamedTuple):
    """What the page about the first failure of a job has to say."""

    cause: str
    rung: int | None
    evidence: str
    """A part of the page."""
    refused: tuple[int, ...]
    """The lower rungs with a reason why they were not used."""
    phase: str
    """A phase of the timeline."""
    long: str = ""
    """The setting that made it long."""


EXPECTED: Mapping[str, Expected] = {
    "exception": Expected("exception", 3, "KeyError: 'no such layer", (1, 2), "redoing"),
    "exit-code": Expected("exit", 3, "exit code 3", (1, 2), "redoing"),
    "sigkill": Expected("signal", 3, "killed by SIGKILL", (1, 2), "redoing"),
    "segfault": Expected("signal", 3, "Segmentation fault", (1, 2), "redoing"),
    "cpp-abort": Expected("signal", 3, "c10::Error: CUDA error", (1, 2), "redoing"),
    "hang-timer": Expected("hang", 3, "in fault (train.py", (1, 2), "silent", "regrow.expires"),
    "sigstop-heartbeat": Expected("heartbeat", 3, "by SIGSTOP", (1, 2), "silent", "--heartbeat"),
    "slow-stop": Expected("exception", 3, "NaN", (1, 2), "stopping", "--restart-timeout"),
    "during-a-checkpoint": Expected("signal", 3, "in phase checkpoint", (1, 2), "redoing"),
    "before-the-first-step": Expected(
        "exception", 3, "failed before its first step", (1, 2), "startup"
    ),
    "budget-spent": Expected("exception", 3, "No space left", (1, 2), "startup"),
    "crash-loop": Expected("exception", 3, "refused the connection", (1, 2), "startup"),
    "preempted": Expected("stop", None, "SIGTERM to the agent", (), "stopping"),
    "stopped-early": Expected("stop", None, "asked by SIGTERM to the agent", (), "stopping"),
    "in-process": Expected("exception", 1, "in fault", (), "redoing"),
    "in-process-time-out": Expected(
        "hang", 1, " time.sleep(1000)", (), "silent", "Wrapper(soft_timeout=)"
    ),
    "wrapper-gives-up": Expected("exception", 1, "gradient overflow", (), "redoing"),
    "replaced": Expected("signal", 2, "killed by SIGKILL", (1,), "barrier"),
    "standby": Expected("signal", 2, "a standby process (--standby)", (1,), "redoing"),
    "preload": Expected("exception", 3, "forked from the template", (1, 2), "redoing"),
    "continues-without": Expected("signal", 1, "went on without rank 1", (), "redoing"),
    "replaced-and-fails-again": Expected("signal", None, "sent by", (1,), "barrier"),
    "without-steps": Expected(
        "exit", 3, "the script does not call regrow.step", (1, 2), "processes"
    ),
    "injected": Expected("exception", 3, "by --chaos: raise", (1, 2), "startup"),
}
WITHOUT_REDONE_STEPS = {"before-the-first-step", "crash-loop", "without-steps"}
RARE: Mapping[str, tuple[Expected, pytest.MarkDecorator]] = {
    "exception-with-followers": (
        Expected("exception", 3, "as a result, rank", (1, 2), "redoing"),
        pytest.mark.training,  # torch
    ),
    "out-of-memory": (
        Expected("signal", 3, "out of memory", (1, 2), "redoing"),
        pytest.mark.hosts,  # a cgroup, as root
    ),
}
HOSTS: Mapping[str, Expected] = {
    "host-lost": Expected(
        "node", 4, "no heartbeat arrived", (1, 2, 3), "silent", "--rdzv-conf keep_alive_interval"
    ),
    "agent-killed": Expected("node", 4, "its connection broke", (1, 2, 3), "startup"),
    "host-preempted": Expected("node", 4, "SIGTERM", (1, 2, 3), "startup"),
    "server-host-lost": Expected(
        "node", 4, "took over the server", (1, 2, 3), "silent", "--rdzv-conf keep_alive_interval"
    ),
    "server-killed": Expected("server", None, "its agent started another server", (), "server"),
    "rendezvous-lost": Expected(
        "node", None, "witness", (1, 2, 3, 4), "searching", "--rdzv-conf reconnect_timeout"
    ),
    "host-joined": Expected("membership", 4, "host node3 asked to join", (1, 2, 3), "startup"),
    "host-lost-in-place": Expected(
        "node", 4, "in the same processes", (1, 2, 3), "silent", "--rdzv-conf keep_alive_interval"
    ),
    "host-joined-in-place": Expected(
        "membership", 4, "in the same processes", (1, 2, 3), "startup"
    ),
    "exception-on-another-host": Expected("exception", 3, "batch of 0 rows", (1, 2), "redoing"),
}


def check(logs: list[str], expected: Expected) -> list[Explanation]:
    found = list(read_explanations(logs, print).values())[-1]
    first, text = found[0], page(found[0])
    assert (first.cause, first.rung) == (expected.cause, expected.rung), text
    assert expected.evidence in " ".join(text.split()), text
    assert tuple(each.rung for each in first.refusals) == expected.refused, text
    assert not any("unknown" in each.reason for each in first.refusals), text
    assert expected.phase in {phase.name for phase in first.timeline}, text
    assert any(held.setting.startswith(expected.long) for held in first.long) or not expected.long
    assert first.cost.seconds == pytest.approx(
        first.timeline[-1].end_s if first.cause != "server" else 0.0
    )
    return found


@pytest.mark.parametrize(
    "name", [n if n == "exception" else pytest.param(n, marks=thorough) for n in EXPECTED]
)
@pytest.mark.timeout(120)
def test_the_failure_of_a_real_job_is_explained(name: str, tmp_path: Path) -> None:
    run(SCENARIOS[name], tmp_path)
    found = check([str(tmp_path / "runs")], EXPECTED[name])
    if name == "wrapper-gives-up":
        assert [each.rung for each in found] == [1, 3]
    if EXPECTED[name].rung == 3 and name not in WITHOUT_REDONE_STEPS:
        assert found[0].cost.steps, page(found[0])


LOADS = """
import os, time, regrow
from regrow.inprocess import CallWrapper, Wrapper

@Wrapper()
def train(call: CallWrapper):
    if call.iteration:
        time.sleep(1.0)  # loads its checkpoint
    for step in range(20 if call.iteration else 0, 60):
        time.sleep(0.02)
        if call.iteration == 0 and os.environ["RANK"] == "1" and step == 25:
            raise RuntimeError("a fault")
        regrow.step(step)

train()
"""


def test_the_loading_after_an_in_process_restart_is_part_of_its_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADS)
    start = ["--standalone", "--nproc-per-node", "2", "--log-dir", "runs", "train.py"]
    ended = run_command([sys.executable, "-m", "regrow.run", *start], cwd=tmp_path)
    assert ended.code == 0, ended.output
    ((found,),) = read_explanations([str(tmp_path / "runs")], print).values()
    phases = {phase.name: phase.length_s for phase in found.timeline}
    assert phases["startup"] == pytest.approx(1.0, abs=0.2), page(found)
    assert found.cost.seconds == pytest.approx(sum(phases.values()))
    assert found.cost.steps in (5, 6, 7)  # the other rank may be some steps ahead
    assert "lost: starting 1." in ended.output, ended.output


@thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [pytest.param(n, marks=mark) for n, (_, mark) in RARE.items()])
def test_the_failure_of_a_job_with_special_needs_is_explained(name: str, tmp_path: Path) -> None:
    if SCENARIOS[name].memory is not None:
        require_limited_memory()
    run(SCENARIOS[name], tmp_path, timeout_s=150)
    check([str(tmp_path / "runs")], RARE[name][0])


@thorough
@pytest.mark.hosts
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTS)
def test_the_loss_of_a_real_host_is_explained(name: str, tmp_path: Path) -> None:
    require_hosts()
    logs = run_on_hosts(HOST_SCENARIOS[name], tmp_path)
    check([str(log) for log in logs], HOSTS[name])
