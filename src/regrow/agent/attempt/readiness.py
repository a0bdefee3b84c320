"""What would keep the workers of this host from starting, found while the host waits for a place.

An attempt finds the same at its start. By then the host has the seat of a lost one, and its failure
stops the job once more. So a host that waits looks for it early, and logs it. Nothing is decided by
it: what is missing may be there when the workers start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from regrow.agent.attempt.environment import own_device

if TYPE_CHECKING:
    from regrow.agent.api import WorkerSpec


def problems(spec: WorkerSpec, log_dir: str | None, outer: Mapping[str, str]) -> list[str]:
    """Return why the workers of this host could not start now; empty if nothing is known.

    Args:
        spec: the workers.
        log_dir: the folder for their logs; None: not known.
        outer: the agent's environment.
    """
    found = []
    for local_rank in range(spec.local_world_size):
        try:
            if spec.virtual_local_rank:
                own_device(local_rank, outer.get("CUDA_VISIBLE_DEVICES"))
            if spec.numa_options:
                from regrow.workers import bound_cpus

                bound_cpus(local_rank, spec.numa_options)
        except (OSError, ValueError) as error:
            found.append(str(error))
            break  # the others fail for the same reason
    if isinstance(spec.entrypoint, str):
        found += _of_program(spec.entrypoint, [str(arg) for arg in spec.args], outer)
    if log_dir and log_dir != os.devnull and not os.access(log_dir, os.W_OK | os.X_OK):
        found.append(f"the log directory {log_dir} is missing, or not writable")
    return found


def _of_program(program: str, args: list[str], outer: Mapping[str, str]) -> list[str]:
    if shutil.which(program, path=outer.get("PATH", os.defpath)) is None:
        return [f"{program} is missing, or not executable"]
    script = next((arg for arg in args if arg != "-u"), "")
    is_python = os.path.basename(program).startswith(("python", "pypy"))
    if is_python and script and script[0] != "-" and not os.access(script, os.R_OK):
        return [f"the script {script} is missing, or not readable"]
    return []
