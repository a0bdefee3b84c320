"""torch's process groups outlive what a function has left behind, and end with the iteration.

A model in DistributedDataParallel that holds the last reference to its group ends it with the
interpreter's lock, for which gloo's threads may be waiting: both then wait for ever.
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
    done = subprocess.run([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, timeout=50)
    assert done.returncode == 0
    ended = json.loads(done.stdout)
    assert ended[:2] == ["frame", "garbage"]
    assert sorted(ended[2:]) == ["default group", "group"]
