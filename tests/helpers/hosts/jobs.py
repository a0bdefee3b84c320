"""A job on several hosts under test: its agents, and the records of its workers.

A test starts the agents one by one. Workers append their actions to a file (`worker.py`), with
stamps of a clock that all hosts of a test share. So a test knows exactly whether two worlds ever
ran at once. It also knows the time from a fault to the next collective.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from helpers.hosts.netns import Host, Process
from helpers.processes import alive, children_of, wait_until
from regrow.events import read_events, story

T = TypeVar("T")

#: Seconds after which a test fails; far more than any step takes on a loaded machine.
PATIENCE_S = 60.0
PORT = 29400
WORKER = Path(__file__).with_name("worker.py")


class Record(NamedTuple):
    """One line that a worker wrote about itself."""

    what: str
    host: str
    pid: int
    """Process id on its own host."""
    round: int
    """Its fencing token."""
    attempt: int
    restarts: int
    rank: int
    world_size: int
    monotonic_s: float


class World(NamedTuple):
    """The workers of one round; all are at work."""

    round: int
    hosts: tuple[str, ...]
    """In the order of their ranks."""
    restarts: int
    started_s: float
    """Time at which the last worker ran its first line."""
    reduced_s: float
    """Time at which the first worker completed its first all-reduce, if the workers do any."""


class Agent:
    """One `regrow run` on a host."""

    def __init__(
        self, job: Job, host: Host, name: str, flags: list[str], env: dict[str, str]
    ) -> None:
        self.host = host
        self.log_dir = job.folder / f"{name}.logs"
        self._output = job.folder / f"{name}.output"
        home = job.folder / f"{host.name}.home"
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "regrow.run", f"--log-dir={self.log_dir}", *flags]
        with self._output.open("wb") as output:
            env = {**job.env, **env, "HOME": str(home)}
            self.process = Process(host, [*command, str(WORKER), job.mode], env, output)

    @property
    def output(self) -> str:
        """Return the whole output of the agent and its workers."""
        return self._output.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return its recorded events with the name `regrow.<name>`."""
        found = []
        for path in self.log_dir.glob("*/events.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["name"] == f"regrow.{name}":
                    found.append(json.loads(line))
        return found

    def root_causes(self) -> list[tuple[str | None, int, int | None]]:
        """Return host, rank and exit code of each worker that ended an attempt, as in the story.

        This is the final classification. The first worker to fail may have failed because another
        host was lost, which became known later.
        """
        return [
            (failure.host, failure.rank, failure.exit_code)
            for failure in story(read_events(self.log_dir)).failures
            if failure.rank is not None
        ]

    def finish(self) -> int:
        """Wait for the end and return the exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} does not end") from None

    def kill(self) -> None:
        """Kill the agent alone, by SIGKILL."""
        self.process.signal(signal.SIGKILL)

    def kill_family(self) -> None:
        """Kill the agent and its workers by SIGKILL, as close to one moment as possible.

        All processes except the agent are stopped first, so that none acts on the end of another.
        A stopped agent would have unread data, and its connections would be reset instead of
        closed. The store server stays: it belongs to the job, and ends after its sessions.
        """
        family = _below(self.process.pid)
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        for pid in (self.process.pid, *family):
            os.kill(pid, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"the agent on {self.host.name}, which wrote {self.output[-6000:]}"


class Job:
    """A job; `agent` starts another agent for it."""

    def __init__(
        self,
        folder: Path,
        coordinator: Host | None,
        *,
        nodes: str,
        mode: str,
        backend: str = "c10d",
        endpoint: str = "",
        conf: str = "",
        max_restarts: int = 0,
        env: dict[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Set up the job without agents.

        Args:
            folder: directory for all files.
            coordinator: the host of the endpoint, unless `endpoint` is given.
            nodes: least and most nodes, `2:4`.
            mode: what the workers do (`worker.py`).
            backend: rendezvous backend.
            endpoint: rendezvous endpoint.
            conf: settings of the rendezvous, `key=value,...`.
            max_restarts: number of failures after which workers are still restarted.
            env: more variables for agents and workers.
            patience_s: seconds for which a test waits for a step of the job.
        """
        self._patience_s = patience_s
        self.folder = folder
        self.mode = mode
        self.agents: list[Agent] = []
        (folder / "alive").mkdir()
        outer = {
            name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ
        }
        self.env = {
            **outer,
            "JOB_FOLDER": str(folder),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "REGROW_TOKEN": "a token for the tests",
            **(env or {}),
        }
        if coordinator is not None:
            endpoint = f"{coordinator.addr}:{PORT}"
        self._endpoint = endpoint
        self._flags = [
            f"--nnodes={nodes}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            f"--max-restarts={max_restarts}",
            *([f"--rdzv-conf={conf}"] if conf else []),
            *(["--insecure"] if backend == "etcd" else []),  # the etcd of the tests has no users
        ]

    def agent(self, host: Host, *flags: str, env: dict[str, str] | None = None) -> Agent:
        """Start an agent on a host, with more variables than the other agents have."""
        name = f"{host.name}.{len(self.agents)}"
        agent = Agent(self, host, name, [*self._flags, *flags], env or {})
        self.agents.append(agent)
        return agent

    def records(self, what: str) -> list[Record]:
        """Return the records of the kind `what` that workers have written so far."""
        path = self.folder / "records"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [Record(**json.loads(line)) for line in lines]
        return [record for record in found if record.what == what]

    def kinds(self) -> set[str]:
        """Return the kinds of records that workers have written so far."""
        lines = (self.folder / "records").read_text().splitlines()
        return {json.loads(line)["what"] for line in lines}

    def world(self, size: int, after: World | None = None) -> World:
        """Wait until a world of `size` nodes works, in a later round than `after`."""
        whats = {"gloo": "reduced", "elastic": "reduced", "beating": "beating"}
        what = whats.get(self.mode, "started")

        def complete() -> World | None:
            rounds = _by_round(self.records(what))
            for number in sorted(rounds):
                if len(rounds[number]) == size == rounds[number][0].world_size and (
                    after is None or number > after.round
                ):
                    return _world(rounds[number], _by_round(self.records("started"))[number])
            return None

        return self.wait_until(complete, f"a world of {size} nodes after {after}")

    def connected(self, host: Host) -> None:
        """Wait until a process on the host is connected to the endpoint of the job."""
        addr, port = self._endpoint.rsplit(":", 1)
        octets = "".join(f"{int(octet):02X}" for octet in reversed(addr.split(".")))
        far_end = f" {octets}:{int(port):04X} 01 "  # 01: established
        self.wait_until(
            lambda: far_end in host.run("cat", "/proc/net/tcp") or None,
            f"{host.name} is connected with {self._endpoint}",
        )

    def wait_until(self, found: Callable[[], T | None], what: str) -> T:
        """Poll `found` until its result is true, and return the result.

        The test fails at once when all agents have ended.
        """

        def found_or_over() -> T | None:
            over = all(agent.process.poll() is not None for agent in self.agents)
            result = found()
            assert result or not over, f"never: {what}, and all agents have ended; {self}"
            return result

        return wait_until(found_or_over, lambda: f"{what}; {self}", self._patience_s, pause=0.01)

    def waits(self, agent: Agent) -> None:
        """Wait until an agent has joined and has logged that it waits for other nodes.

        The log line comes late, but the wait costs no processor time where no worker runs.
        """
        line = "still waiting for other nodes"
        self.wait_until(lambda: line in agent.output or None, f"{line!r} by {agent}")

    def event(self, agent: Agent, name: str) -> dict[str, Any]:
        """Wait for an agent's first event with the name `regrow.<name>`, and return it."""
        return self.wait_until(
            lambda: events[0] if (events := agent.events(name)) else None, f"{name} by {agent}"
        )

    def blamed(self, world: World, by: Agent) -> tuple[str, str]:
        """Return which node ended the round of `world`, and why, as `by` finally recorded it."""

        def known() -> tuple[str, str] | None:
            for name in ("round.judged", "round.ended"):
                for event in agent_events(name):
                    if not event.get("failed"):
                        return event["node"], event["why"]
            return None

        def agent_events(name: str) -> list[dict[str, Any]]:
            return [event for event in by.events(name) if event["ended_round"] == world.round]

        return self.wait_until(known, f"who ended round {world.round} for {by}")

    def running_at(self, moment_s: float, agent: Agent) -> None:
        """Wait until the worker of this agent is seen to run at that time or later."""

        def seen() -> float | None:
            times = [
                float(text)
                for path in (self.folder / "alive").glob(f"*.{agent.host.name}.*")
                if (text := path.read_text())
            ]
            return max((time for time in times if time >= moment_s), default=None)

        self.wait_until(seen, f"a worker of {agent} runs at {moment_s}")

    def finish(self, *agents: Agent, overlap: bool = False) -> None:
        """Let the workers finish, and assert that these agents succeed.

        Args:
            agents: the agents.
            overlap: whether workers of two rounds may have run at once.
        """
        (self.folder / "finish").touch()
        assert [agent.finish() for agent in agents] == [0] * len(agents), self
        if not overlap:
            self.assert_one_world_at_a_time()

    def assert_one_world_at_a_time(self) -> None:
        """Assert that each round has one world, and that no two rounds have workers at once."""
        seen_s: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for path in (self.folder / "alive").iterdir():
            number, text = int(path.name.split(".")[0]), path.read_text()
            if text:
                seen_s[number].append((float(text), path.name))
        for number, records in _by_round(self.records("started")).items():
            assert len({record.rank for record in records}) == len(records), (number, self)
            assert len({record.world_size for record in records}) == 1, (number, self)
            assert len(records) <= records[0].world_size, (number, self)
            first_s = min(record.monotonic_s for record in records)
            for other, last_seen in seen_s.items():
                if other < number:
                    assert max(last_seen) <= (first_s, ""), (
                        f"{max(last_seen)} of round {other} ran when round {number} began; {self}"
                    )

    def __repr__(self) -> str:
        path = self.folder / "records"
        records = path.read_text() if path.exists() else "nothing"
        return f"a job of {self.agents}, whose workers wrote {records}"


def _by_round(records: list[Record]) -> dict[int, list[Record]]:
    rounds: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        rounds[record.round].append(record)
    return rounds


def _world(at_work: list[Record], started: list[Record]) -> World:
    ranked = sorted(at_work, key=lambda record: record.rank)
    return World(
        round=ranked[0].round,
        hosts=tuple(record.host for record in ranked),
        restarts=ranked[0].restarts,
        started_s=max(record.monotonic_s for record in started),
        reduced_s=min(record.monotonic_s for record in at_work),
    )


def _below(pid: int) -> list[int]:
    """Return all descendants of an agent except the store server."""
    found = []
    for child in children_of(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if alive(child) and b"regrow.store" not in command:
            found += [child, *_below(child)]
    return found
