"""The buckets of the ledger: what a second of a worker was spent on."""

from __future__ import annotations

from typing import Final

from regrow._accounts import PHASE

PRODUCTIVE: Final = "productive"
REDONE: Final = "redone"
UNFINISHED: Final = "unfinished"
STARTUP_PROCESSES: Final = "startup_processes"
STARTUP_SCRIPT: Final = "startup_script"
STARTUP_FIRST_STEP: Final = "startup_first_step"
DETECTION: Final = "detection"
STOPPING: Final = "stopping"
MEETING: Final = "meeting"
RESTART: Final = "restart"
WAITING_FOR_NODES: Final = "waiting_for_nodes"
WAITING_FOR_SCHEDULER: Final = "waiting_for_scheduler"
LOST_RANKS: Final = "lost_ranks"
FINISHING: Final = "finishing"
UNKNOWN: Final = "unknown"

MEANINGS: Final = {
    PRODUCTIVE: "steps reached for the first time",
    REDONE: "steps that had been done before",
    UNFINISHED: "steps and phases that a failure or a stop cut off",
    STARTUP_PROCESSES: "start of the workers' processes",
    STARTUP_SCRIPT: "imports, up to the first step or phase of the script",
    STARTUP_FIRST_STEP: "up to the first step, less the time of one step",
    DETECTION: "from a failure or a hang until the agent acted on it",
    STOPPING: "workers are stopped",
    MEETING: "nodes find each other and form a round; ranks wait",
    RESTART: "pauses, new processes for lost ones, calls that begin again",
    WAITING_FOR_NODES: "before the first round of a node",
    WAITING_FOR_SCHEDULER: "between two runs of the job",
    LOST_RANKS: "ranks without a process, while the others continue",
    FINISHING: "after the last step, or after the end of the workers",
    UNKNOWN: "not accounted for",
}
"""The meaning of each bucket, in the order of a job's life. Phases of a script have buckets too."""


def is_phase(bucket: str) -> bool:
    """Return whether the bucket is a phase that the script named with `regrow.phase`."""
    return bucket.startswith(PHASE)


_TITLES: Final = {UNFINISHED: "unfinished steps", MEETING: "rendezvous"}


def title(bucket: str) -> str:
    """Return the name of a bucket for people."""
    if bucket in _TITLES:
        return _TITLES[bucket]
    if is_phase(bucket):
        return f"phase {bucket.removeprefix(PHASE)}"
    main, _, part = bucket.partition("_") if bucket.startswith("startup_") else (bucket, "", "")
    return f"{main}: {part.replace('_', ' ')}" if part else main.replace("_", " ")
