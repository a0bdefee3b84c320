"""Counting devices: the CUDA runtime's rules, NVML as the driver answers, and who else is asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from regrow.cli._devices import (
    Devices,
    Gpu,
    TorchUnavailable,
    ask_torch,
    read_nvml,
    visible_cuda_devices,
)

A, B, C, D = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcd")
M1, M2, M3 = (f"MIG-{digit * 8}-0000-0000-0000-000000000000" for digit in "123")
WHOLE = (Gpu(A), Gpu(B), Gpu(C), Gpu(D))
SPLIT = (Gpu(A), Gpu(B, True, (M1, M2)), Gpu(C, True, (M3,)), Gpu(D, True))


@pytest.mark.parametrize(
    ("gpus", "visible", "count"),
    [
        ((), None, 0),
        (WHOLE, None, 4),
        (WHOLE, "", 0),
        (WHOLE, "-1", 0),
        (WHOLE, "NoDevFiles", 0),
        (WHOLE, "0", 1),
        (WHOLE, " 2 , 0 ", 2),
        (WHOLE, "0,1,-1,2", 2),
        (WHOLE, "0,4,1", 1),
        (WHOLE, "1,1", 0),
        (WHOLE, "1gpu,2", 2),
        (WHOLE, A, 1),
        (WHOLE, f"{A},{B},GPU-ffff", 2),
        (WHOLE, "GPU-aaaa,GPU-bb", 2),
        (WHOLE, "GPU-", 0),
        ((Gpu(A), Gpu(A[:-1] + "1")), "GPU-aaaa", 0),
        (WHOLE, f"{A},GPU-aaaa", 0),
        (WHOLE, f"0,{B}", 2),
        # A process sees one MIG instance, and no whole GPU beside it.
        (SPLIT, None, 1),
        ((Gpu(A), Gpu(D, True)), None, 1),
        (SPLIT, M1, 1),
        (SPLIT, f"{M1},{M3}", 1),
        (SPLIT, "MIG-9999", 0),
        (SPLIT, "0", 1),
        (SPLIT, "1", 1),
        (SPLIT, "3", 0),
        (SPLIT, f"MIG-{B}/1/0", 1),
        (SPLIT, f"MIG-{D}/1/0", 0),
    ],
)
def test_visible_devices_are_counted_as_the_cuda_runtime_does(
    gpus: Sequence[Gpu], visible: str | None, count: int
) -> None:
    assert visible_cuda_devices(gpus, visible) == count


def test_mig_instances_are_as_many_as_listed_if_each_worker_is_given_its_own() -> None:
    assert visible_cuda_devices(SPLIT, f"{M1},{M2},{M3}", one_entry_each=True) == 3
    assert visible_cuda_devices(SPLIT, f"{M1},{M1}", one_entry_each=True) == 0


@dataclass
class FakeNvml:
    """The functions of libnvidia-ml that are used; handles are 1 + index, instances 100 and up."""

    gpus: Sequence[Gpu]
    init_status: int = 0
    closed: bool = False

    def nvmlInit_v2(self) -> int:
        return self.init_status

    def nvmlShutdown(self) -> int:
        self.closed = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 1 + index
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        gpu = self.gpus[handle.value - 1]
        current._obj.value = gpu.mig_mode
        return 0 if gpu.mig_mode else 3  # NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, instance: Any) -> int:
        if index >= len(self.gpus[handle.value - 1].instances):
            return 6  # NVML_ERROR_NOT_FOUND
        instance._obj.value = 100 * handle.value + index
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: int) -> int:
        if handle.value < 100:
            uuid = self.gpus[handle.value - 1].uuid
        else:
            uuid = self.gpus[handle.value // 100 - 1].instances[handle.value % 100]
        buffer.value = uuid.encode()
        return 0 if len(uuid) < size else 7


def test_nvml_tells_the_gpus_and_their_mig_instances_and_is_shut_down() -> None:
    library = FakeNvml(SPLIT)
    assert read_nvml(library) == list(SPLIT)
    assert library.closed


def test_a_driver_that_does_not_answer_is_no_driver() -> None:
    assert read_nvml(FakeNvml(WHOLE, init_status=9)) is None


@dataclass
class FakeTorch:
    answer: int | str | None
    asked: str = ""

    def __call__(self, kind: str) -> int | None:
        self.asked = kind
        if isinstance(self.answer, str):
            raise TorchUnavailable(self.answer)
        return self.answer


def devices(gpus: Sequence[Gpu] | None, answer: int | str | None = "not to be asked") -> Devices:
    nvml = None if gpus is None else list(gpus)
    return Devices(nvml=lambda: nvml, torch=FakeTorch(answer), cpus=lambda: 12)


@pytest.mark.parametrize(
    ("node", "kind", "count"),
    [
        (devices(WHOLE), "cpu", 12),
        (devices(WHOLE), "gpu", 4),
        (devices(WHOLE), "auto", 4),
        (devices(None, 3), "gpu", 3),
        (devices((), 3), "gpu", 3),
        (devices(None, 3), "xpu", 3),
        (devices(None, 3), "auto", 3),
        (devices(None, 0), "auto", 12),
        (devices(None, "no torch"), "auto", 12),
        (devices(None, 5), "npu", 5),
    ],
)
def test_a_kind_is_counted_by_whoever_knows_it(node: Devices, kind: str, count: int) -> None:
    assert node.count(kind, None) == count


@pytest.mark.parametrize(
    ("node", "kind", "words"),
    [
        (devices(None, 0), "gpu", "Cuda is not available"),
        (devices(None, 0), "xpu", "Xpu is not available"),
        (devices(None, 0), "npu", "npu is not available"),
        (devices(None, "no torch"), "gpu", "cannot be counted: no torch"),
        (devices(None, None), "gpus", "Unsupported nproc_per_node value: gpus"),
        (devices(None, "no torch"), "gpus", "Unsupported nproc_per_node value: gpus"),
        (devices(WHOLE), "2.5", "Unsupported nproc_per_node value: 2.5"),
        (devices(WHOLE), "", "Unsupported nproc_per_node value"),
    ],
)
def test_a_kind_that_is_not_there_is_a_value_error(node: Devices, kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        node.count(kind, None)


def test_hidden_gpus_are_not_there() -> None:
    assert devices(WHOLE).count("auto", "") == 12
    with pytest.raises(ValueError, match="Cuda is not available"):
        devices(WHOLE).count("gpu", "-1")


def fake_python(folder: Path, body: str) -> str:
    """An interpreter whose `torch` is the given module."""
    folder.joinpath("torch.py").write_text(body)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


FAKE_TORCH = """
print("noise on stdout")
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 6)
class xpu:
    is_available = staticmethod(lambda: False)
class accelerator(cuda): pass
class npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 9)
class _C:
    _get_privateuse1_backend_name = staticmethod(lambda: "npu")
"""


def test_the_workers_interpreter_is_asked_for_what_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", fake_python(tmp_path, FAKE_TORCH))
    kinds = ("gpu", "auto", "xpu", "npu", "other")
    assert [ask_torch(kind) for kind in kinds] == [6, 6, 0, 9, None]


def test_an_interpreter_without_torch_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", fake_python(tmp_path, "raise ImportError('libcudart')"))
    with pytest.raises(TorchUnavailable, match="ImportError: libcudart"):
        ask_torch("gpu")


def test_a_torch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import signal; signal.pause()"
    monkeypatch.setenv("PYTHON_EXEC", fake_python(tmp_path, body))
    with pytest.raises(TorchUnavailable, match=r"did not answer in 0\.2 s"):
        ask_torch("gpu", timeout_s=0.2)
