"""What a host does while it waits for a place in a round, for hours perhaps.

Its features prepare the start of the workers (`Feature.on_wait`). It also checks what the workers
need. An attempt would find a missing thing too, but only when the host has the seat of a lost one:
the failure would stop the job once more. A missing thing is logged and decides nothing, because it
may be there when the workers start.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regrow.agent.api import Worker
from regrow.agent.attempt.environment import own_device, worker_environment
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.agent.api import WorkerSpec
    from regrow.agent.job import Job

WAIT_S = 10.0
"""Seconds without a place in a round after which a node prepares the start of its workers.

Hosts that start one after the other wait as well. There, the template would slow the imports of the
first workers down.
"""

logger = get_logger(__name__)


@contextmanager
def prepared(job: Job, hidden: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let the features of a job prepare (`on_wait`) if the body takes longer than `WAIT_S`.

    Args:
        job: what the parts of the agent share.
        hidden: returns variables that replace those of the agent with credentials of the job.
    """
    timer = threading.Timer(WAIT_S, _prepare, [job, hidden])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _prepare(job: Job, hidden: Callable[[], Mapping[str, str]]) -> None:
    if job.leaving:
        return
    size = job.group.spec.local_world_size
    try:
        environment = worker_environment(job, Worker(0, 0, 0, size, size), os.environ)
        environment.update(hidden())
        for feature in job.features:
            feature.on_wait(environment)
    except Exception:  # the start of the workers shows whether it matters
        logger.exception("this node waits for a place, and could not prepare its workers")


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
