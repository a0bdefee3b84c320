"""A job of several agents on this machine whose workers go on when a host is lost or joins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from helpers.jobs.e2e_job import Job
from helpers.processes import wait_until

T = TypeVar("T")

SCRIPT = """
import json
import numpy as np
import regrow
from regrow.inprocess import CallWrapper, Wrapper

FOLDER, STEPS = os.environ["FOLDER"], int(os.environ["STEPS"])
weights = {"w": np.linspace(0, 1, 5)}
state = regrow.State({"weights": weights})

def say(*words):
    line = json.dumps([os.getpid(), os.environ["REGROW_FENCING_TOKEN"], *words]) + "\\n"
    with open(f"{FOLDER}/lines", "a") as lines:
        lines.write(line)

def default():
    say("default")
    return 0

@Wrapper(replace=True, elastic=True)
def train(call: CallWrapper):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, size) == (call.state.rank, call.state.world_size)
    say("called", rank, size, os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"])
    step = state.recover(call, default)
    store = call.state.store
    while step < STEPS:
        step += 1
        value = np.sin(np.arange(5) * (step * 7 + rank))
        store.set(f"{step}/{rank}", value.tobytes())
        keys = [f"{step}/{each}" for each in range(size)]
        store.wait(keys)
        total = sum(np.frombuffer(each) for each in store.multi_get(keys))
        with state.commit(step):
            weights["w"] *= 1 + total / 1000
        regrow.step(step)
        say("step", rank, step)
        while step == int(os.environ["HOLD"]) and not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.005)
            call.ping()

train()
say("error file", os.environ["TORCHELASTIC_ERROR_FILE"])
say("result", weights["w"].tobytes().hex())
"""


class Elastic:
    """Agents of one job, and what their workers wrote.

    Args:
        launch: starts an agent.
        folder: for the files of the job.
        nodes: least and most nodes, `3:3`.
        script: what the workers run.
    """

    def __init__(
        self,
        launch: Callable[..., Job],
        folder: Path,
        nodes: str,
        *flags: str,
        steps: int = 12,
        hold: int = 5,
        script: str = SCRIPT,
    ) -> None:
        self.folder = folder / f"elastic-{len(list(folder.iterdir()))}"
        (self.folder / "meet").mkdir(parents=True)
        self._launch, self._script = launch, script
        where = ["--rdzv-backend=file", f"--rdzv-endpoint={self.folder / 'meet'}"]
        self._flags = [f"--nnodes={nodes}", *where, "--rdzv-id=elastic", *flags]
        self._env = {"FOLDER": str(self.folder), "STEPS": str(steps), "HOLD": str(hold)}
        self.jobs: list[Job] = []

    def agent(self, *flags: str, nproc: int = 1, env: dict[str, str] | None = None) -> Job:
        """Start another agent, with more variables than the other agents have."""
        job = self._launch(
            self._script,
            *self._flags,
            *flags,
            nproc=nproc,
            env=self._env | (env or {}),
            standalone=False,
            prelude="import os, signal, sys, time\n",
        )
        self.jobs.append(job)
        return job

    def lines(self, what: str) -> list[list[object]]:
        """Return what the workers wrote so far: pid, round, values of the lines of one kind."""
        path = self.folder / "lines"
        found = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return [[pid, int(number), *rest] for pid, number, kind, *rest in found if kind == what]

    def world(self, size: int, after: int = 0) -> tuple[int, dict[int, int]]:
        """Wait until `size` ranks run in a round after `after`; return the round, and the pids."""

        def found() -> tuple[int, dict[int, int]] | None:
            rounds: dict[int, dict[int, int]] = {}
            for pid, number, rank, world_size, *_ in self.lines("called"):
                assert isinstance(pid, int)
                assert isinstance(number, int)
                assert isinstance(rank, int)
                if world_size == size and number > after:
                    rounds.setdefault(number, {})[rank] = pid
            whole = [each for each in rounds.items() if len(each[1]) == size]
            return whole[0] if whole else None

        return self._await(found, f"{size} ranks after round {after}")

    def at_step(self, step: int, count: int, after: int = 0) -> None:
        """Wait until `count` ranks have committed a step in a round after `after`."""
        self._await(
            lambda: [e for e in self.lines("step") if e[3] == step and int(str(e[1])) > after][
                count - 1 :
            ],
            f"{count} ranks at step {step}",
        )

    def _await(self, found: Callable[[], T | None], what: str) -> T:
        def text() -> str:
            return f"{what}; {self.lines('called')} {[job.output for job in self.jobs]}"

        return wait_until(found, text, 60.0)

    def begin(self, count: int, nproc: int = 1) -> tuple[list[Job], int, dict[int, int]]:
        """Start agents, wait until all ranks hold; return the agents, the round and the pids."""
        agents = [self.agent(nproc=nproc) for _ in range(count)]
        first, pids = self.world(count * nproc)
        self.at_step(5, count * nproc)
        return agents, first, pids

    def lose(self, agents: list[Job], pids: dict[int, int], *ranks: int) -> None:
        """Kill the agent with these ranks and all its processes; take it off the list."""
        (victim,) = [agent for agent in agents if self.of_all(pids, agent) == [*ranks]]
        agents.remove(victim)
        victim.kill_family()

    def of_all(self, pids: dict[int, int], job: Job) -> list[int]:
        """Return the ranks of the workers that an agent has started; they may have ended."""
        started = {pid for e in job.events("attempt.started") for pid in e["pids"].values()}
        return [rank for rank, pid in sorted(pids.items()) if pid in started]

    def go(self) -> None:
        """Let the workers go on."""
        (self.folder / "go").touch()

    def finish(self, jobs: Sequence[Job]) -> set[str]:
        """Let the agents end; return the results of all workers."""
        self.go()
        assert [job.finish() for job in jobs] == [0] * len(jobs), [job.output for job in jobs]
        return {str(value) for _, _, value in self.lines("result")}
