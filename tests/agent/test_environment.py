"""What a worker finds in its environment."""

from __future__ import annotations

from typing import Any, cast

import pytest

from regrow.agent import Worker, WorkerGroup, WorkerSpec
from regrow.agent._environment import HEARTBEAT_ENV, worker_environment


def group(**spec: Any) -> WorkerGroup:
    made = WorkerGroup(
        WorkerSpec(
            role="trainer", local_world_size=2, rdzv_handler=cast(Any, None), entrypoint="x", **spec
        )
    )
    made.group_rank, made.group_world_size = 1, 3
    made.master_addr, made.master_port = "10.0.0.1", 29512
    return made


WORKER = Worker(local_rank=1, global_rank=3, role_rank=3, world_size=6, role_world_size=6)


def environment(
    outer: dict[str, str] | None = None,
    timer_file: str | None = None,
    heartbeat: float | None = None,
    **spec: Any,
) -> dict[str, str]:
    return worker_environment(
        group(**spec),
        WORKER,
        run_id="job",
        restart_count=1,
        attempt=2,
        use_agent_store=False,
        outer=outer or {},
        timer_file=timer_file,
        heartbeat=heartbeat,
    )


def test_a_worker_gets_every_variable_of_the_contract() -> None:
    assert environment() == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29512",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "REGROW_ATTEMPT": "2",
    }


def test_the_users_own_settings_win() -> None:
    outer = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert outer.items() <= environment(outer).items()


def test_a_worker_is_told_of_the_timer_servers_pipe_if_there_is_one() -> None:
    assert environment(timer_file="/run/timers")["TORCHELASTIC_TIMER_FILE"] == "/run/timers"
    assert "TORCHELASTIC_TIMER_FILE" not in environment()


def test_a_worker_finds_the_store_of_its_attempt_where_its_group_has_one() -> None:
    found = group()
    found.store_environment = {"REGROW_STORE": "unix:/run/store"}
    shown = worker_environment(
        found, WORKER, run_id="job", restart_count=0, attempt=0, use_agent_store=False, outer={}
    )
    assert shown["REGROW_STORE"] == "unix:/run/store"
    assert "REGROW_STORE" not in environment()


def test_virtual_local_rank_narrows_to_the_workers_own_device() -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": "4, GPU-b"}, virtual_local_rank=True)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "GPU-b")


def test_virtual_local_rank_without_a_device_says_what_is_visible() -> None:
    with pytest.raises(ValueError, match=r"local_rank 1 exceeds .*CUDA_VISIBLE_DEVICES=7"):
        environment({"CUDA_VISIBLE_DEVICES": "7"}, virtual_local_rank=True)


def test_workers_beat_if_their_agent_says_so_and_not_because_another_one_does() -> None:
    assert environment(heartbeat=2.5)[HEARTBEAT_ENV] == "2.5"
    assert environment({HEARTBEAT_ENV: "7"}, heartbeat=2.5)[HEARTBEAT_ENV] == "2.5"
    assert environment({HEARTBEAT_ENV: "7"})[HEARTBEAT_ENV] == ""
    assert HEARTBEAT_ENV not in environment()
