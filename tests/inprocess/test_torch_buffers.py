"""A rank that waits for the rest of a message is woken, of which gloo itself tells nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.training, pytest.mark.timeout(120)]
SCRIPT = Path(__file__).parents[1] / "helpers" / "cut_ranks.py"


@pytest.mark.parametrize("case", ["send", "recv"])
def test_who_waits_for_a_message_that_is_half_way_is_woken(case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), case],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert json.loads(done.stdout) == {case: "interrupted"}, done.stderr
