"""The request of an agent to Slurm at the end of a job, based on Slurm's output."""

from __future__ import annotations

import signal

import pytest

from helpers.jobs.environments import recorded
from regrow.cli.exit_codes import outcome
from regrow.launch import slurm_rules as allocation
from regrow.launch.slurm_requeue import may_succeed_again
from regrow.launch.slurm_rules import Facts, Task, Wish
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from regrow.workers import ChildFailedError, ProcessFailure, SignalException, StoppedEarly

OURS = Task("7", starts=0, node="n2", rank=1, nodes=4, tasks=4)
THEIRS = Facts("RUNNING", starts=0, batch=True, batch_host="n1")
# Recorded in Slurm 22.05.8, and shortened.
JOB = (
    "JobId=7 JobName=train UserId=user(1000) GroupId=user(1000) JobState=RUNNING Reason=None"
    " Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 NodeList=n[1-4]"
    " BatchHost=n1 NumNodes=4 Command=/home/user/a b=c.sh StdOut=/home/user/slurm-7.out\n"
)
STEPS = (
    "StepId=7.batch UserId=0 StartTime=2026-11-23T08:41:14 State=RUNNING Nodes=1 Name=batch\n"
    "StepId=7.extern UserId=0 StartTime=2026-11-23T08:41:14 State=RUNNING Nodes=4 Name=extern\n"
    "StepId=7.0 UserId=0 StartTime=2026-11-23T08:41:14 State=RUNNING Nodes=4 Name=regrow\n"
)
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1 Gres=gpu:8 NodeAddr=10.77.0.1 NodeHostName=n1"
    " Version=22.05.8 OS=Linux State={} ThreadsPerCore=1 Partitions=main Reason=Not responding\n"
)


def test_a_task_of_a_step_knows_its_job_and_its_place() -> None:
    environ = recorded("slurm22-step-of-4", SLURM_RESTART_COUNT="2")
    assert allocation.task(environ) == Task("1", 2, "n3", 2, 4, 4)


def test_a_task_of_an_array_does_not_mean_the_whole_array() -> None:
    # SLURM_JOB_ID of the last one of an array is the id of the array.
    environ = recorded("slurm22-array")
    assert environ["SLURM_JOB_ID"] == environ["SLURM_ARRAY_JOB_ID"]
    found = allocation.task(environ)
    assert found is not None
    assert found.job == "3_1"


def test_a_batch_script_is_a_task_of_one_node() -> None:
    found = allocation.task(recorded("slurm22-batch-script"))
    assert found is not None
    assert (found.rank, found.nodes, found.tasks) == (0, 1, 1)


