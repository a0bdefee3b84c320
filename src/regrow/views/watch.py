"""`JobWatch`: follows a job's logs and its steps, and gives a `Snapshot` when asked.

The steps come from the page of steps of an agent on this host, or from the answers of an agent on
another one (`RemoteJob`).

It reads nothing between two calls, so a view that nobody looks at costs nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any

from regrow.events import Story
from regrow.events.evidence import integer
from regrow.views.job_snapshot import PACE_S, Snapshot, Source, snapshot, story_of
from regrow.views.pages import StepPage, StepSample
from regrow.views.runs import EventReader, Job, Library, Run

SEARCH_S = 2.0
"""Seconds between two searches for further agents of a running job."""


class JobWatch:
    """Follows one job; not thread-safe.

    Args:
        library: where its runs are.
        job: the job.
    """

    def __init__(self, library: Library, job: Job) -> None:
        self._library = library
        self.job = job
        self._agents: dict[str, _Agent] = {}
        self._searched = monotonic()
        self._story: Story | None = None
        self._add(job)

    def snapshot(self) -> Snapshot:
        """Read what is new, and return the job as it is now."""
        now = monotonic()
        if now - self._searched >= SEARCH_S:
            self._searched = now
            if (job := self._library.job(self.job.key)) is not None:
                self._add(job)
        sources = [agent.source() for agent in self._agents.values()]
        if self._story is None or any(agent.is_changed for agent in self._agents.values()):
            self._story = story_of(sources)
        return snapshot(sources, self._story)

    def close(self) -> None:
        """Release the mapped pages."""
        for agent in self._agents.values():
            agent.close()

    def _add(self, job: Job) -> None:
        self.job = job
        directories = [run.directory for run in job.runs]
        for gone in self._agents.keys() - directories:  # its log has appeared meanwhile, or is gone
            self._agents.pop(gone).close()
            self._story = None
        for run in job.runs:
            if run.directory not in self._agents:
                self._agents[run.directory] = _Agent(run, self._library)


class _Agent:
    """Log and steps of one agent."""

    def __init__(self, run: Run, library: Library) -> None:
        self._run, self._library = run, library
        self._reader = EventReader(run.directory)
        self._seen = 0
        self.is_changed = False
        """Whether the last `source` read further events."""
        self._page: StepPage | None = None
        self._offset: float | None = None  # wall time minus monotonic time of its host
        self._finished = False
        self._attempt: int | None = None
        self._earlier: deque[tuple[float, dict[int, StepSample]]] = deque()

    def source(self) -> Source:
        self.is_changed = False
        remote = self._library.remote
        node = remote.node(self._run) if remote is not None else None
        if remote is not None and self._run.is_elsewhere:
            events = remote.events(self._run)
            self.is_changed = len(events) != self._seen
        else:
            with suppress(OSError):
                self.is_changed = self._reader.read()
            events = self._reader.events
        for event in events[self._seen :] if self._seen <= len(events) else events:
            self._follow(event)
        self._seen = len(events)
        samples: dict[int, StepSample] = {}
        if self._page is not None:
            samples = self._page.read()
        elif node is not None and node.report.attempt == self._attempt and not self._finished:
            samples = node.samples()
        return Source(
            name=os.path.basename(self._run.directory),
            events=events,
            alive=False if self._finished else self._library.is_alive(self._run),
            now=self._now() if node is None else node.now(),
            answered_s=None if node is None else node.silent_s(),
            samples=samples,
            paces=self._paces(samples),
        )

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def _follow(self, event: dict[str, Any]) -> None:
        name = event.get("name")
        stamp, at = event.get("time"), event.get("monotonic")
        if isinstance(stamp, int | float) and isinstance(at, int | float):
            self._offset = stamp - at
        if name == "regrow.job.finished":
            self._finished = True
        elif name == "regrow.attempt.started":
            self.close()
            self._earlier.clear()
            self._attempt = integer(event, "attempt")
            address = event.get("page")
            if isinstance(address, dict) and event.get("host") == os.uname().nodename:
                with suppress(OSError):
                    self._page = StepPage(address)
        elif name == "regrow.worker.replaced" and integer(event, "rank") is not None:
            self._earlier.clear()  # its slot starts again

    def _now(self) -> float | None:
        """Return the time on the monotonic clock of the agent's host."""
        if self._run.host == os.uname().nodename and self._run.is_alive():
            return monotonic()
        return None if self._offset is None else time.time() - self._offset

    def _paces(self, samples: dict[int, StepSample]) -> dict[int, float]:
        """Return the steps per second since the sample that is about `PACE_S` old."""
        now = monotonic()
        if not self._earlier or now - self._earlier[-1][0] >= PACE_S / 10:
            self._earlier.append((now, samples))
        while len(self._earlier) > 1 and now - self._earlier[1][0] >= PACE_S:
            self._earlier.popleft()
        found = {}
        for local_rank, sample in samples.items():
            before = self._earlier[0][1].get(local_rank)
            if before is not None and sample.last > before.last and sample.last_at > before.last_at:
                found[local_rank] = (sample.last - before.last) / (sample.last_at - before.last_at)
        return found
