"""What a host that waits for a place finds wrong with the start of its workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.attempt.local import LocalWorkers
from regrow.agent.attempt.waiting import problems
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted
from regrow.workers.numa import AffinityMode, NumaOptions


def spec(folder: Path, **more: Any) -> WorkerSpec:
    """Return workers that can start."""
    script = folder / "train.py"
    script.touch()
    given = {"args": ("-u", str(script), "--lr", "1"), "entrypoint": sys.executable, **more}
    return WorkerSpec("trainer", 2, PlainHandler(), **given)


def test_nothing_is_wrong_with_workers_that_can_start(tmp_path: Path) -> None:
    assert problems(spec(tmp_path), str(tmp_path), {}) == []
    assert problems(spec(tmp_path, args=("-u", "-m", "train")), "/dev/null", {}) == []
    assert problems(spec(tmp_path, entrypoint=print), None, {}) == []
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert problems(spec(tmp_path, virtual_local_rank=True), None, two) == []


@pytest.mark.parametrize(
    ("more", "log_dir", "text"),
    [
        ({"args": ("-u", "/nowhere/train.py")}, None, "the script /nowhere/train.py is missing"),
        ({"entrypoint": "/nowhere/python"}, None, "/nowhere/python is missing"),
        ({"virtual_local_rank": True}, None, "local_rank 1 exceeds available GPUs"),
        ({}, "/nowhere", "the log directory /nowhere is missing"),
    ],
)
def test_each_thing_that_the_start_needs_is_looked_for(
    tmp_path: Path, more: dict[str, Any], log_dir: str | None, text: str
) -> None:
    (found,) = problems(spec(tmp_path, **more), log_dir, {"CUDA_VISIBLE_DEVICES": "0"})
    assert found.startswith(text)


def test_a_binding_to_cpus_that_fails_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(local_rank: int, options: NumaOptions) -> None:
        raise ValueError("this host has no GPU")

    monkeypatch.setattr("regrow.workers.bound_cpus", refuse)
    options = NumaOptions(AffinityMode.EXCLUSIVE)
    assert problems(spec(tmp_path, numa_options=options), None, {}) == ["this host has no GPU"]


def test_a_host_that_waits_warns_of_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = WorkerGroup(spec(tmp_path))
    job = Job(group, adapted(PlainHandler()), print)
    workers = LocalWorkers(job, cast(Any, None), heartbeats=False, log_dir=str(tmp_path))
    workers.on_wait({})
    assert not caplog.messages
    (tmp_path / "train.py").unlink()
    workers.on_wait({})
    assert "could not take it now: the script" in caplog.text
