"""The environment each worker starts with, as a pure function of the round and the worker."""

from __future__ import annotations

from collections.abc import Mapping

from regrow.agent._types import Worker, WorkerGroup

ATTEMPT_ENV = "REGROW_ATTEMPT"
HEARTBEAT_ENV = "REGROW_HEARTBEAT"
FENCING_TOKEN_ENV = "REGROW_FENCING_TOKEN"
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
ASYNC_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    *,
    run_id: str,
    restart_count: int,
    attempt: int,
    use_agent_store: bool,
    outer: Mapping[str, str],
    fencing_token: int | None = None,
    timer_file: str | None = None,
    heartbeat: float | None = None,
) -> dict[str, str]:
    """The variables a worker gets on top of the agent's own.

    Args:
        group: the worker group after its rendezvous.
        worker: the worker, with its ranks.
        run_id: the job's id.
        restart_count: failures so far; `TORCHELASTIC_RESTART_COUNT`.
        attempt: starts of workers so far, counting from 0; `REGROW_ATTEMPT`.
        use_agent_store: whether MASTER_ADDR:MASTER_PORT is already served by the agent.
        outer: the agent's environment.
        fencing_token: the round's number, which only grows and which all workers of the round
            have; `REGROW_FENCING_TOKEN`. A place that checkpoints are written to can refuse a
            lower one than it has seen. None where the rendezvous has no such number.
        timer_file: the pipe of the timer server that the worker speaks to;
            `TORCHELASTIC_TIMER_FILE`.
        heartbeat: seconds between two of its heartbeats; `REGROW_HEARTBEAT`.

    Raises:
        ValueError: `virtual_local_rank` and fewer visible devices than workers.
    """
    spec = group.spec
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
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store),
        ATTEMPT_ENV: str(attempt),
        **group.store_environment,
    }
    if fencing_token is not None:
        env[FENCING_TOKEN_ENV] = str(fencing_token)
    if timer_file is not None:
        env[TORCHELASTIC_TIMER_FILE] = timer_file
    if heartbeat is not None:
        env[HEARTBEAT_ENV] = repr(heartbeat)
    elif outer.get(HEARTBEAT_ENV):  # the agent runs in a worker of another one
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
    """The device that a worker with `virtual_local_rank` is shown.

    Args:
        local_rank: the worker.
        visible: the agent's CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: it names fewer devices.
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
