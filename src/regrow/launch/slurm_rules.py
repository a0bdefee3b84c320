"""Rules for the end of a Slurm job: requeue it, cancel it, or do nothing.

With `--requeue` the agents decide this, not the batch script. The script runs on the first host and
is lost with that host. An allocation that was submitted with `--no-kill` then stays empty until its
time limit. So an agent that still runs sends a request to Slurm. It requests a requeue if the same
command may succeed in another run. It requests the end of the allocation if the training is over
and no script is left to end it.

**One request, by the last agent.** A requeue ends everything that runs in the job. So it waits
until the workers of all hosts have saved. An agent that leaves the rendezvous knows how many other
agents are left (`PushingRendezvousHandler.others`), and stays until there is none. If other agents
go on, they decide. The remaining agents send their requests in turn, by rank (`turn`). So the first
agent that is alive sends it, also if the rendezvous is lost and no agent knows the others.

Each agent first checks that the job still runs, and that Slurm has not started it again. Slurm
executes the first request and ends the other agents, which have had time to report the end of the
job. An agent may receive a stop signal without knowing which agents are left. It first waits for
the grace of all workers since that signal.

**Slurm decides last.** The agents send no request for a job that Slurm already ends (`scancel`, a
manual requeue, its time limit).

This file contains the rules only; `slurm_requeue` sends the requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

FIRST_TURN_S = 5.0
"""Seconds for other agents to detect that none is left, and to report the end of the job."""
TURN_S = 5.0
"""Seconds between the turns of two agents."""
LAST_TURN = 4
"""Turn of all agents from this rank on; by then another agent has long ended the job."""


class Wish(Enum):
    """Request of an agent to Slurm."""

    NOTHING = "nothing"
    REQUEUE = "requeue"
    CANCEL = "cancel"


class Task(NamedTuple):
    """Slurm task in which an agent runs."""

    job: str
    """Name of the job in Slurm's commands: its id, or ID_TASK in an array."""
    starts: int
    """Number of times that Slurm has restarted the job."""
    node: str
    """Slurm's name of this node."""
    rank: int
    """Rank of this task in its step."""
    nodes: int
    """Number of nodes of the step."""
    tasks: int
    """Number of tasks of the step."""


class Facts(NamedTuple):
    """State of a job as Slurm shows it."""

    state: str
    starts: int
    batch: bool
    """Whether the job was submitted with a script."""
    batch_host: str


def task(environ: Mapping[str, str]) -> Task | None:
    """Read this process's Slurm task from its environment; None if it is no task.

    The result is also None for a process that a worker starts. Such a process must not end the
    job.
    """
    if "SLURM_JOB_ID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return None
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    # One task of an array has the id of the array as its job id, which would address all tasks.
    job = f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]
    in_step = "SLURM_STEP_ID" in environ
    return Task(
        job,
        _number(environ.get("SLURM_RESTART_COUNT")),
        environ.get("SLURMD_NODENAME", ""),
        _number(environ.get("SLURM_PROCID")) if in_step else 0,
        _number(environ.get("SLURM_STEP_NUM_NODES")) if in_step else 1,
        _number(environ.get("SLURM_STEP_NUM_TASKS")) if in_step else 1,
    )


def facts(shown: str) -> Facts | None:
    """Parse `scontrol show job -o`; None if the output is not about exactly one job."""
    lines = [line for line in shown.splitlines() if line.strip()]
    fields = dict(re.findall(r"(\w+)=(\S*)", lines[0])) if len(lines) == 1 else {}
    if "JobState" not in fields:
        return None
    return Facts(
        fields["JobState"],
        _number(fields.get("Restarts")),
        fields.get("BatchFlag", "0") != "0",
        fields.get("BatchHost", ""),
    )


def other_steps(shown: str, own: str) -> list[str]:
    """Return the ids of the job's other `srun` steps in `scontrol show step -o`.

    Args:
        shown: the output of scontrol.
        own: the id of this step, as in SLURM_STEP_ID.
    """
    steps = re.findall(r"^StepId=\S+?\.(\d+)\b", shown, flags=re.MULTILINE)
    return [step for step in steps if step != own]


def is_down(shown: str) -> bool:
    """Return whether `scontrol show node -o` shows a node that is down or unreachable."""
    state = re.search(r"\bState=(\S+)", shown)
    words = re.split(r"[+*]", state[1]) if state else []
    return "*" in (state[1] if state else "") or bool({"DOWN", "NOT_RESPONDING"} & {*words})


def where(shown: str) -> tuple[str, int]:
    """Parse the daemon's address and port in `scontrol show node -o`; "" and 0 if missing."""
    address, port = (re.search(rf"\b{name}=(\S+)", shown) for name in ("NodeAddr", "Port"))
    return address[1] if address else "", _number(port[1]) if port else 0


def turn(rank: int, nodes: int, saving_s: float = 0.0) -> float:
    """Return the seconds that an agent waits before its request to Slurm.

    Args:
        rank: rank of the agent's task.
        nodes: the most nodes that the job may have.
        saving_s: seconds for which workers of other nodes may still save, as far as the agent
            knows.
    """
    return max(saving_s, 0.0) + FIRST_TURN_S + min(rank, LAST_TURN) * TURN_S if nodes > 1 else 0.0


def wish(*, again: bool, ours: Task, theirs: Facts, batch_host_lost: bool) -> Wish:
    """Decide what the last agent requests from Slurm.

    Args:
        again: whether another run of the same command may succeed.
        ours: the agent's task.
        theirs: the state of the job as Slurm shows it now.
        batch_host_lost: the host of the batch script is lost.
    """
    if theirs.state != "RUNNING" or theirs.starts != ours.starts or not theirs.batch:
        return Wish.NOTHING
    if again:
        return Wish.REQUEUE
    return Wish.CANCEL if batch_host_lost else Wish.NOTHING


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
