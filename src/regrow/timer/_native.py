"""Native stacks of a process by py-spy, for those who ask for them.

py-spy reads a process from outside by ptrace, so it shows what `faulthandler` cannot: in which
function of a library a thread waits. It takes a second and more for a process that has torch in
it, stops the process meanwhile, and in many containers it is not allowed to. So it is a choice of
the user's, has a budget, and what it says when it cannot is passed on in a line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence


def native_stacks(pids: Sequence[int], budget: float) -> dict[int, str]:
    """What py-spy shows of each process, or a line that says why it does not.

    Args:
        pids: asked at the same time.
        budget: s, in all; what has not answered by then is killed.
    """
    program = _program()
    if program is None:
        return dict.fromkeys(pids, "py-spy is not installed (pip install py-spy)")
    deadline = time.monotonic() + budget
    running = {pid: _start(program, pid) for pid in pids}
    return {pid: _end(process, deadline, budget) for pid, process in running.items()}


def _program() -> str | None:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _start(program: str, pid: int) -> subprocess.Popen[str] | str:
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        return f"{program} cannot be started: {error.strerror}"


def _end(process: subprocess.Popen[str] | str, deadline: float, budget: float) -> str:
    if isinstance(process, str):
        return process
    try:
        shown, complaint = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"py-spy did not finish within {budget:g} s"
    if process.returncode == 0:
        return shown
    # The first line says what, the others how to use sudo, or a backtrace of py-spy itself.
    line = next(filter(None, complaint.splitlines()), f"exit code {process.returncode}")
    advice = "; it needs CAP_SYS_PTRACE" if "ermission" in line else ""
    return f"py-spy failed: {line.removeprefix('Error: ')}{advice}"
