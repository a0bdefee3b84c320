"""Counting devices: the CUDA driver, torch and the kernel's device files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from regrow.cli.args.devices import Devices, DevicesUnknown, ask_cuda, ask_torch

COMPILER = shutil.which("cc") or ""
DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100; }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("CUDA_VISIBLE_DEVICES")); return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA driver that counts the number in CUDA_VISIBLE_DEVICES, or fails without it."""
    if not COMPILER:
        pytest.skip("no C compiler")
    source = tmp_path / "cuda.c"
    source.write_text(DRIVER)
    subprocess.run([COMPILER, "-shared", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.parametrize(("visible", "count"), [(None, 0), ("3", 3), ("0", 0)])
@pytest.mark.usefixtures("driver")
def test_the_cuda_driver_counts_the_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ask_cuda(visible, one_entry_each=False) == count
    assert ask_cuda(visible, one_entry_each=True) == count


@pytest.mark.usefixtures("driver")
def test_mig_instances_are_as_many_as_listed_if_each_worker_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # a process sees one instance
    assert ask_cuda("MIG-1, MIG-2,MIG-3", one_entry_each=True) == 3
    assert ask_cuda("MIG-1, MIG-2,MIG-3", one_entry_each=False) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the driver refuses the list
    assert ask_cuda("MIG-1,MIG-1", one_entry_each=True) == 0


def test_a_host_without_a_driver_has_no_count(tmp_path: Path) -> None:
    assert ask_cuda(None, one_entry_each=False) is None


@dataclass
class FakeTorch:
    answer: int | str | None
    asked: str = ""

    def __call__(self, kind: str) -> int | None:
        self.asked = kind
        if isinstance(self.answer, str):
            raise DevicesUnknown(self.answer)
        return self.answer


def devices(cuda: int | None, answer: int | str | None = "not to be asked") -> Devices:
    """A node with this many CUDA devices that are not hidden; None: without a driver."""
    return Devices(
        cuda=lambda visible, one_entry_each: cuda,
        torch=FakeTorch(answer),
        cpus=lambda: 12,
        files=lambda: ["kfd", "dri"],
        backends=lambda: True,
    )


@pytest.mark.parametrize(
    ("node", "kind", "count"),
    [
        (devices(4), "cpu", 12),
        (devices(4), "gpu", 4),
        (devices(4), "auto", 4),
        (devices(None, 3), "gpu", 3),
        (devices(0, 3), "gpu", 3),
        (devices(None, 3), "xpu", 3),
        (devices(None, 3), "auto", 3),
        (devices(None, 0), "auto", 12),
        (devices(None, "no torch"), "auto", 12),
        (devices(None, 5), "npu", 5),
    ],
)
def test_a_kind_is_counted_by_its_driver_or_by_torch(node: Devices, kind: str, count: int) -> None:
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
        (devices(4), "2.5", "Unsupported nproc_per_node value: 2.5"),
        (devices(4), "", "Unsupported nproc_per_node value"),
    ],
)
def test_a_kind_that_is_not_there_is_a_value_error(node: Devices, kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        node.count(kind, None)


@pytest.mark.parametrize(
    ("files", "backends", "asks"),
    [(["null"], False, ""), (["null"], True, "auto"), (["accel0"], False, "auto")],
)
def test_torch_is_not_asked_for_an_accelerator_that_the_kernel_does_not_have(
    files: list[str], backends: bool, asks: str
) -> None:
    torch = FakeTorch(0)
    node = replace(devices(None), torch=torch, files=lambda: files, backends=lambda: backends)
    assert node.count("auto", None) == 12
    assert torch.asked == asks


def test_torch_is_not_asked_for_hidden_gpus() -> None:
    assert devices(0).count("auto", "") == 12
    with pytest.raises(ValueError, match="Cuda is not available"):
        devices(0).count("gpu", "-1")


def fake_python(folder: Path, body: str) -> str:
    """An interpreter with the given module as `torch`."""
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


def test_an_interpreter_without_torch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", fake_python(tmp_path, "raise ImportError('libcudart')"))
    with pytest.raises(DevicesUnknown, match="ImportError: libcudart"):
        ask_torch("gpu")


def test_a_torch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import signal; signal.pause()"
    monkeypatch.setenv("PYTHON_EXEC", fake_python(tmp_path, body))
    with pytest.raises(DevicesUnknown, match=r"did not report its devices within 0\.2 s"):
        ask_torch("gpu", timeout_s=0.2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpu", "Cuda is not available"),
        ("xpu", "Xpu is not available"),
        ("gpus", r"Unsupported nproc_per_node value: gpus: .* \(did you mean gpu\?\)"),
    ],
)
def test_torch_is_not_asked_for_what_cannot_be_there(kind: str, words: str) -> None:
    def ask(kind: str) -> int | None:
        raise AssertionError(f"torch was asked for {kind}")

    node = Devices(
        cuda=lambda *_: None, torch=ask, files=lambda: ["null", "tty"], backends=lambda: False
    )
    with pytest.raises(ValueError, match=words):
        node.count(kind, None)
