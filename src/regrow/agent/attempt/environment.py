"""The environment of each worker, as a pure function of the round and the worker.

Features add variables (`before_start`), and `workers.logs.specs` adds the path of the error file.
This module also warns about an address that this host cannot resolve.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from regrow.utils import get_logger, start_thread

if TYPE_CHECKING:
    from regrow.agent.api import Worker
    from regrow.agent.job import Job

ATTEMPT_ENV = "REGROW_ATTEMPT"
HEARTBEAT_ENV = "REGROW_HEARTBEAT"
FENCING_TOKEN_ENV = "REGROW_FENCING_TOKEN"
HEALTH_CHECK_PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
USE_AGENT_STORE_ENV = "TORCHELASTIC_USE_AGENT_STORE"
SHARING_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable: with 1, worker rank 0 serves torch's store, and with 0, an agent does."""
ASYNC_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")

logger = get_logger(__name__)


def worker_environment(job: Job, worker: Worker, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets on top of the agent's; features add more.

    `REGROW_FENCING_TOKEN` is the number of the round. It only grows, and all workers of a round
    have the same one. Checkpoint storage can refuse a number lower than the highest it has seen.
    The variable is missing if the rendezvous does not number its rounds.

    Args:
        job: the job, in a round that is formed.
        worker: the worker, with its ranks.
        outer: the agent's environment.

    Raises:
        ValueError: `virtual_local_rank` is set, and fewer devices than workers are visible.
    """
    group, spec = job.group, job.group.spec
    env = {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(job.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        USE_AGENT_STORE_ENV: str(spec.rdzv_handler.use_agent_store),
        ATTEMPT_ENV: str(job.attempt),
        **group.store_environment,
    }
    if job.numbered:
        env[FENCING_TOKEN_ENV] = str(job.round)
    if outer.get(HEARTBEAT_ENV):  # this agent runs inside a worker of another agent
        env[HEARTBEAT_ENV] = ""
    for name in ASYNC_ERROR_HANDLING:
        env[name] = outer.get(name, "1")
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        if name in outer:
            env[name] = outer[name]
    if spec.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = own_device(
            worker.local_rank, outer.get("CUDA_VISIBLE_DEVICES")
        )
    return env


def own_device(local_rank: int, visible: str | None) -> str:
    """Return the device that a worker with `virtual_local_rank` may see.

    Args:
        local_rank: local rank of the worker.
        visible: the agent's CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: `visible` names too few devices.
    """
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if local_rank >= len(devices):
        raise ValueError(
            f"local_rank {local_rank} exceeds available GPUs in CUDA_VISIBLE_DEVICES={visible}: "
            f"start at most {len(devices)} workers per node, or make more devices visible"
        )
    return devices[local_rank]


def warn_if_unknown(addr: str) -> None:
    """Resolve MASTER_ADDR on another thread; warn if this host cannot resolve it.

    MASTER_ADDR is a host name if the backend knows the nodes by name only (`file`). Workers that
    cannot resolve it retry for minutes without a message. The agent starts them anyway, because a
    name service may learn the name later.
    """
    start_thread(lambda: _resolve(addr), "regrow-master-addr")


def _resolve(addr: str) -> None:
    try:
        socket.getaddrinfo(addr, None)
    except (OSError, UnicodeError) as error:
        logger.warning(
            "this host cannot resolve MASTER_ADDR %r, where the workers meet: %s. They cannot reach"
            " each other: start the agent of that host with --local-addr ADDRESS, an address that"
            " all hosts reach",
            addr,
            error,
        )
