"""Count the devices of this node for workers, without importing torch in this process.

The count is the number of workers that get a device of their own. The CUDA driver in a worker
determines it, by rules for `CUDA_VISIBLE_DEVICES`, UUIDs and MIG instances. So a short-lived child
loads the driver (`libcuda.so.1`) and queries it, under the same environment variables. The child is
not this process, because a process must not fork workers after it has used the driver.

A process sees at most one MIG instance. So a list of MIG ids counts as one device, unless every
worker gets its own entry of the list (`--virtual-local-rank`).

Without a CUDA device, the node may still have a device of another vendor. A child with the workers'
interpreter then queries torch. The import of torch takes seconds; a plain number as
`--nproc-per-node` avoids it. The child is not started if the result is certain: the kernel has no
matching device, or no installed package can add a device of that name to torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regrow.utils import run_within

TIMEOUT_S = 60.0
"""Time limit of a child; the import of torch from a cold network file system needs 30 s."""


#: Prefixes of the names of GPUs and XPUs in /dev, as the kernel's drivers create them. GPUs:
#: NVIDIA, NVIDIA's embedded boards, AMD (kfd), Windows' kernel for Linux (dxg). XPUs: all devices
#: that can render (dri), and dxg.
_DRIVERS = {
    "gpu": ("nvidia", "nvhost", "nvgpu", "nvmap", "kfd", "dxg"),
    "xpu": ("dri", "dxg"),
}
#: The same for all accelerators: also Habana's (hl), Huawei's (davinci), Meta's (mtia), and those
#: of the kernel's subsystem for accelerators (accel).
_DRIVERS["auto"] = (*_DRIVERS["gpu"], *_DRIVERS["xpu"], "hl", "davinci", "mtia", "accel")


def device_files() -> list[str]:
    """Return the names in /dev."""
    return os.listdir("/dev")


def torch_has_backends() -> bool:
    """Return whether an installed package may add a kind of device to torch at its import."""
    from importlib.metadata import entry_points

    # The packages of another interpreter are not known here.
    return "PYTHON_EXEC" in os.environ or bool(entry_points(group="torch.backends"))


class DevicesUnknown(Exception):
    """A child process could not count devices; the message contains the reason."""


_CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""
_QUESTIONS = {
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0",
    "custom": "(lambda kind: None if kind != torch._C._get_privateuse1_backend_name() else"
    " (lambda module: module.device_count() if module and module.is_available() else 0)"
    "(getattr(torch, kind, None)))(sys.argv[1])",
}


def ask_cuda(visible: str | None, one_entry_each: bool, timeout_s: float = TIMEOUT_S) -> int | None:
    """Count the CUDA devices that the workers see, in a short-lived child process.

    Args:
        visible: the value of `CUDA_VISIBLE_DEVICES`; None if unset.
        one_entry_each: each worker gets one entry of `visible` instead of all entries.
        timeout_s: time limit of the child in seconds.

    Returns:
        The number of devices; None without a driver.
    """
    try:
        count = int(_ask(sys.executable, "-I", "-S", "-c", _CUDA, timeout_s=timeout_s))
    except DevicesUnknown:
        return None
    entries = visible.split(",") if visible else []
    if count and one_entry_each and all(entry.strip().startswith("MIG-") for entry in entries):
        return len(entries) or count
    return count


def ask_torch(kind: str, timeout_s: float = TIMEOUT_S) -> int | None:
    """Count the devices that torch sees, in a short-lived child process.

    Args:
        kind: `gpu`, `xpu`, `auto` (any accelerator) or the name of an out-of-tree device.
        timeout_s: time limit of the child in seconds.

    Returns:
        The number of devices; None if torch does not know the kind.

    Raises:
        DevicesUnknown: torch is not installed there, failed, or timed out.
    """
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    code = f"import sys, torch; print('\\n', {_QUESTIONS.get(kind, _QUESTIONS['custom'])})"
    answer = _ask(python, "-c", code, kind, timeout_s=timeout_s)
    return None if answer == "None" else int(answer)


def _ask(*command: str, timeout_s: float) -> str:
    """Return the last word that a command prints."""
    import subprocess

    python = command[0]
    try:
        child = run_within(command, timeout_s)
    except subprocess.TimeoutExpired:
        raise DevicesUnknown(
            f"torch did not report its devices within {timeout_s:g} s ({python})"
        ) from None
    except OSError as error:
        raise DevicesUnknown(f"{python} does not start: {error.strerror}") from None
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise DevicesUnknown(f"torch in {python} does not answer: {last}")
    return child.stdout.split()[-1]


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Devices:
    """Sources of the device counts; tests replace them."""

    cuda: Callable[[str | None, bool], int | None] = ask_cuda
    """Returns the count of the CUDA driver; see `ask_cuda`."""
    torch: Callable[[str], int | None] = ask_torch
    """Returns the count of torch; see `ask_torch`."""
    cpus: Callable[[], int] = count_cpus
    """Returns the number of usable CPUs."""
    files: Callable[[], Sequence[str]] = device_files
    """Returns the names in /dev."""
    backends: Callable[[], bool] = torch_has_backends
    """Returns whether torch may know kinds of devices from other packages."""

    def count(self, kind: str, visible: str | None, *, one_entry_each: bool = False) -> int:
        """Return the number of workers for `--nproc-per-node=KIND`.

        Args:
            kind: `cpu`, `gpu`, `xpu`, `auto`, or the name of an out-of-tree device.
            visible: the value of `CUDA_VISIBLE_DEVICES`; None if unset.
            one_entry_each: see `ask_cuda`.

        Raises:
            ValueError: this node has no such device, or the kind is unknown.
        """
        if kind == "cpu":
            return self.cpus()
        if kind in ("gpu", "auto"):
            number = self.cuda(visible, one_entry_each)
            if number is not None and (number or visible is not None):
                return self._found(kind, number)
        if (
            kind in _DRIVERS
            and not any(name.startswith(_DRIVERS[kind]) for name in self.files())
            and (kind != "auto" or not self.backends())
        ):
            return self._found(kind, 0)
        own = kind in ("gpu", "xpu", "auto")
        if not own and not (kind.isidentifier() and self.backends()):
            raise ValueError(_unsupported(kind))
        try:
            answer = self.torch(kind)
        except DevicesUnknown as why:
            if kind == "auto":
                return self.cpus()
            if kind in ("gpu", "xpu"):
                raise ValueError(
                    f"--nproc-per-node {kind}: the devices of this host cannot be counted: {why}. "
                    f"Give a number instead"
                ) from None
            raise ValueError(
                f"Unsupported nproc_per_node value: {kind}: its devices cannot be counted: {why}. "
                f"Give a number instead"
            ) from None
        if answer is None:
            raise ValueError(_unsupported(kind))
        return self._found(kind, answer)

    def _found(self, kind: str, number: int) -> int:
        if number > 0:
            return number
        if kind == "auto":
            return self.cpus()
        names = {"gpu": "Cuda", "xpu": "Xpu"}
        raise ValueError(f"{names.get(kind, kind)} is not available.")


def _unsupported(kind: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(kind, ["cpu", "gpu", "xpu", "auto"], n=1)
    return f"Unsupported nproc_per_node value: {kind}: give a number, cpu, gpu, xpu or auto" + (
        f" (did you mean {near[0]}?)" if near else ""
    )
