"""The follower: a thread that shows files of workers' output, line by line, on a console.

The pump stores what workers print and says how far the files reach; this thread reads them from
there and writes to the console at whatever pace the console has. A terminal that is slow, or
stopped by Ctrl-S, so costs neither the workers their time, nor the agent memory, nor anyone a
line: what is not yet shown waits in the file.

What could not be stored (a full disk) is handed over in memory instead, up to `MAX_SPILLED`
bytes, with its place between the bytes that could. A thread of the
same kind, with other descriptors to write to, keeps the files of filtered lines.

A process has one console, so it has one follower for it (`console`), which outlives an attempt:
a job is restarted while the last lines of the attempt before are still on their way to a slow
terminal, and they come before those of the next.

A write to a console may block for ever. So nobody waits for this thread beyond a limit, and it
is a daemon: a process can end while it is blocked.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from time import monotonic

from regrow.workers._lines import Lines
from regrow.workers._sink import Sink

CHUNK = 32 * 1024
"""Bytes read from a file at once. Four times as many are four times as slow: what outgrows
128 KiB, malloc takes from the kernel and gives back each time."""
MAX_SPILLED = 4 * 1024 * 1024
"""Bytes of memory for what no file would take."""
SPILL_COST = 200
"""Bytes of memory that a piece of it takes beside its own; it may be a single byte."""


class Source:
    """What the follower knows of one stream. The pump makes it and hands it back, no more.

    Args:
        sink: where its lines go.
        lines: how they are made up.
        turn: what an older turn has to show comes first.
    """

    __slots__ = ("done", "ended", "file", "lines", "position", "sink", "spilled", "stored", "turn")

    def __init__(self, sink: Sink, lines: Lines, turn: float) -> None:
        self.sink = sink
        self.lines = lines
        self.turn = turn
        self.file = -1
        """Descriptor to read from; -1 for a stream of which only what is spilled is shown."""
        self.position = 0
        """How far the file was read."""
        self.stored = 0
        """How far it may be read."""
        self.spilled: deque[tuple[int, bytes]] = deque()
        """What the file lacks: where in the file it belongs, and the bytes. No bytes at all
        stand for an end of the gap in a stream whose file is not shown."""
        self.ended = False
        """Nothing more will come."""
        self.done = False
        """All is shown, or given up."""


class Follower:
    """Shows the sources given to it; starts its thread when there is something to do.

    Args:
        notes: where messages of our own go.
    """

    def __init__(self, notes: Sink) -> None:
        self._notes_sink = notes
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._shown = threading.Condition(self._lock)
        self._notes: deque[bytes] = deque()
        self._due: dict[Source, None] = {}
        """Sources with something to show; within a turn, who waits longest comes first."""
        self._live: set[Source] = set()
        """Sources that are not done."""
        self._spilled = 0
        """Bytes of memory that all sources' `spilled` take."""
        self._pieces = 0
        """Pieces shown: it grows as long as the console takes anything."""
        self._sinks: set[Sink] = set()
        self._thread: threading.Thread | None = None

    # --- what the pump calls: none of it waits for the console

    def add(self, source: Source) -> None:
        """Follow a source until it is ended or given up."""
        with self._lock:
            self._live.add(source)
            self._sinks.add(source.sink)

    def opened(self, source: Source, file: int, start: int) -> None:
        """Say where the stream is stored.

        Args:
            source: the stream.
            file: descriptor open for reading; from now on the follower's.
            start: offset in bytes from which on the file holds the stream.
        """
        with self._lock:
            source.file = file
            source.position = source.stored = start

    def stored(self, source: Source, end: int) -> None:
        """Say that the file holds the stream up to the offset `end`."""
        with self._lock:
            source.stored = end
            self._wake(source)

    def spill(self, source: Source, data: bytes) -> bool:
        """Show bytes that follow what is stored but are in no file.

        Returns:
            Whether they will be shown: not if too much waits already.
        """
        with self._lock:
            cost = len(data) + SPILL_COST
            if self._spilled + cost > MAX_SPILLED:
                return False
            self._spilled += cost
            source.spilled.append((source.stored, data))
            self._wake(source)
            return True

    def end(self, source: Source) -> None:
        """Say that the stream has ended."""
        with self._lock:
            source.ended = True
            self._wake(source)

    def say(self, text: str) -> None:
        """Show a message of our own, a line."""
        with self._lock:
            self._notes.append(text.encode(errors="surrogateescape") + b"\n")
            self._wake(None)

    def _wake(self, source: Source | None) -> None:
        if source is not None:
            self._due[source] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regrow-console", daemon=True)
            self._thread.start()
        self._news.notify()

    # --- what whoever ends calls

    def flush(
        self,
        sources: Sequence[Source] | None = None,
        stall: float = 5.0,
        limit: float = 60.0,
        *,
        give_up: bool = True,
    ) -> None:
        """Wait until ended sources are shown.

        Args:
            sources: which; None for all that have ended.
            stall: seconds without anything shown after which to wait no longer.
            limit: seconds after which to wait no longer in any case.
            give_up: what the console did not take by then is not shown; else it goes on.
        """
        with self._lock:
            if sources is None:
                sources = [source for source in self._live if source.ended]
            if self._wait(sources, stall, monotonic() + limit) or not give_up:
                return
            unshown = self._abandon(sources)
        if unshown:
            self._notes_sink.write_if_ready(
                f"regrow: about {unshown} bytes of output are not shown here: the console is too"
                " slow; they are in the log files"
            )

    def _wait(self, sources: Sequence[Source], stall: float, end: float) -> bool:
        """Whether all is shown in time (or was given up by another thread)."""

        def shown() -> bool:
            return not self._notes and all(source.done for source in sources)

        before = -1
        while not shown():
            left = min(stall, end - monotonic())
            if self._pieces == before or left <= 0:
                return False
            before = self._pieces
            self._shown.wait_for(shown, left)
        return True

    def _abandon(self, sources: Sequence[Source]) -> int:
        """Show no more of some sources; how many bytes of them were not shown."""
        unshown = 0
        for source in sources:
            spilled = sum(len(data) for _, data in source.spilled)
            unshown += max(0, source.stored - source.position) + spilled
            self._spilled -= spilled + len(source.spilled) * SPILL_COST
            source.spilled.clear()
            source.position = source.stored
            source.ended = source.done = True
            self._wake(source)
        self._shown.notify_all()
        return unshown

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._due and not self._notes:
                    if not self._live:
                        self._thread = None
                        for sink in self._sinks:
                            sink.close()
                        self._sinks.clear()
                        return
                    self._news.wait()
                note = self._notes[0] if self._notes else None
                source = min(self._due, key=_turn) if note is None else None
                if source is not None:
                    del self._due[source]
            if source is not None:
                self._show(source)
            elif note is not None:
                self._notes_sink.write(note)
                with self._lock:
                    self._pieces += 1
                    self._notes.popleft()
                    self._shown.notify_all()

    def _show(self, source: Source) -> None:
        """Show the next piece of a source, and queue it again if there is more."""
        with self._lock:
            spilled = source.spilled[0] if source.spilled else None
            limit = spilled[0] if spilled is not None else source.stored
            stored = source.position != limit and not source.done
            if not stored and spilled is not None:
                source.spilled.popleft()
                self._spilled -= len(spilled[1]) + SPILL_COST
            last = source.ended and not stored and spilled is None
        if stored:
            text = source.lines.feed(_read(source, limit))
        elif spilled is not None and spilled[1]:
            text = source.lines.feed(spilled[1])
        else:
            text = source.lines.rest() if spilled is not None or last else b""
        if not source.done:
            source.sink.write(text)
        with self._lock:
            self._pieces += 1
            if last:
                self._finish(source)
            elif source.ended or source.spilled or source.position != source.stored:
                self._due[source] = None

    def _finish(self, source: Source) -> None:
        source.done = True
        self._live.discard(source)
        self._due.pop(source, None)
        if source.file >= 0:
            os.close(source.file)
            source.file = -1
        self._shown.notify_all()


def _turn(source: Source) -> float:
    return source.turn


def _read(source: Source, limit: int) -> bytes:
    """The next bytes that the file has for a source, and moves its position on."""
    if source.position > limit:
        source.position = 0  # somebody emptied the file
    try:
        data = os.pread(source.file, min(CHUNK, limit - source.position), source.position)
    except OSError:
        data = b""
    source.position = source.position + len(data) if data else limit
    return data


@cache
def console() -> Follower:
    """The follower of this process's own stdout and stderr."""
    return Follower(Sink(2))


os.register_at_fork(after_in_child=console.cache_clear)  # its thread is the parent's
