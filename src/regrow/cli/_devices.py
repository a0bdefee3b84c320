"""How many devices this node has for workers, without torch in this process.

The count answers one question: how many workers find a device of their own? That is what a
process of theirs would be told by the CUDA runtime, so the runtime's rules are applied here to
what NVML reports (`visible_cuda_devices`, pure):

- `CUDA_VISIBLE_DEVICES` lists indices or (prefixes of) UUIDs; the list ends at the first entry
  that names no device (`-1`, an index too high), and naming a device twice hides all of them.
- MIG: a process sees one MIG instance at most, and no whole GPU beside it. So a list of MIG ids
  counts as one device, unless every worker is given its own entry of the list
  (`--virtual-local-rank`), which makes it as many as it names.

NVML is spoken to directly (`libnvidia-ml.so.1`, part of the driver, no package needed). Where it
is missing there may still be a device of another make: then a short-lived child, running the
workers' interpreter, asks torch. That takes torch's import, seconds; a plain number takes none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TORCH_TIMEOUT_S = 60.0
"""For the child that imports torch; a cold network file system takes half a minute."""

_NVML_SUCCESS = 0
_UUID_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU as NVML reports it."""

    uuid: str
    """`GPU-` and a UUID."""
    mig_mode: bool = False
    """Whether it is split into MIG instances; it is then no device itself."""
    instances: tuple[str, ...] = ()
    """The ids (`MIG-...`) of its instances."""


def visible_cuda_devices(
    gpus: Sequence[Gpu], visible: str | None, *, one_entry_each: bool = False
) -> int:
    """Count the CUDA devices that the workers can use.

    Args:
        gpus: the node's GPUs in NVML's order.
        visible: `CUDA_VISIBLE_DEVICES`, None if unset.
        one_entry_each: each worker is given one entry of `visible` instead of all.
    """
    if visible is None:
        if any(gpu.instances for gpu in gpus):
            return 1
        return sum(not gpu.mig_mode for gpu in gpus)
    chosen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        device = _named(entry, gpus)
        if device is None:
            break
        if device in chosen:
            return 0
        chosen.append(device)
    mig = [device for device in chosen if device.startswith("MIG-")]
    if mig and not one_entry_each:
        return 1
    return len(chosen)


def _named(entry: str, gpus: Sequence[Gpu]) -> str | None:
    """The id of the device that an entry of CUDA_VISIBLE_DEVICES names, or None."""
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    if digits:  # as C's strtoul reads it: what follows the digits does not count
        if int(digits) >= len(gpus):
            return None
        gpu = gpus[int(digits)]
        if gpu.mig_mode:
            return gpu.instances[0] if gpu.instances else None
        return gpu.uuid
    if entry.startswith("MIG-GPU-"):  # before driver 470: MIG-GPU-<uuid>/<instance>/<instance>
        owner = entry.removeprefix("MIG-").partition("/")[0]
        return entry if any(gpu.uuid == owner and gpu.instances for gpu in gpus) else None
    candidates = [gpu.uuid for gpu in gpus if not gpu.mig_mode]
    candidates += [instance for gpu in gpus for instance in gpu.instances]
    found = [c for c in candidates if c.startswith(entry)] if len(entry) > len("GPU-") else []
    return found[0] if len(found) == 1 else None


def read_nvml(library: Any = None) -> list[Gpu] | None:
    """Ask the driver for the node's GPUs.

    Args:
        library: NVML as `ctypes` loads it; None loads `libnvidia-ml.so.1`.

    Returns:
        the GPUs, or None where there is no NVIDIA driver that answers.
    """
    import ctypes

    if library is None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
    if library.nvmlInit_v2() != _NVML_SUCCESS:
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _NVML_SUCCESS:
            return None
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _NVML_SUCCESS:
                handles.append(handle)
        return [_read_gpu(library, handle) for handle in handles]
    finally:
        library.nvmlShutdown()


