"""Scripts of jobs with a `regrow.State`, without torch: a walk of arrays with seeded faults."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers.jobs.e2e_job import DEADLINE_S, Job

POINTS = ("before", "forward", "prepared", "sent", "received", "commit", "half", "committed")
"""Points of a step at which a rank can be killed, in their order."""
STEPS = 18


class Kill(NamedTuple):
    """A rank ends at a point of a step, once."""

    step: int
    rank: int
    point: str


def schedule(seed: int, size: int, points: Sequence[str]) -> list[Kill]:
    """Return one kill of a random rank for each point, two steps apart.

    A rank that replaces another one has to complete a step, or its end ends the attempt.
    """
    chosen = random.Random(seed)
    order = chosen.sample(points, len(points))
    return [
        Kill(1 + 2 * number, chosen.randrange(size), point) for number, point in enumerate(order)
    ]


def start(
    launch: Callable[..., Job],
    folder: Path,
    script: str,
    kills: list[Kill],
    *flags: str,
    nproc: int = 3,
    **env: str,
) -> Job:
    """Start a job with a script that contains `FAULTS`, and the kills of a schedule."""
    done = folder / f"done-{len(list(folder.iterdir()))}"
    done.mkdir()
    env |= {"KILLS": json.dumps(kills), "DONE": str(done)}
    return launch(script, "--max-restarts=20", *flags, nproc=nproc, env=env)


class Finished:
    """A job that has ended, and its reports."""

    def __init__(self, job: Job, within: float = DEADLINE_S) -> None:
        job.process.wait(within)
        assert job.finish() == 0, job.output
        self.job = job
        self.reports = job.unread_reports()

    def of(self, word: str) -> list[list[str]]:
        """Return rank and values of all reports that begin with a word."""
        return [[line[0], *line[3:]] for line in self.reports if line[2] == word]

    def results(self) -> dict[str, str]:
        """Return the values of each rank's "result", by rank."""
        return {line[0]: " ".join(line[1:]) for line in self.of("result")}


FAULTS = """
import json
KILLS = [tuple(each) for each in json.loads(os.environ.get("KILLS", "[]"))]
def at(step, point):
    # Die if the schedule has this point, in the first process that comes here.
    for kill in KILLS:
        if kill == (step, RANK, point):
            try:
                os.mkdir(os.path.join(os.environ["DONE"], f"{step}-{RANK}-{point}"))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
"""

WALK = (
    FAULTS
    + """
import random
import numpy as np
import regrow
from regrow.inprocess import CallWrapper, Wrapper

SIZE, STEPS = int(os.environ["WORLD_SIZE"]), 18
class Loader:
    def __init__(self):
        self.order = random.Random(RANK)
        self.left = []
    def next(self):
        if not self.left:
            self.left = self.order.sample(range(100), 7)
        return self.left.pop()
    def state_dict(self):
        return {"order": self.order.getstate(), "left": self.left}
    def load_state_dict(self, state):
        self.order.setstate(state["order"])
        self.left = state["left"]

random.seed(1000 + RANK)
np.random.seed(RANK)
loader = Loader()
weights = {"w": np.linspace(0, 1, 5)[:, None] * np.ones(3), "history": []}
state = regrow.State({"weights": weights}, {"rng": regrow.rng(), "loader": loader})

def exchange(call, step, value):
    # The sum over all ranks, through the store of the iteration.
    store = call.state.store
    store.set(f"{step}/{RANK}", json.dumps(value))
    at(step, "sent")
    keys = [f"{step}/{rank}" for rank in range(SIZE)]
    store.wait(keys)
    return sum(map(json.loads, store.multi_get(keys)))

def default():
    report("default")
    return 0

@Wrapper(replace=True)
def walk(call: CallWrapper):
    step = state.recover(call, default)
    while step < STEPS:
        step += 1
        at(step, "before")
        value = loader.next() * random.random() + np.random.rand()
        at(step, "forward")
        state.prepare(step)
        at(step, "prepared")
        total = exchange(call, step, value)
        at(step, "received")
        with state.commit(step):
            at(step, "commit")
            weights["w"] *= 1 + total / 1000
            at(step, "half")
            weights["history"].append(total)
        regrow.step(step)
        report("step", step)
        at(step, "committed")

walk()
report("result", weights["w"].tobytes().hex(), json.dumps(weights["history"]).replace(" ", ""))
"""
)
"""A walk of `STEPS` steps on any number of ranks; prints its result by `report`."""
