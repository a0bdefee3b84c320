"""torch's process groups outlive the leftovers of a function, and end with the iteration.

If a model in DistributedDataParallel holds the last reference to its group, it ends the group with
the interpreter's lock held. gloo's threads may be waiting for the lock, and both wait forever.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "group_order.py"


def test_groups_end_after_the_frames_and_the_garbage_of_the_function_before_the_next_call() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, timeout=150)
    assert done.returncode == 0
    ended = json.loads(done.stdout)
    assert ended[:2] == ["frame", "garbage"]
    assert sorted(ended[2:]) == ["default group", "group"]
