"""The store that the workers of a whole job share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import DEADLINE_S, Job

Launch = Callable[..., Job]

MEET = """
from regrow.store import worker_store
store = worker_store()
store.set(f"attempt {ATTEMPT} rank {RANK}", "here")
store.wait([f"attempt {ATTEMPT} rank {rank}" for rank in (0, 1)], 30)
keys = [f"attempt {attempt} rank {rank}" for attempt in (0, 1) for rank in (0, 1)]
report(os.environ["REGROW_STORE"], sum(store.check([key]) for key in keys))
if ATTEMPT == 0 and RANK == 0:
    store.set("ready", "")
    forever()
if ATTEMPT == 0:
    store.wait(["ready"], 30)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_meet_in_a_store_that_ends_with_their_attempt(launch: Launch) -> None:
    job = launch(MEET, "--max-restarts=1")
    first, second = job.reports(2), job.reports(2)
    assert job.finish() == 0, job.output
    assert [line[3] for line in (*first, *second)] == ["2"] * 4  # nothing from the previous attempt
    places = {tuple(line[2] for line in attempt) for attempt in (first, second)}
    assert len(places) == 2
    for place, other in places:
        assert place == other
        assert not os.path.exists(os.path.dirname(place.removeprefix("unix:")))


NODE = """
import json, os
from regrow.store import worker_store
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with worker_store() as store:
    store.set(str(rank), "here")
    store.wait([str(other) for other in range(size)], 30)
    print(json.dumps([os.environ["REGROW_STORE"], os.environ["REGROW_STORE_TOKEN"]]))
"""


@pytest.mark.thorough
def test_workers_of_several_nodes_meet_in_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NODE)
    place = tmp_path / "meeting"
    place.mkdir()
    flags = ["--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={place}", "--local-addr=::1"]
    command = [sys.executable, "-m", "regrow.run", *flags, str(script)]
    nodes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [node.communicate(timeout=DEADLINE_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    one, other = [json.loads(out) for out, _ in ended]
    assert one == other
    assert one[0].startswith("[::1]:")
