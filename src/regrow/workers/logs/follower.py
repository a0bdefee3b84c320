"""Tee: a thread that copies files of workers' output to the console, line by line.

The pump stores what workers print and reports how far the files reach. This thread reads the files
and writes to the console at the console's speed. So a terminal that is slow, or stopped by Ctrl-S,
delays no worker, takes no memory of the agent, and loses no line: lines that are not shown yet wait
in the file.

Output that could not be stored (a full disk) is passed in memory instead, up to `MAX_SPILLED`
bytes, with its position between the stored bytes. A thread of the same kind, with other output
descriptors, writes the files of filtered lines.

A process has one console, so it has one follower for it (`console`). The follower outlives an
attempt: a job may restart while the last lines of the previous attempt are still on their way to a
slow terminal. Those lines come before the lines of the next attempt.

A write to a console may block without end. So no thread waits for the follower beyond a limit, and
it is a daemon thread: a process can end while it is blocked.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from time import monotonic

from regrow.utils import stamped, start_thread
from regrow.workers.logs.lines import Lines, Output, Sink, standard_output

CHUNK = 32 * 1024
"""Bytes read from a file at once.

Four times as many are four times as slow: for sizes above 128 KiB, malloc takes memory from the
kernel and returns it each time.
"""
MAX_SPILLED = 4 * 1024 * 1024
"""Most bytes of memory for output that no file stores."""
SPILL_COST = 200
"""Bytes of memory for each such piece, besides its content, which may be a single byte."""


class Source:
    """The follower's state of one stream; `Follower.add` returns it to the pump.

    Args:
        follower: shows the stream.
        sink: destination of the lines.
        lines: splits the stream into lines.
        turn: sources with a lower turn are shown first.
    """

    def __init__(self, follower: Follower, sink: Output, lines: Lines, turn: float) -> None:
        self.follower = follower
        self.sink = sink
        self.lines = lines
        self.turn = turn
        self.file = -1
        """Descriptor to read from; -1 for a stream with only spilled bytes to show."""
        self.position = 0
        """Offset up to which the file was read."""
        self.stored = 0
        """Offset up to which the file may be read."""
        self.spilled: deque[tuple[int, bytes]] = deque()
        """Pieces that the file lacks: the offset in the file, and the bytes.

        Empty bytes mark the end of the gap in a stream without a shown file.
        """
        self.ended = False
        """Whether the stream has ended."""
        self.done = False
        """Whether all output is shown, or given up."""


class Follower:
    """Shows the added sources; starts its thread at the first output.

    Args:
        notes: destination of regrow's own messages.
        outputs: destinations of the lines, by the name of the stream; a name that is missing stands
            for this process's own stream.
    """

    def __init__(self, notes: Sink, outputs: Mapping[str, Output] | None = None) -> None:
        self.notes = notes
        self._outputs = outputs or {}
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._shown = threading.Condition(self._lock)
        self._notes: deque[bytes] = deque()
        self._due: dict[Source, None] = {}
        """Sources with output to show; within a turn, the source that waits longest comes first."""
        self._live: set[Source] = set()
        """Sources that are not done."""
        self._spilled = 0
        """Bytes of memory in the `spilled` pieces of all sources."""
        self._pieces = 0
        """Number of shown pieces: it grows as long as the console accepts output."""
        self._sinks: set[Output] = set()
        self._thread: threading.Thread | None = None

    # --- called by the pump: no method here waits for the console

    def output(self, name: str, fd: int) -> Output:
        """Return the destination for the lines of a stream: `stdout`, 1 or `stderr`, 2."""
        return self._outputs.get(name) or standard_output(name, fd)

    def add(self, sink: Output, lines: Lines, turn: float) -> Source:
        """Follow a stream until it is ended or given up; see `Source`."""
        source = Source(self, sink, lines, turn)
        with self._lock:
            self._live.add(source)
            self._sinks.add(sink)
        return source

    def opened(self, source: Source, file: int, start: int) -> None:
        """Set the file that stores the stream.

        Args:
            source: the stream.
            file: descriptor open for reading; the follower owns it from now on.
            start: offset in bytes at which the stream starts in the file.
        """
        with self._lock:
            if source.file >= 0:  # the pump opened it for some readers only
                os.close(source.file)
            source.file = file
            source.position = source.stored = start

    def stored(self, source: Source, end: int) -> None:
        """Note that the file holds the stream up to the offset `end`."""
        with self._lock:
            source.stored = end
            self._wake(source)

    def spill(self, source: Source, data: bytes) -> bool:
        """Show bytes that follow the stored output but are in no file.

        Returns:
            Whether they will be shown; False if too many bytes wait already.
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
        """Note that the stream has ended."""
        with self._lock:
            source.ended = True
            self._wake(source)

    def report(self, text: str) -> None:
        """Show one of regrow's own messages, a line."""
        with self._lock:
            self._notes.append(f"{stamped(f'regrow: {text}')}\n".encode(errors="surrogateescape"))
            self._wake(None)

    def report_at_once(self, text: str) -> None:
        """Show one of regrow's own messages, unless that could block."""
        self.notes.write_if_ready(stamped(f"regrow: {text}"))

    def _wake(self, source: Source | None) -> None:
        if source is not None:
            self._due[source] = None
        if self._thread is None:
            self._thread = start_thread(self._run, "regrow-console")
        self._work.notify()

    # --- called at the end of a job

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
            sources: the sources; None for all that have ended.
            stall: seconds without any progress after which the wait ends.
            limit: seconds after which the wait ends in any case.
            give_up: drop the output that the console did not accept by then; otherwise the thread
                continues.
        """
        with self._lock:
            if sources is None:
                sources = [source for source in self._live if source.ended]
            if self._wait(sources, stall, monotonic() + limit) or not give_up:
                return
            unshown = self._give_up(sources)
        if unshown:
            self.report_at_once(
                f"about {unshown} bytes of output are not shown here, because the console is too"
                " slow; they are in the log files"
            )

    def _wait(self, sources: Sequence[Source], stall: float, end: float) -> bool:
        """Return whether all is shown in time (or was given up by another thread)."""

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

    def _give_up(self, sources: Sequence[Source]) -> int:
        """Stop showing some sources; return the number of bytes that were not shown."""
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
                    self._work.wait()
                note = self._notes[0] if self._notes else None
                if note is None:
                    source = min(self._due, key=lambda due: due.turn)
                    del self._due[source]
            if note is None:
                self._show(source)
                continue
            self.notes.write(note)
            with self._lock:
                self._pieces += 1
                self._notes.popleft()
                self._shown.notify_all()

    def _show(self, source: Source) -> None:
        """Show the next piece of a source, and queue the source again if it has more."""
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
                source.done = True
                self._live.discard(source)
                self._due.pop(source, None)
                if source.file >= 0:
                    os.close(source.file)
                    source.file = -1
                self._shown.notify_all()
            elif source.ended or source.spilled or source.position != source.stored:
                self._due[source] = None


def _read(source: Source, limit: int) -> bytes:
    """Return the next bytes of a source's file, and advance the source's position."""
    if source.position > limit:
        source.position = 0  # the file was truncated
    try:
        data = os.pread(source.file, min(CHUNK, limit - source.position), source.position)
    except OSError:
        data = b""
    source.position = source.position + len(data) if data else limit
    return data


@cache
def console() -> Follower:
    """Return the follower of this process's own stdout and stderr."""
    return Follower(Sink(2))


os.register_at_fork(after_in_child=console.cache_clear)  # its thread belongs to the parent
