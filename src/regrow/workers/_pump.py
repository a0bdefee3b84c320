"""The pump: one thread that moves what workers print from their pipes into their log files.

Each redirected stream is a pipe. The worker writes to the pipe and never to the disk, so a full
or failing disk is the pump's trouble, not the training's: the pump goes on reading, hands what
no file takes to the console, and stores again once the disk takes it. What was printed is stored
at once, so that `tail -f` and a log shipper see it, and moved without passing through our memory,
so that the guardian can go on where we were if this process is killed at any instant: the pipes
outlive it, and so does what is in them (`_stream.py`).

Showing output on the console (tee) and keeping the files of filtered lines is the follower's
part; it reads what is stored, and the pump never waits for it. A stream that is not redirected
has no pipe: the worker inherits our own.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Literal

from regrow.workers._console import Follower, Source, console
from regrow.workers._lines import Lines
from regrow.workers._sink import Sink
from regrow.workers._stream import PIECE, PIPE_SIZE, Stream

if TYPE_CHECKING:
    from regrow.workers._logs import LogsDest

PAGE_SIZE = 4096
"""Bytes; the least that a pipe keeps a piece in."""
MIN_FLUSH_S = 0.5
"""Seconds that a console has for the last lines also when all must stop at once."""
MOMENT_S = 0.1
"""Seconds that a console may hold up the next attempt."""
SLOW_FLUSH = 12
"""Times as long as for one that takes nothing, a console is waited for that is merely slow."""
STUCK_S = 5.0
"""Seconds after the deadline of a stop in which a pump ends unless its file system hangs."""


class LogPump:
    """Stores and shows the output of the workers of one attempt.

    Make it before the workers, give each the descriptors of `writer_fd`, and `start` it; when the
    workers have their descriptors, `close_writers`; when they have ended, `stop`. Where nothing
    is redirected no thread runs.

    Args:
        name: of the workers' role; lines on the console start with `[<name><local_rank>]:`.
        dest: where each stream goes.
        prefixes: another start of the lines, by local rank.
        stdout_filters: lines of tee'd stdouts that contain one of these are copied to
            `dest.filtered_stdout`.
        stderr_filters: the same for stderr and `dest.filtered_stderr`.
        stdout_fd: the console for stdout.
        stderr_fd: the console for stderr, and for messages of our own.
        follower: what shows the lines; None is the process's own, `console()`.

    Raises:
        ValueError: a stream is to be shown from a file that it does not go to.
        OSError: there are no more descriptors to be had.
    """

    def __init__(
        self,
        name: str,
        dest: LogsDest,
        prefixes: Mapping[int, str] | None = None,
        *,
        stdout_filters: Sequence[str] | None = None,
        stderr_filters: Sequence[str] | None = None,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        follower: Follower | None = None,
    ) -> None:
        self.unstored = 0
        """Bytes that no file took."""
        self.lost = 0
        """Bytes among them that the console could not be given either."""
        self._notes, stdout = Sink(stderr_fd), Sink(stdout_fd)
        self._console = follower if follower is not None else console()
        self._turn = monotonic()
        self._sieve = Follower(self._notes)
        self._prefixes = {rank: f"[{name}{rank}]:" for rank in dest.stdouts} | dict(prefixes or {})
        self._streams: dict[tuple[int, str], Stream] = {}
        self._dropped: set[tuple[int, str]] = set()
        self._sources: list[Source] = []
        self._sieved: list[Source] = []
        self._null = -1
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._control = -1
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        self._told = False
        try:
            self._add(
                "stdout",
                dest.stdouts,
                dest.tee_stdouts,
                stdout,
                stdout_filters,
                dest.filtered_stdout,
            )
            self._add(
                "stderr",
                dest.stderrs,
                dest.tee_stderrs,
                self._notes,
                stderr_filters,
                dest.filtered_stderr,
            )
            if self._streams:
                self._control = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            if self._dropped:
                self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.close_writers()
            self._end()
            raise

    def _add(
        self,
        name: str,
        paths: Mapping[int, str],
        tees: Mapping[int, str],
        sink: Sink,
        filters: Sequence[str] | None,
        filtered: str,
    ) -> None:
        for rank, path in tees.items():
            if path not in (paths.get(rank), os.devnull):
                raise ValueError(
                    f"{name} of local rank {rank} cannot be shown from {path}: it goes to"
                    f" {paths.get(rank) or 'the console'}; a stream is tee'd from the file that"
                    " it is redirected to"
                )
        sieve = self._open_sieve(filtered) if filters and filtered and tees else None
        for rank, path in paths.items():
            if path == os.devnull:
                self._dropped.add((rank, name))
            if path in ("", os.devnull):
                continue
            prefix, shown = self._prefixes[rank], rank in tees
            source = Source(sink, Lines(prefix), self._turn)
            reader = None
            if sieve is not None and filters and shown:
                reader = (self._sieve, Source(sieve, Lines(prefix, filters), self._turn))
                self._sieve.add(reader[1])
                self._sieved.append(reader[1])
            self._console.add(source)
            self._sources.append(source)
            stream = Stream(path, shown, (self._console, source), reader)
            self._streams[rank, name] = stream

    def _open_sieve(self, path: str) -> Sink | None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return Sink(os.open(path, flags, 0o644), owned=True)
        except OSError as error:
            self._say(f"no filtered lines are kept: {path} cannot be made: {_why(error)}")
            return None

    def writer_fd(self, local_rank: int, stream: Literal["stdout", "stderr"]) -> int | None:
        """The descriptor that a worker gets as its stdout or stderr; None to inherit ours."""
        if (local_rank, stream) in self._dropped:
            return self._null
        found = self._streams.get((local_rank, stream))
        return found.writer if found is not None else None

    def drain_fds(self) -> list[tuple[int, str]]:
        """The ends that are read, non-blocking, each with its file, in the order to read them.

        For the guardian, which stores what is left in the pipes if this process is killed.
        """
        return [(fd, stream.path) for stream in self._streams.values() for fd in stream.fds[:2]]

    def own_fds(self) -> set[int]:
        """The descriptors that no worker may inherit."""
        return {fd for stream in self._streams.values() for fd in stream.fds}

    def start(self) -> None:
        """Begin to store what the workers print."""
        if self._streams and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regrow-pump", daemon=True)
            self._thread.start()

    def close_writers(self) -> None:
        """Close our copies of the workers' ends, without which no stream ever ends."""
        for stream in self._streams.values():
            stream.close_writer()
        if self._null >= 0:
            os.close(self._null)
            self._null = -1

    def stop(self, timeout: float = 5.0, *, flush: bool = True) -> None:
        """Store all that the workers printed, and show it.

        A second call from another thread, with a smaller timeout, hurries the first.

        Args:
            timeout: seconds to wait for streams that somebody holds open still (a process that a
                worker left behind); what they contain then is stored and they are closed. A
                console that takes nothing for that time, or is not done in `SLOW_FLUSH` times
                that, shows no more: the rest is in the files, and it is told so if it listens.
            flush: wait for the console like that; else for `MOMENT_S`, which is plenty for one
                that keeps up, and one that does not goes on by itself: see `Follower.flush`.
        """
        self.close_writers()
        deadline = monotonic() + timeout
        with self._lock:
            if self._deadline is None or deadline < self._deadline:
                self._deadline = deadline
            if self._control >= 0:
                os.eventfd_write(self._control, 1)
        if self._thread is None:
            self._end()
        else:
            self._thread.join(timeout + STUCK_S)
            if self._thread.is_alive():
                path = next(iter(self._streams.values())).path
                self._notes.write_if_ready(
                    f"regrow: the file system of {path} hangs; output may be missing there"
                )
        stall = max(timeout, MIN_FLUSH_S)
        self._sieve.flush(self._sieved, stall, stall * SLOW_FLUSH)
        if flush:
            self._console.flush(self._sources, stall, stall * SLOW_FLUSH)
        else:
            self._console.flush(self._sources, MOMENT_S, MOMENT_S, give_up=False)

    # --- the thread

    def _run(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        live = {stream.reader: stream for stream in self._streams.values()}
        with select.epoll() as poll:
            poll.register(self._control, select.EPOLLIN)
            for reader in live:
                poll.register(reader, select.EPOLLIN)
            while live and (left := self._time_left()) != 0:
                for fd, _ in poll.poll(left):
                    if fd == self._control:
                        os.eventfd_read(fd)
                    elif self._move(live[fd], buffer) == 0:
                        poll.unregister(fd)
                        live.pop(fd).end()
            for stream in live.values():  # held open by others: what is in the pipe, no more
                for _ in range(PIPE_SIZE // PAGE_SIZE):
                    if not self._move(stream, buffer):
                        break
        self._end()

    def _time_left(self) -> float | None:
        """Seconds until all must be over; None before a stop."""
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - monotonic())

    def _move(self, stream: Stream, buffer: memoryview) -> int | None:
        """Store what a pipe holds, or a piece of it; 0 at its end, None if it is empty."""
        try:
            size = stream.take()
        except BlockingIOError:
            return None
        if size == 0:
            return 0
        rest, trouble = stream.store(buffer)
        if trouble is None:
            if stream.failing:
                stream.mended()
                self._say_once("output is stored again")
            return size
        stream.failing = True
        self._say_once(
            f"{stream.path} cannot be written: {_why(trouble)}; the workers run on, and what they"
            " print goes to the console as long as no file takes it",
            kind="trouble",
        )
        self.unstored += len(rest)
        if not stream.spill(bytes(rest)):
            self.lost += len(rest)
        return size

    def _end(self) -> None:
        with self._lock:
            if self._control >= 0:
                os.close(self._control)
                self._control = -1
        for stream in self._streams.values():
            if stream.reader >= 0:
                stream.end()
        if self.unstored and not self._told:
            self._told = True
            self._say(
                f"{self.unstored} bytes of output are in no file; they went to the console"
                + (f", but for {self.lost} that it was too slow for" if self.lost else "")
            )

    def _say(self, text: str) -> None:
        self._console.say(f"regrow: {text}")

    def _say_once(self, text: str, kind: str = "") -> None:
        if (kind or text) not in self._said:
            self._said.add(kind or text)
            self._say(text)


def _why(error: OSError) -> str:
    return f"[Errno {error.errno}] {error.strerror}"
