"""The environment of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.jobs.plain_handler import PlainHandler
from regrow.agent import Worker, WorkerGroup, WorkerSpec
from regrow.agent.attempt.environment import HEARTBEAT_ENV, worker_environment
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted


def group(**spec: Any) -> WorkerGroup:
    made = WorkerGroup(
        WorkerSpec(
            role="trainer", local_world_size=2, rdzv_handler=PlainHandler(), entrypoint="x", **spec
        )
    )
    made.group_rank, made.group_world_size = 1, 3
    made.master_addr, made.master_port = "10.0.0.1", 29512
    return made


WORKER = Worker(local_rank=1, global_rank=3, role_rank=3, world_size=6, role_world_size=6)


def environment(
    outer: dict[str, str] | None = None,
    numbered: bool = False,
    **spec: Any,
) -> dict[str, str]:
    job = Job(group(**spec), adapted(PlainHandler()), print, attempt=2, round=3, numbered=numbered)
    job.remaining_restarts -= 1
    return worker_environment(job, WORKER, outer or {})


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


def test_a_worker_finds_the_store_of_its_attempt_where_its_group_has_one() -> None:
    found = group()
    found.store_environment = {"REGROW_STORE": "unix:/run/store"}
    shown = worker_environment(Job(found, adapted(PlainHandler()), print), WORKER, {})
    assert shown["REGROW_STORE"] == "unix:/run/store"
    assert "REGROW_STORE" not in environment()


def test_virtual_local_rank_narrows_to_the_workers_own_device() -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": "4, GPU-b"}, virtual_local_rank=True)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "GPU-b")


def test_virtual_local_rank_without_a_device_names_the_visible_ones() -> None:
    with pytest.raises(ValueError, match=r"local_rank 1 exceeds .*CUDA_VISIBLE_DEVICES=7"):
        environment({"CUDA_VISIBLE_DEVICES": "7"}, virtual_local_rank=True)


def test_a_worker_has_the_number_of_its_round_where_there_is_one() -> None:
    assert environment(numbered=True)["REGROW_FENCING_TOKEN"] == "3"
    assert "REGROW_FENCING_TOKEN" not in environment()


def test_workers_do_not_inherit_the_heartbeats_of_an_outer_agent() -> None:
    assert environment({HEARTBEAT_ENV: "7"})[HEARTBEAT_ENV] == ""
    assert HEARTBEAT_ENV not in environment()
