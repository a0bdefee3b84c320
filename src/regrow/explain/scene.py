"""`Scene`: one run of a job with all its events on one clock, its story and its ledger."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from regrow.events import Story, story
from regrow.events.accounts import accounts_of
from regrow.events.clocks import on_one_clock
from regrow.events.evidence import (
    STOP_EVENTS,
    Hosts,
    Record,
    integer,
    integers,
    real,
    stop_asked,
    strings,
    text,
)
from regrow.ledger import LostTime, Session, Span, lost_time
from regrow.utils import host_of


class NewServer(NamedTuple):
    """The takeover of the server of the rendezvous by another host."""

    host: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One run of a job. Times are in seconds since its start, by the clock of the story."""

    number: int
    """The run of a requeued job, counted from 1."""
    events: Sequence[Record]
    """The events of all hosts, by time."""
    story: Story
    spans: Mapping[int, Sequence[Span]]
    """The spans of the ledger in this run, by attempt, on its clock; -1 between the runs."""
    requeued_after_s: float | None
    """Seconds from the end of this run to the next one of the same job; None if there is none."""
    workers: int
    """Number of workers of the agents whose logs were read."""
    hosts: Hosts
    ends_s: float
    """Time of the last event."""
    _index: Mapping[tuple[str | None, int | None], list[Record]]
    """The events by name, and by name and attempt."""
    _failed: Mapping[str, list[int]]
    """The attempts that ended by a failure, in order, by what failed."""

    def named(self, name: str, attempt: int | None = None) -> list[Record]:
        """Return the events `regrow.<name>`, of one attempt if it is given."""
        return self._index.get((f"regrow.{name}", attempt), [])

    def first(self, name: str, attempt: int | None = None) -> Record:
        """Return the first such event; an empty one if there is none."""
        return next(iter(self.named(name, attempt)), {})

    def between(self, name: str, attempt: int, since: float, until: float) -> list[Record]:
        """Return the events `regrow.<name>` of an attempt in a span of time."""
        found = self.named(name, attempt)
        first, last = bisect_left(found, since, key=_at), bisect_right(found, until, key=_at)
        return found[first:last]

    def accounts(self, attempt: int) -> list[Record]:
        """Return the last account of each worker of an attempt."""
        return accounts_of(
            (*self.named("worker.accounts", attempt), *self.named("attempt.ended", attempt))
        )

    def last_time(self, name: str, attempt: int | None) -> float | None:
        """Return the time of the last such event of an attempt."""
        return max(self._times(name, attempt), default=None)

    def new_server(self, attempt: int | None, following: int | None) -> NewServer | None:
        """Return the host that took over the server of the rendezvous between two attempts."""
        since = self.last_time("attempt.started", attempt)
        until = self.last_time("attempt.started", following)
        if since is None or until is None:
            return None
        for event in self.named("rendezvous.servers"):
            at, epoch = real(event, "monotonic"), integer(event, "epoch") or 0
            if epoch > 0 and at is not None and since <= at <= until:
                address = text(event, "server") or "?"
                return NewServer(self.host_at(address) or address, at)
        return None

    def host_at(self, address: str) -> str | None:
        """Return the name of the host with an address; the address if the name is not known.

        None: several agents have the address, as on the loopback interface.
        """
        names = {name for name, known in self.story.addresses if known == address}
        for event in self.named("rendezvous.completed"):
            by_rank = [text(event, "leader"), *strings(event, "successors")]
            if by_rank.count(address) > 1:
                return None
            if (integer(event, "group_rank"), address) in [*enumerate(by_rank)]:
                names.add(text(event, "host") or address)
        return next(iter(names or {address})) if len(names) <= 1 else None

    def _times(self, name: str, attempt: int | None) -> list[float]:
        found = self.named(name, attempt) if attempt is not None else []
        return [at for event in found if (at := real(event, "monotonic")) is not None]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The recorded settings of the job; empty if an older release wrote the log."""
        found = self.first("job.started").get("settings")
        return found if isinstance(found, Mapping) else {}

    @property
    def bounds(self) -> Mapping[str, Any]:
        """The time limits that regrow keeps, in seconds, by description."""
        found = self.first("job.started").get("bounds")
        return found if isinstance(found, Mapping) else {}

    def final_grace(self, attempt: int | None) -> float | None:
        """Return the seconds from the signal that ended the last attempt until workers are killed.

        A time limit may have left less than --shutdown-timeout. Older logs show only the setting.
        """
        recorded = real(self.first("job.stopping", attempt), "grace_s")
        return real(self.settings, "shutdown_timeout") if recorded is None else recorded

    def stop_asked(self, attempt: int | None) -> float | None:
        """Return when an agent first asked that the ranks of an attempt stop at the same step."""
        return stop_asked(event for name in STOP_EVENTS for event in self.named(name, attempt))

    def failed_before(self, what: str, attempt: int) -> list[int]:
        """Return the latest attempts before another one that ended by the same failure."""
        same = self._failed.get(what, [])
        until = bisect_left(same, attempt)
        return same[max(until - _MOST_BEFORE, 0) : until]

    def lost_node(self, attempt: int) -> str:
        """Return the id of the node whose loss or leave ended an attempt; "?" if unknown."""
        overs = [*self.named("round.judged", attempt), *self.named("round.ended", attempt)]
        return next((id for event in overs if (id := text(event, "node")) is not None), "?")

    def lost_agent(self, attempt: int) -> int | None:
        """Return the agent whose loss or leave ended an attempt; None if its log is not known.

        Several agents may have one host name.
        """
        node = self.lost_node(attempt)
        seated = [
            event
            for event in self.named("rendezvous.completed", attempt)
            if text(event, "host") == host_of(node).name
        ]
        ranks = {n for e in seated for n, id in enumerate(strings(e, "first_ranks")) if id == node}
        found = {agent_of(e) for e in seated if not ranks or integer(e, "group_rank") in ranks}
        return found.pop() if len(found) == 1 else None

    def of_agent(self, agent: int | None, name: str, attempt: int | None = None) -> list[Record]:
        """Return the events `regrow.<name>` that an agent recorded."""
        return [event for event in self.named(name, attempt) if agent_of(event) == agent]

    def ranks_of(self, agent: int | None, attempt: int) -> set[int]:
        """Return the ranks that an agent had in an attempt, if its log is among these."""
        started = self.of_agent(agent, "attempt.started", attempt)
        return {rank for event in started for rank in integers(event, "ranks")}

    def overdue(self, attempt: int | None) -> tuple[list[int], list[int]]:
        """Return the ranks that were killed because they had outlived the grace of their stop.

        The second list has the ranks that had ended, and whose descendants were killed.
        """
        ended = self.named("attempt.ended", attempt) if attempt is not None else []
        killed, descendants = (
            sorted({rank for event in ended for rank in integers(event, key)})
            for key in ("killed", "killed_descendants")
        )
        return killed, descendants

    def log_file(self, rank: int | None, attempt: int) -> str | None:
        """Return the file with the output of a rank, on its host; None if there is none."""
        for event in self.named("attempt.started", attempt):
            logs = event.get("logs")
            if isinstance(logs, Mapping) and (path := text(logs, str(rank))) is not None:
                return path
        return None

    def wall(self, at: float | None) -> float | None:
        """Return a time of this run in seconds since the epoch."""
        day = self.story.started_at
        return None if at is None or day is None else day + at

    @property
    def has_several_hosts(self) -> bool:
        """Return whether the job may have workers on several hosts."""
        return self.first("job.started").get("nnodes") not in (None, 1, "1")

    def world_size(self, attempt: int | None) -> int | None:
        """Return the number of workers in an attempt."""
        return integer(self.first("attempt.started", attempt), "world_size")

    def lost_time(
        self,
        attempt: int,
        following: int | None,
        begin: float | None,
        *,
        unfinished: bool,
        most_redone_s: float = math.inf,
    ) -> LostTime:
        """Return the worker-seconds that the end of an attempt cost; see `regrow.ledger`."""
        return lost_time(
            self.spans,
            attempt,
            following,
            begin,
            world_size=self.world_size(attempt) or 0,
            unfinished=unfinished,
            most_redone_s=most_redone_s,
        )


_MOST_BEFORE = 8
_AGENT = "_agent"
"""The field of each event that has the number of the agent that recorded it."""


def agent_of(event: Record) -> int | None:
    """Return the number of the agent that recorded an event of a scene."""
    return integer(event, _AGENT)


def _at(event: Record) -> float:
    return real(event, "monotonic") or 0.0


def scenes_of(job: Sequence[Session], spans: Iterable[Span]) -> list[Scene]:
    """Return the runs of a job.

    Args:
        job: its runs, each with the logs of all hosts.
        spans: the spans of its ledger.
    """
    known = list(spans)
    return [
        _scene(number, session, job[number] if number < len(job) else None, known)
        for number, session in enumerate(job, 1)
    ]


def _scene(number: int, session: Session, later: Session | None, spans: list[Span]) -> Scene:
    own = [{**e, _AGENT: number} for number, run in enumerate(session.runs) for e in run.events]
    moved, _ = on_one_clock(own)
    moved.sort(key=_at)
    index: dict[tuple[str | None, int | None], list[Record]] = {}
    for event in moved:
        name = text(event, "name")
        for attempt in {None, integer(event, "attempt")}:
            index.setdefault((name, attempt), []).append(event)
    derived = story(own)
    delays = {  # from the clock of each agent's spans to that of this run
        agent.host: _at(event) - agent.begin - agent.offset
        for event in index.get(("regrow.job.started", None), [])
        if (own_number := agent_of(event)) is not None
        for agent in (session.runs[own_number],)
    }
    by_attempt: dict[int, list[Span]] = {}
    for span in spans:
        if span.session == number - 1:
            delay = delays.get(span.host, -(derived.started_at or 0.0))
            moved_span = replace(span, start=span.start + delay, end=span.end + delay)
            by_attempt.setdefault(span.attempt, []).append(moved_span)
    failed: dict[str, list[int]] = {}
    for failure in derived.failures:
        failed.setdefault(failure.what, []).append(failure.attempt)
    times = [at for event in moved if (at := real(event, "monotonic")) is not None]
    return Scene(
        number=number,
        events=moved,
        story=derived,
        spans=by_attempt,
        requeued_after_s=None if later is None else max(later.begin - session.end, 0.0),
        workers=sum(run.workers for run in session.runs),
        hosts=Hosts(moved),
        ends_s=max(times, default=0.0),
        _index=index,
        _failed={what: sorted(attempts) for what, attempts in failed.items()},
    )
