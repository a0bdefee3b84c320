"""The check of a rank's GPU, without a GPU and with a simulated one."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.suite.unskipped import A_GPU
from regrow.inprocess import FrozenState, State
from regrow.inprocess.exception import TimeoutError
from regrow.inprocess.finalize import ThreadedFinalize
from regrow.inprocess.health_check import CudaHealthCheck

LONG = timedelta(seconds=30)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def cuda(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that was used; records the calls."""
    fake = SimpleNamespace(synchronized=[], selected=[], synchronize=lambda device: None)

    def synchronize(device: int) -> None:
        fake.synchronized.append((device, threading.current_thread() is threading.main_thread()))
        fake.synchronize(len(fake.synchronized))

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "synchronize": synchronize,
        "set_device": fake.selected.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fake


@pytest.fixture
def state() -> FrozenState:
    return State(0, 1).freeze()


def test_a_machine_without_a_gpu_is_healthy(torch: Any, state: FrozenState) -> None:
    if torch.cuda.is_available():
        pytest.skip(A_GPU)
    called: list[int] = []
    assert CudaHealthCheck()(state) is state
    assert ThreadedFinalize(LONG, called.append, (1,))(state) is state
    assert called == [1]
    assert not torch.cuda.is_initialized()


def test_a_gpu_that_was_not_used_is_not_touched(
    cuda: Any, torch: Any, state: FrozenState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    CudaHealthCheck()(state)
    assert cuda.synchronized == []


@pytest.mark.parametrize(("local_rank", "device"), [(None, 0), ("1", 1), ("7", 0), ("x", 0)])
def test_the_rank_s_own_device_is_synchronized_twice_in_a_thread(
    cuda: Any,
    state: FrozenState,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str | None,
    device: int,
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert CudaHealthCheck()(state) is state
    assert cuda.synchronized == [(device, False)] * 2
    ThreadedFinalize(LONG, print)(state)
    assert cuda.selected == [device]


@pytest.mark.parametrize("when", [1, 2])
def test_an_error_of_the_device_is_one_of_the_check(
    cuda: Any, state: FrozenState, when: int
) -> None:
    def synchronize(count: int) -> None:
        if count == when:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.synchronize = synchronize
    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaHealthCheck()(state)


def test_a_device_that_does_not_answer_is_given_up(cuda: Any, state: FrozenState) -> None:
    held = threading.Event()
    cuda.synchronize = lambda count: held.wait()
    with pytest.raises(TimeoutError, match=r"CudaHealthCheck-0 did not finish within 0.01 s"):
        CudaHealthCheck(timedelta(milliseconds=10))(state)
    held.set()