def _read_gpu(library: Any, handle: Any) -> Gpu:
    import ctypes

    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    # GPUs and drivers that know no MIG answer "not supported": not an error here.
    known = library.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
    if known != _NVML_SUCCESS or not current.value:
        return Gpu(_uuid(library, handle))
    library.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(most))
    instances = []
    for index in range(most.value):
        instance = ctypes.c_void_p()
        found = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(instance))
        if found == _NVML_SUCCESS:
            instances.append(_uuid(library, instance))
    return Gpu(_uuid(library, handle), True, tuple(instances))


def _uuid(library: Any, handle: Any) -> str:
    import ctypes

    buffer = ctypes.create_string_buffer(_UUID_BYTES)
    if library.nvmlDeviceGetUUID(handle, buffer, _UUID_BYTES) != _NVML_SUCCESS:
        return ""
    return buffer.value.decode("ascii", "replace")


class TorchUnavailable(Exception):
    """The workers' interpreter could not be asked; the message says why."""


_QUESTIONS = {
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0",
    "custom": "(lambda kind: None if kind != torch._C._get_privateuse1_backend_name() else"
    " (lambda module: module.device_count() if module and module.is_available() else 0)"
    "(getattr(torch, kind, None)))(sys.argv[1])",
}


def ask_torch(kind: str, timeout_s: float = TORCH_TIMEOUT_S) -> int | None:
    """Let a short-lived child count the devices that torch sees.

    Args:
        kind: `gpu`, `xpu`, `auto` (any accelerator) or the name of an out-of-tree device.
        timeout_s: seconds that the child may take.

    Returns:
        the number, or None if torch knows no such kind.

    Raises:
        TorchUnavailable: torch is not installed there, failed, or took too long.
    """
    import json
    import subprocess

    python = os.environ.get("PYTHON_EXEC", sys.executable)
    question = _QUESTIONS.get(kind, _QUESTIONS["custom"])
    code = f"import sys, json, torch; print('\\n' + json.dumps({question}))"
    try:
        child = subprocess.run(
            [python, "-c", code, kind],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TorchUnavailable(f"torch did not answer in {timeout_s:g} s ({python})") from None
    except OSError as error:
        raise TorchUnavailable(f"{python} does not start: {error.strerror}") from None
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise TorchUnavailable(f"torch cannot be asked by {python}: {last}")
    answer = json.loads(child.stdout.splitlines()[-1])
    return None if answer is None else int(answer)


def count_cpus() -> int:
    """The CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Devices:
    """Where the counts come from; tests put their own in."""

    nvml: Callable[[], list[Gpu] | None] = read_nvml
    """The node's NVIDIA GPUs, or None without a driver."""
    torch: Callable[[str], int | None] = ask_torch
    """A child's answer, see `ask_torch`."""
    cpus: Callable[[], int] = count_cpus
    """CPUs to use."""

    def count(self, kind: str, visible: str | None, *, one_entry_each: bool = False) -> int:
        """How many workers `--nproc-per-node=KIND` means.

        Args:
            kind: `cpu`, `gpu`, `xpu`, `auto`, or the name of an out-of-tree device.
            visible: `CUDA_VISIBLE_DEVICES`, None if unset.
            one_entry_each: see `visible_cuda_devices`.

        Raises:
            ValueError: there is no such device, or no such kind.
        """
        if kind == "cpu":
            return self.cpus()
        if kind in ("gpu", "auto"):
            gpus = self.nvml()
            if gpus:
                number = visible_cuda_devices(gpus, visible, one_entry_each=one_entry_each)
                return self._found(kind, number)
        elif not kind.isidentifier():
            raise ValueError(f"Unsupported nproc_per_node value: {kind}")
        try:
            answer = self.torch(kind)
        except TorchUnavailable as why:
            if kind == "auto":
                return self.cpus()
            if kind in ("gpu", "xpu"):
                raise ValueError(f"{kind.capitalize()}s cannot be counted: {why}") from None
            raise ValueError(f"Unsupported nproc_per_node value: {kind} ({why})") from None
        if answer is None:
            raise ValueError(f"Unsupported nproc_per_node value: {kind}")
        return self._found(kind, answer)

    def _found(self, kind: str, number: int) -> int:
        if number > 0:
            return number
        if kind == "auto":
            return self.cpus()
        names = {"gpu": "Cuda", "xpu": "Xpu"}
        raise ValueError(f"{names.get(kind, kind)} is not available.")
