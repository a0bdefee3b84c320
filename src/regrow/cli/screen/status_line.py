"""Status line: the last row of the terminal, below the scrolling output of the workers.

The workers of a job without `--redirects` write to the terminal themselves, so the agent cannot
know the position of the cursor. It therefore takes the last row out of the scrolling region
(DECSTBM), as apt does for its progress bar. A line that any process prints then scrolls only the
rows above. To draw, the agent saves the cursor, goes to the last row, writes, and restores the
cursor, in a single write.

One thread owns the terminal. It receives events and SIGWINCH through a queue. Any thread may call
the queue's `put`, and so may a signal handler. The thread reads the size of the terminal whenever
it draws, so a missed SIGWINCH costs a second at most. It never writes to a terminal that accepts no
output (Ctrl-S). It hides the line while the job is in the background of its terminal. So the line
never blocks the job.

Two pure functions determine the content: `advance` reduces the job's events to a `JobStatus`, and
`render` formats it.

`close` restores the scrolling region, at the latest by atexit. Two cases have no solution. After
SIGKILL the region stays reserved; the command `reset` repairs the terminal. After Ctrl-Z the region
stays reserved until the job continues.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from regrow.utils import ready, start_thread

if TYPE_CHECKING:
    from regrow.events import Event

RESUMED_S = 30.0
"""Seconds for which the line shows the first step after a restart."""

SWITCH = "REGROW_STATUS_LINE"
"""Environment variable; 0 turns the line off."""

MIN_ROWS, MIN_COLUMNS = 5, 30
"""Smallest terminal with a status line; in a smaller one the output needs the space."""

REFRESH_S = 1.0
CLOSE_TIMEOUT_S = 1.0
RELEASE_TIMEOUT_S = 0.5
"""Time limit (s) at the end of a job to restore a terminal that accepts no output."""

_SAVE, _RESTORE = "\0337", "\0338"
_WHOLE_SCREEN = "\033[r"
# Moves the cursor down one row (which scrolls at the bottom) and up again, in the same column. The
# cursor is then above the row that `reserve` takes.
_MAKE_ROOM = "\033D\033[A"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of the job on this node, as the line shows it."""

    started: float | None = None
    """Start of the job on the monotonic clock (s); None before the start."""
    phase: str = "starting"
    """Current activity of the job, in one or two words."""
    attempt: int | None = None
    """Number of the current or last attempt, from 0; None before the first."""
    world: int = 0
    """Number of workers in the current round, on all nodes."""
    workers: int = 0
    """Number of workers of this node in the current attempt."""
    gone: frozenset[int] = frozenset()
    """Ranks of this node that have failed."""
    halted: frozenset[int] = frozenset()
    """Ranks of this node that a signal such as SIGSTOP has suspended."""
    hung: frozenset[int] = frozenset()
    """Ranks of this node that are killed because one of their timers expired."""
    restarts: int = 0
    """Number of restarts of the workers."""
    incident: str = ""
    """Latest incident, in one line."""
    helpers: tuple[tuple[str, int, int], ...] = ()
    """The template and the standbys of this node: kind, pid, and memory in bytes."""
    incident_until: float | None = None
    """Time on the monotonic clock (s) at which `incident` disappears; None: it stays."""


def advance(status: JobStatus, name: str, metadata: Mapping[str, Any]) -> JobStatus:
    """Return the status after an event; unknown events change nothing.

    Args:
        status: the status before the event.
        name: name of the event, such as `regrow.attempt.started`.
        metadata: metadata of the event.
    """
    after = _advanced(status, name, metadata)
    if after.incident != status.incident and after.incident_until == status.incident_until:
        after = replace(after, incident_until=None)
    return after


