"""A job that exists as a log and a page of steps only: the test writes both."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

from regrow._progress import SLOT
from regrow.utils import start_ticks


class WrittenJob:
    """The log directory of an agent, which this process pretends to be.

    Args:
        runs: the directory above the run.
        ranks: global ranks of the workers.
        run_id: id of the job.
        host: name of the agent's host; default: this one.
        pid: the agent; default: this process, which runs.
    """

    def __init__(
        self,
        runs: Path,
        ranks: int | list[int] = 2,
        run_id: str = "job",
        host: str | None = None,
        pid: int | None = None,
    ) -> None:
        self.ranks = list(range(ranks)) if isinstance(ranks, int) else ranks
        self.host = host or os.uname().nodename
        self.run_id = run_id
        self.directory = runs / f"{run_id}_{len(list(runs.glob('*')))}"
        self.directory.mkdir(parents=True)
        self.attempt, self.round = -1, -1
        self.time = time.time()
        self._fd = -1
        self._page: mmap.mmap | None = None
        agent = os.getpid() if pid is None else pid
        self.emit(
            "job.started",
            command=["python", "-u", "train.py"],
            nproc_per_node=len(self.ranks),
            max_restarts=3,
            agent={"pid": agent, "start_ticks": start_ticks(agent) or 1},
        )

    def emit(self, name: str, **fields: Any) -> None:
        """Append the event `regrow.<name>` to the log."""
        event = {
            "name": f"regrow.{name}",
            "source": "AGENT",
            "time": time.time(),
            "monotonic": time.monotonic(),
            "run_id": self.run_id,
            "attempt": self.attempt,
            "round": self.round,
            "host": self.host,
        }
        with open(self.directory / "events.jsonl", "a") as file:
            file.write(json.dumps(event | fields) + "\n")

    def start(self, world_size: int | None = None) -> None:
        """Begin the next attempt, with a new page."""
        self.close()
        self.attempt, self.round = self.attempt + 1, max(self.round, 0) + 1
        size = world_size or len(self.ranks)
        self.emit("rendezvous.completed", group_rank=0, group_world_size=1, world_size=size)
        self._fd = os.memfd_create("regrow-progress")
        os.posix_fallocate(self._fd, 0, len(self.ranks) * SLOT.size + 1)
        self._page = mmap.mmap(self._fd, 0)
        self.emit(
            "attempt.started",
            world_size=size,
            ranks=self.ranks,
            pids={str(rank): 1000 + rank for rank in self.ranks},
            forked=[],
            kept=[],
            page={
                "pid": os.getpid(),
                "fd": self._fd,
                "inode": os.fstat(self._fd).st_ino,
                "slot_format": SLOT.format,
                "slot_bytes": SLOT.size,
            },
        )
        self.begun = time.monotonic()

    def step(self, rank: int, step: int, first: int = 1, ago: float = 0.0) -> None:
        """Report a step of a rank, as `regrow.step` did `ago` seconds ago."""
        assert self._page is not None
        values = (first, self.begun, step, time.monotonic() - ago)
        rest = SLOT.unpack_from(self._page, self.ranks.index(rank) * SLOT.size)[4:]
        SLOT.pack_into(self._page, self.ranks.index(rank) * SLOT.size, *values, *rest)

    def heartbeat(self, rank: int, ago: float = 0.0) -> None:
        """Report a heartbeat of a rank `ago` seconds ago."""
        assert self._page is not None
        offset = self.ranks.index(rank) * SLOT.size
        values = SLOT.unpack_from(self._page, offset)[:5]
        SLOT.pack_into(self._page, offset, *values, time.monotonic() - ago)

    def fail(self, rank: int, message: str, **fields: Any) -> None:
        """Let a rank fail, and end the attempt."""
        now = time.monotonic()
        self.emit(
            "worker.failed",
            **{
                "rank": rank,
                "local_rank": self.ranks.index(rank),
                "pid": 1000 + rank,
                "exit_code": 1,
                "signal": None,
                "message": message,
                "traceback": f"Traceback (most recent call last):\n  ...\n{message}\n",
                "failed_monotonic": now - 0.01,
                "detected_monotonic": now,
                "root_cause": True,
            }
            | fields,
        )
        self.end("FAILED", message)

    def end(self, state: str, reason: str = "") -> None:
        """End the attempt."""
        steps = {}
        for slot, rank in enumerate(self.ranks if self._page is not None else []):
            assert self._page is not None
            values = SLOT.unpack_from(self._page, slot * SLOT.size)[:4]
            names = ("first_step", "first_monotonic", "last_step", "last_monotonic")
            if values[1] > 0:
                steps[str(rank)] = dict(zip(names, values, strict=True))
        self.emit("attempt.ended", state=state, reason=reason, last_steps=steps)
        self.close()

    def finish(self, state: str, exit_code: int = 0, reason: str = "") -> None:
        """End the job."""
        self.emit(
            "job.finished",
            state=state,
            exit_code=exit_code,
            signal=None,
            reason=reason,
            duration_s=time.time() - self.time,
            restarts=max(self.attempt, 0),
            restarts_left=3 - max(self.attempt, 0),
        )

    def log(self, rank: int, text: str, stream: str = "stdout") -> None:
        """Append to the output of a rank in this attempt."""
        folder = self.directory / f"attempt_{self.attempt}" / str(self.ranks.index(rank))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{stream}.log", "a") as file:
            file.write(text)

    def close(self) -> None:
        """Close the page, as the agent does when the workers have ended."""
        if self._page is not None:
            self._page.close()
            os.close(self._fd)
            self._page = None