def test_what_a_worker_starts_is_no_task_and_neither_is_a_process_without_slurm() -> None:
    assert allocation.task(recorded("slurm22-step-of-4", TORCHELASTIC_RUN_ID="job")) is None
    assert allocation.task({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_what_slurm_shows_of_a_job_is_read() -> None:
    assert allocation.facts(JOB) == Facts("RUNNING", 2, True, "n1")
    interactive = JOB.replace("BatchFlag=1", "BatchFlag=0").replace("BatchHost=n1 ", "")
    assert allocation.facts(interactive) == Facts("RUNNING", 2, False, "")


@pytest.mark.parametrize("shown", ["", "\n", "No jobs in the system\n", JOB + JOB])
def test_output_that_is_not_of_a_single_job_has_no_facts(shown: str) -> None:
    assert allocation.facts(shown) is None


@pytest.mark.parametrize(
    ("more", "others"),
    [("", []), ("StepId=7.1 UserId=0 State=RUNNING\n", ["1"]), ("StepId=7+0.3 Name=x\n", ["3"])],
)
def test_the_steps_that_run_beside_this_one_are_found(more: str, others: list[str]) -> None:
    assert allocation.other_steps(STEPS + more, "0") == others


@pytest.mark.parametrize(
    ("state", "down"),
    [
        ("ALLOCATED", False),
        ("MIXED+DRAIN", False),
        ("ALLOCATED+NOT_RESPONDING", True),
        ("DOWN+NOT_RESPONDING", True),
        ("DOWN*", True),
        ("MIXED*+DRAIN", True),
    ],
)
def test_a_node_that_slurm_does_not_reach_is_down(state: str, down: bool) -> None:
    assert allocation.is_down(NODE.format(state)) is down


def test_the_address_of_a_node_s_daemon_is_read() -> None:
    assert allocation.where(NODE.format("IDLE")) == ("10.77.0.1", 0)
    assert allocation.where(NODE.format("IDLE Port=6820")) == ("10.77.0.1", 6820)
    assert allocation.where("") == ("", 0)


@pytest.mark.parametrize(
    ("again", "theirs", "lost", "wish"),
    [
        (True, THEIRS, False, Wish.REQUEUE),
        (True, THEIRS, True, Wish.REQUEUE),
        (False, THEIRS, True, Wish.CANCEL),
        (False, THEIRS, False, Wish.NOTHING),
        # Another agent, a user or Slurm was faster.
        (True, Facts("COMPLETING", 1, True, "n1"), False, Wish.NOTHING),
        (True, Facts("PENDING", 1, True, ""), False, Wish.NOTHING),
        (True, Facts("CANCELLED", 0, True, "n1"), False, Wish.NOTHING),
        (True, Facts("TIMEOUT", 0, True, "n1"), False, Wish.NOTHING),
        # Slurm has started the job again meanwhile.
        (True, Facts("RUNNING", 1, True, "n1"), False, Wish.NOTHING),
        (False, Facts("RUNNING", 1, True, "n1"), True, Wish.NOTHING),
        # An allocation of salloc's belongs to its user.
        (True, Facts("RUNNING", 0, False, ""), False, Wish.NOTHING),
        (False, Facts("RUNNING", 0, False, ""), True, Wish.NOTHING),
    ],
)
def test_slurm_receives_the_request_that_the_job_needs(
    again: bool, theirs: Facts, lost: bool, wish: Wish
) -> None:
    assert allocation.wish(again=again, ours=OURS, theirs=theirs, batch_host_lost=lost) is wish


def test_agents_ask_in_the_order_of_their_ranks_and_one_alone_at_once() -> None:
    turns = [allocation.turn(rank, 1000) for rank in range(1000)]
    assert turns[: allocation.LAST_TURN] == sorted(set(turns[: allocation.LAST_TURN]))
    assert max(turns) == turns[allocation.LAST_TURN]
    assert allocation.turn(0, 1) == 0.0


def test_an_agent_that_does_not_know_the_others_waits_for_their_save() -> None:
    assert allocation.turn(1, 4, saving_s=95.0) == 95.0 + allocation.turn(1, 4)
    assert allocation.turn(1, 4, saving_s=-5.0) == allocation.turn(1, 4)
    assert allocation.turn(0, 1, saving_s=95.0) == 0.0  # there are no others


@pytest.mark.parametrize(
    "error",
    [
        None,
        SignalException("", signal.SIGTERM),
        SignalException("", signal.SIGINT),
        SignalException("", signal.SIGUSR1),
        RendezvousConnectionError("lost"),
        RendezvousTimeoutError("late"),
        RendezvousClosedError("closed"),
        RendezvousError("refused"),
        StoppedEarly("SIGTERM", {}),
        ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "")}),
        KeyboardInterrupt(),
        SystemExit(2),
        RuntimeError("a bug"),
        OSError(28, "no space left"),
    ],
)
def test_a_job_is_requeued_for_the_exit_codes_that_the_page_names(
    error: BaseException | None,
) -> None:
    code = 0 if error is None else outcome(error)[0]
    assert may_succeed_again(error) is (code in (75, 85, 143))
