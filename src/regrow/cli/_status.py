"""What the status line says: a pure reducer over the job's events, and a pure renderer.

`_terminal` decides when and how the line is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of the job on this node."""

    started: float | None = None
    """When the job started, on the monotonic clock (s); None before it has."""
    phase: str = "starting"
    """What the job does now, in a word or two."""
    attempt: int = 0
    """Starts of workers so far."""
    world: int = 0
    """Workers of the current round, on all nodes."""
    workers: int = 0
    """Workers of this node in the current attempt."""
    gone: frozenset[int] = frozenset()
    """Ranks among them that are known to have failed."""
    halted: frozenset[int] = frozenset()
    """Ranks among them that are stopped by a signal such as SIGSTOP."""
    hung: frozenset[int] = frozenset()
    """Ranks among them that are killed because a timer of theirs ran out."""
    restarts: int = 0
    """Times that the workers were started again."""
    news: str = ""
    """The last thing that happened, in a line."""


def advance(status: Status, name: str, metadata: Mapping[str, Any]) -> Status:
    """The status after an event; events it does not know change nothing.

    Args:
        status: before.
        name: of the event, such as `regrow.attempt.started`.
        metadata: of the event.
    """
    match name:
        case "regrow.job.started":
            return replace(status, started=metadata["monotonic"], phase="meeting")
        case "regrow.rendezvous.completed":
            world = int(metadata.get("world_size", 0))
            return replace(status, phase="starting workers", world=world)
        case "regrow.attempt.started":
            ranks = metadata.get("ranks", ())
            return replace(
                status,
                phase="running",
                attempt=status.attempt + 1,
                world=int(metadata.get("world_size", len(ranks))),
                workers=len(ranks),
                gone=frozenset(),
                halted=frozenset(),
                hung=frozenset(),
            )
        case "regrow.worker.failed" if "told_monotonic" in metadata:  # on another host
            rank = metadata.get("rank")
            who = f"rank {rank}" if rank is not None else "the agent"
            what = metadata.get("signal") or metadata.get("message")
            return replace(status, news=f"{who} on host {metadata.get('host')}: {what}")
        case "regrow.worker.failed":
            rank = int(metadata["rank"])
            news = f"rank {rank}: {metadata.get('signal') or metadata.get('message')}"
            if status.gone or rank in status.hung:
                news = status.news  # the first failure is the one that matters, and why
            return replace(status, gone=status.gone | {rank}, news=news)
        case "regrow.worker.suspended":
            rank = int(metadata["rank"])
            news = f"rank {rank} is stopped by {metadata.get('signal')}"
            return replace(status, halted=status.halted | {rank}, news=news)
        case "regrow.worker.resumed":
            rank = int(metadata["rank"])
            return replace(status, halted=status.halted - {rank}, news=f"rank {rank} goes on")
        case "regrow.timer.expired":
            from regrow.events._describe import short_scope

            rank, scope = metadata["rank"], short_scope(str(metadata["scope"]))
            who = f"rank {rank}" if rank is not None else "a process of a worker"
            what = "no heartbeat" if metadata.get("heartbeat") else f"timer {scope}"
            status = replace(status, news=f"{who} hangs: {what}")
            killed = rank is not None and metadata["signal"] is not None
            return replace(status, hung=status.hung | {rank}) if killed else status
        case "regrow.heartbeat.stalled":
            return replace(status, news=f"rank {metadata.get('rank')} stands still")
        case "regrow.inprocess.lost":
            lost = f"rank {metadata['rank']} is lost; the others go on"
            return replace(status, workers=max(status.workers - 1, 0), news=lost)
        case "regrow.inprocess.restarted":
            return replace(status, news=f"restarted in place after {metadata.get('kind')}")
        case "regrow.round.ended" | "regrow.rendezvous.lost":
            if status.gone:  # by a failure here, which is what matters
                return status
            return replace(status, news=str(metadata.get("why", "")))
        case "regrow.job.gathering":
            waiting = int(metadata["waiting"])
            return replace(status, news=f"{waiting} node{'s' if waiting != 1 else ''} to take in")
        case "regrow.attempt.ended":
            return replace(status, phase="stopped", workers=0, gone=frozenset(), halted=frozenset())
        case "regrow.job.restarting":
            delay = float(metadata.get("delay_s", 0))
            phase = f"restarting in {delay:.0f} s" if delay >= 1 else "restarting"
            news = status.news or str(metadata.get("reason", ""))
            return replace(status, phase=phase, restarts=status.restarts + 1, news=news)
        case "regrow.worker.first_step":
            if status.restarts == 0:
                return status
            return replace(status, news=f"rank {metadata['rank']} is at step {metadata['step']}")
        case "regrow.job.finished":
            return replace(status, phase=str(metadata.get("state", "finished")).lower())
    return status


def render(status: Status, width: int, now: float) -> str:
    """The line in at most `width` columns of plain ASCII; what matters least is cut first.

    Args:
        status: what to say.
        width: columns to fill at most.
        now: on the monotonic clock (s).
    """
    parts = [f"regrow: {status.phase}"]
    if status.started is not None:
        parts.append(_clock(now - status.started))
    if status.attempt:
        parts.append(f"attempt {status.attempt}")
        alive = status.workers - len(status.gone)
        parts.append(f"{alive}/{status.workers} alive")
    if status.world > status.workers:
        parts.append(f"world {status.world}")
    if status.halted:
        parts.append(f"{len(status.halted)} halted")
    if status.restarts:
        parts.append(f"{status.restarts} restart{'s' if status.restarts > 1 else ''}")
    if status.news:
        parts.append(status.news)
    line = " | ".join(parts)
    line = "".join(c if " " <= c <= "~" else "?" for c in " ".join(line.split()))
    if len(line) <= width:
        return line
    return line[: width - 3] + "..." if width > 3 else line[:width]


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes:02}:{whole % 60:02}"