def _advanced(status: JobStatus, name: str, metadata: Mapping[str, Any]) -> JobStatus:
    match name:
        case "regrow.job.started":
            return replace(status, started=metadata["monotonic"], phase="waiting for nodes")
        case "regrow.rendezvous.completed":
            world = int(metadata.get("world_size", 0))
            return replace(status, phase="starting workers", world=world)
        case "regrow.attempt.started":
            ranks = metadata.get("ranks", ())
            return replace(
                status,
                phase="running",
                attempt=int(metadata["attempt"]),
                world=int(metadata.get("world_size", len(ranks))),
                workers=len(ranks),
                gone=frozenset(),
                halted=frozenset(),
                hung=frozenset(),
            )
        case "regrow.worker.failed" if "told_monotonic" in metadata:  # on another host
            rank = metadata.get("rank")
            who = f"rank {rank}" if rank is not None else "the agent"
            incident = f"{who} on host {metadata.get('host')}: {_how_failed(metadata)}"
            return replace(status, incident=incident)
        case "regrow.worker.failed":
            rank = int(metadata["rank"])
            incident = str(metadata.get("killed_with") or f"rank {rank}: {_how_failed(metadata)}")
            if status.gone or rank in status.hung:
                incident = status.incident  # keep the first failure, with its reason
            return replace(status, gone=status.gone | {rank}, incident=incident)
        case "regrow.worker.suspended":
            rank = int(metadata["rank"])
            incident = f"rank {rank} is paused by {metadata.get('signal')}"
            return replace(status, halted=status.halted | {rank}, incident=incident)
        case "regrow.worker.resumed":
            rank = int(metadata["rank"])
            return replace(status, halted=status.halted - {rank}, incident=f"rank {rank} continues")
        case "regrow.timer.expired":
            from regrow.events import short_scope

            rank, scope = metadata["rank"], short_scope(str(metadata["scope"]))
            who = f"rank {rank}" if rank is not None else "a process of a worker"
            what = "no heartbeat" if metadata.get("heartbeat") else f"timer {scope}"
            status = replace(status, incident=f"{who} hangs: {what}")
            killed = rank is not None and metadata["signal"] is not None
            return replace(status, hung=status.hung | {rank}) if killed else status
        case "regrow.heartbeat.stalled":
            return replace(status, incident=f"rank {metadata.get('rank')} makes no progress")
        case "regrow.inprocess.lost":
            lost = f"rank {metadata['rank']} is lost; the others continue"
            return replace(status, workers=max(status.workers - 1, 0), incident=lost)
        case "regrow.template.ready" | "regrow.standby.ready":
            helper = name.split(".")[1], int(metadata["pid"]), int(metadata["resident_bytes"])
            return replace(status, helpers=(*status.helpers, helper))
        case "regrow.template.gone" | "regrow.standby.gone" | "regrow.worker.replaced":
            pid = metadata["pid"]
            return replace(status, helpers=tuple(h for h in status.helpers if h[1] != pid))
        case "regrow.worker.vacated":
            what = f"rank {metadata['rank']} ended; the others wait for another process"
            return replace(status, incident=what)
        case "regrow.inprocess.restarted":
            return replace(status, incident=f"in-process restart after {metadata.get('kind')}")
        case "regrow.round.ended" | "regrow.rendezvous.lost":
            if status.gone:  # a failure on this node is more important
                return status
            return replace(status, incident=str(metadata.get("why", "")))
        case "regrow.job.gathering":
            waiting = int(metadata["waiting"])
            return replace(
                status, incident=f"{waiting} node{'s' if waiting != 1 else ''} waiting to join"
            )
        case "regrow.attempt.ended":
            templates = tuple(h for h in status.helpers if h[0] == "template")
            status = replace(status, helpers=templates)  # the standbys end with the attempt
            return replace(status, phase="stopped", workers=0, gone=frozenset(), halted=frozenset())
        case "regrow.job.restarting":
            delay = float(metadata.get("delay_s", 0))
            phase = f"restarting in {delay:.0f} s" if delay >= 1 else "restarting"
            incident = status.incident or str(metadata.get("reason", ""))
            return replace(status, phase=phase, restarts=status.restarts + 1, incident=incident)
        case "regrow.worker.first_step":
            if status.restarts == 0:
                return status
            incident = f"rank {metadata['rank']} continued with step {metadata['step']}"
            return replace(
                status, incident=incident, incident_until=metadata["monotonic"] + RESUMED_S
            )
        case "regrow.job.finished":
            return replace(status, phase=str(metadata.get("state", "finished")).lower())
    return status


def _how_failed(metadata: Mapping[str, Any]) -> object:
    """Return the signal that ended a worker; its message if it had failed before the signal."""
    signal = None if metadata.get("stopped") else metadata.get("signal")
    return signal or metadata.get("message")


def render(status: JobStatus, width: int, now: float) -> str:
    """Format the line in plain ASCII; the least important part is at the end and is cut first.

    Args:
        status: the status to show.
        width: the most columns to use.
        now: the current time on the monotonic clock (s).
    """
    parts = [f"regrow: {status.phase}"]
    if status.started is not None:
        parts.append(_clock(now - status.started))
    if status.attempt is not None:
        parts.append(f"attempt {status.attempt}")
        alive = status.workers - len(status.gone)
        parts.append(f"{alive}/{status.workers} alive")
    if status.world > status.workers:
        parts.append(f"world {status.world}")
    if status.halted:
        parts.append(f"{len(status.halted)} paused")
    if status.restarts:
        parts.append(f"{status.restarts} restart{'s' if status.restarts > 1 else ''}")
    if status.incident and (status.incident_until is None or now < status.incident_until):
        parts.append(status.incident)
    for kind in ("template", "standby"):
        sizes = [size for helper, _, size in status.helpers if helper == kind]
        if sizes:
            who = f"{len(sizes)} {kind}s" if len(sizes) > 1 else kind
            parts.append(f"{who} {sum(sizes) / 1e6:.0f} MB")
    line = " | ".join(parts)
    line = "".join(c if " " <= c <= "~" else "?" for c in " ".join(line.split()))
    if len(line) <= width:
        return line
    return line[: width - 3] + "..." if width > 3 else line[:width]


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes:02}:{whole % 60:02}"


