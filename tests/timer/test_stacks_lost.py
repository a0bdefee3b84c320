"""A handler that was taken away before a fork is set again in the child."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, signal
from regrow.timer.stacks import answering

answering.arm()
for number in answering.CANDIDATES:
    signal.signal(number, signal.SIG_DFL)
if not (pid := os.fork()):
    marker = answering.arm()
    with open("/proc/self/status", "rb") as status:
        caught = answering.Signals.of(status.read()).caught
    os._exit(0 if caught >> marker.one_thread - 1 & caught >> marker.all_threads - 1 & 1 else 7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_arms_itself_after_its_parent_lost_the_handlers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=40, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
