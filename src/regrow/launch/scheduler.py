"""Detect a scheduler by its environment variables, at a cost that every job can afford."""

from __future__ import annotations

from collections.abc import Mapping

# For each scheduler, two variables. Every process in an allocation has the first. Each process that
# `srun` or `mpirun` starts, and each pod with a completion index, has the second.
_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
)


SERVED_BY_A_NODE = ("c10d", "static")
"""Rendezvous backends that a host of the job serves."""


def is_scheduled(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler runs this process and keeps its output as a log."""
    return any(in_allocation in environ for in_allocation, _ in _VARIABLES)


def is_placed(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler started this process, and kills the processes it leaves."""
    return "TORCHELASTIC_RUN_ID" not in environ and any(
        started in environ for _, started in _VARIABLES
    )