# --- the terminal


def reserve(rows: int) -> str:
    """Return the codes that take the last of `rows` out of the scrolling region.

    A terminal moves the cursor home when the region changes, so the codes restore the cursor.
    """
    whole = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}"
    return f"{whole}{_MAKE_ROOM}{_SAVE}\033[1;{rows - 1}r{_RESTORE}"


def draw(rows: int, text: str, *, reverse: bool) -> str:
    """Return the codes that write `text` on the last of `rows`."""
    styled = f"\033[7m{text}\033[0m" if reverse else text
    return f"{_SAVE}\033[{rows};1H\033[0m{styled}\033[K{_RESTORE}"


def release(rows: int) -> str:
    """Return the codes that clear the last of `rows` and let it scroll again."""
    return f"{_SAVE}{_WHOLE_SCREEN}\033[{rows};1H\033[0m\033[2K{_RESTORE}"


def wanted(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Return whether `stream` gets a status line: a capable terminal, and not switched off."""
    if stream is None or environ.get(SWITCH) == "0":
        return False
    if environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    return stream.isatty()


class StatusLine:
    """Event sink and context manager that draws the status line on a terminal.

    Args:
        fd: file descriptor of the terminal.
        reverse: draw in reverse video (NO_COLOR requests plain text).
        clock: returns monotonic seconds.
    """

    def __init__(
        self, fd: int, *, reverse: bool = True, clock: Callable[[], float] = monotonic
    ) -> None:
        self._fd = fd
        self._reverse = reverse
        self._clock = clock
        # Items: an event, None to draw again (SIGWINCH), or this object itself to stop the thread.
        self._queue: SimpleQueue[object] = SimpleQueue()
        self._status = JobStatus()
        self._reserved: int | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._previous: Any = None

    def __call__(self, event: Event) -> None:
        """Receive an event of the job; return at once."""
        self._queue.put(event)

    def __enter__(self) -> StatusLine:
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGWINCH, self._on_resize)
        self._thread = start_thread(self._run, "regrow-status")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal; a second call, or a call in a forked child, does nothing."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._queue.put(self)
        thread.join(CLOSE_TIMEOUT_S)
        if self._previous is not None:
            signal.signal(signal.SIGWINCH, self._previous)
        atexit.unregister(self.close)

    def _on_resize(self, signum: int, frame: FrameType | None) -> None:
        self._queue.put(None)
        if callable(self._previous):
            self._previous(signum, frame)

    def _run(self) -> None:
        try:
            while self._receive():
                self._refresh()
        finally:
            self._hide(RELEASE_TIMEOUT_S)

    def _receive(self) -> bool:
        """Wait for queue items and reduce all of the events; return False at the end."""
        timeout = None if self._status.started is None else REFRESH_S
        try:
            item: Any = self._queue.get(timeout=timeout)
            while True:
                if item is self:
                    return False
                if item is not None:
                    self._status = advance(self._status, item.name, item.metadata)
                item = self._queue.get_nowait()
        except Empty:
            return True

    def _refresh(self) -> None:
        size = self._room()
        if size is None or self._status.started is None:
            self._hide()
            return
        # The last column stays empty: some terminals wrap after a character there.
        line = render(self._status, size.columns - 1, self._clock())
        text = draw(size.lines, line, reverse=self._reverse)
        if self._reserved != size.lines:
            text = reserve(size.lines) + text
        if self._write(text):
            self._reserved = size.lines

    def _hide(self, seconds: float = 0.0) -> None:
        if self._reserved is not None and self._write(release(self._reserved), seconds):
            self._reserved = None

    def _room(self) -> os.terminal_size | None:
        """Return the terminal's size; None if the terminal cannot show the line now."""
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:
            return None
        if size.lines < MIN_ROWS or size.columns < MIN_COLUMNS or not self._in_foreground():
            return None
        return size

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not the controlling terminal, so no other job runs on it
            return True

    def _write(self, text: str, seconds: float = 0.0) -> bool:
        if not ready([self._fd], seconds, select.POLLOUT):
            return False
        try:
            os.write(self._fd, text.encode("ascii"))
        except OSError:  # the terminal is gone; nothing to restore
            return False
        return True
