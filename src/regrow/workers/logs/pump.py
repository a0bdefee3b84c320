"""The pump: a thread that moves worker output from pipes to log files. A full disk does not end it.

Each redirected stream is a pipe. The worker writes to the pipe and never to the disk. So a full or
failing disk affects the pump, not the training. The pump continues to read, passes output that no
file stores to the console, and stores again when the disk recovers. Output is stored at once, so
that `tail -f` and a log shipper see it. It moves without passing through the agent's memory
(`stream.py`). So if this process is killed at any instruction, the guardian can continue at the
same position: the pipes and their content outlive the process.

The follower shows output on the console (tee) and writes the files of filtered lines. It reads the
stored output, and the pump never waits for the follower. A stream that is not redirected has no
pipe of the pump: the worker inherits the agent's stream, or its stderr goes there by the relay
(`relay.py`).
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from regrow.utils import start_thread
from regrow.workers.logs.follower import Follower, Source, console
from regrow.workers.logs.lines import Lines, Sink
from regrow.workers.logs.relay_process import KEPT
from regrow.workers.logs.specs import keeps_stderr
from regrow.workers.logs.stream import PIECE, PIPE_SIZE, Stream

if TYPE_CHECKING:
    from regrow.workers.logs.relay import KeptStream, StderrRelay
    from regrow.workers.logs.specs import LogsDest

PAGE_SIZE = 4096
"""Bytes; the smallest unit of memory for a piece in a pipe."""
MIN_FLUSH_S = 0.5
"""Least seconds for a console to show the last lines, even in an immediate stop."""
MOMENT_S = 0.1
"""Most seconds for which a console may delay the next attempt."""
SLOW_FLUSH = 12
"""Factor between the wait for a slow console and the wait for a console that accepts nothing."""
STUCK_S = 5.0
"""Seconds after the deadline of a stop in which a pump ends, unless its file system hangs."""


class LogPump:
    """Stores and shows the output of the workers of one attempt.

    Create it before the workers, pass each worker the descriptors of `writer_fds`, and call
    `start`. When the workers have their descriptors, call `close_writers`; when they have ended,
    `stop`. If no stream is redirected, no thread runs.

    Args:
        name: role of the workers; lines on the console start with `[<name><local_rank>]:`.
        dest: destination of each stream.
        prefixes: another start of the lines, by local rank.
        stdout_filters: lines of tee'd stdouts that contain one of these are copied to
            `dest.filtered_stdout`.
        stderr_filters: the same for stderr and `dest.filtered_stderr`.
        follower: shows the lines; None is the follower of the process, `console()`.
        relay: keeps the end of each stderr that is not redirected, if `dest` asks for it; None: a
            worker inherits such a stream.

    Raises:
        ValueError: a stream must be shown from a file that it is not written to.
        OSError: no more descriptors are available.
    """

    def __init__(
        self,
        name: str,
        dest: LogsDest,
        prefixes: Mapping[int, str] | None = None,
        *,
        stdout_filters: Sequence[str] | None = None,
        stderr_filters: Sequence[str] | None = None,
        follower: Follower | None = None,
        relay: StderrRelay | None = None,
    ) -> None:
        self.unstored = 0
        """Number of bytes that no file stored."""
        self.lost = 0
        """Number of unstored bytes that the console could not show either."""
        self._console = follower if follower is not None else console()
        self._turn = monotonic()
        self._copier = Follower(self._console.notes)
        self._prefixes = {rank: f"[{name}{rank}]:" for rank in dest.stdouts} | dict(prefixes or {})
        self._streams: dict[tuple[int, int], Stream] = {}
        self._writers: dict[tuple[int, int], int] = {}  # the workers' ends, by rank and descriptor
        self._relay = relay if keeps_stderr(dest) else None
        self._kept: dict[int, KeptStream] = {}  # by rank
        self._sources: list[Source] = []
        self._copied: list[Source] = []
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self._stream_ended = threading.Condition()
        self._control = -1
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        out, err = (dest.stdouts, dest.tee_stdouts), (dest.stderrs, dest.tee_stderrs)
        try:
            self._add("stdout", 1, *out, stdout_filters, dest.filtered_stdout)
            self._add("stderr", 2, *err, stderr_filters, dest.filtered_stderr)
            if self._streams:
                self._control = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self.close_writers()
            self._end()
            raise

    def _add(
        self,
        name: str,
        number: int,
        paths: Mapping[int, str],
        tees: Mapping[int, str],
        filters: Sequence[str] | None,
        filtered: str,
    ) -> None:
        for rank, path in tees.items():
            if path not in (paths.get(rank), os.devnull):
                raise ValueError(
                    f"cannot show {name} of local rank {rank} from {path}, because it goes to"
                    f" {paths.get(rank) or 'the console'}: a stream is shown from the file that"
                    " it is redirected to"
                )
        sink = self._console.output(name, number)
        copy = self._open_copy(filtered) if filters and filtered and tees else None
        for rank, path in paths.items():
            if number == 2 and path in ("", os.devnull) and self._keep(rank, is_shown=not path):
                continue
            if path == os.devnull:
                self._writers[rank, number] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            if path in ("", os.devnull):
                continue
            prefix, copies = self._prefixes[rank], []
            source = self._console.add(sink, Lines(prefix), self._turn)
            if copy is not None and filters and rank in tees:
                copies.append(self._copier.add(copy, Lines(prefix, filters), self._turn))
            stream = Stream(path, rank in tees, source, copies)
            self._streams[rank, number] = stream
            self._writers[rank, number] = stream.writer
            self._sources.append(source)
            self._copied += copies

    def _keep(self, rank: int, *, is_shown: bool) -> bool:
        """Let the relay keep the stderr of a worker; return whether it does."""
        kept = self._relay.add(is_shown=is_shown) if self._relay is not None else None
        if kept is not None:
            self._kept[rank], self._writers[rank, 2] = kept, kept.writer
        return kept is not None

    def _open_copy(self, path: str) -> Sink | None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return Sink(os.open(path, flags, 0o644), owned=True)
        except OSError as error:
            self._report_once(
                path, f"cannot create {path}: {_reason(error)}; filtered lines are not stored there"
            )
            return None

    def writer_fds(self, local_rank: int) -> dict[int, int]:
        """Return a worker's descriptors 1 and 2; it inherits those that are missing."""
        return {number: fd for (rank, number), fd in self._writers.items() if rank == local_rank}

    def drain_fds(self, local_rank: int) -> list[tuple[int, str]]:
        """Return the reading ends of a worker's pipes, each with its file, in the order to read.

        The guardian stores the content of these pipes if this process is killed.
        """
        return [
            (fd, stream.path)
            for (rank, _), stream in self._streams.items()
            if rank == local_rank
            for fd in stream.fds[:2]
        ]

    def own_fds(self) -> set[int]:
        """Return the descriptors of the pump that no forked worker may keep."""
        return {fd for each in self._streams.values() for fd in each.fds} | {
            *self._writers.values()
        }

    def start(self) -> None:
        """Start to store the workers' output; no effect after the first call."""
        if self._relay is not None:
            self._relay.start()
        with self._lock:
            if self._streams and self._thread is None:
                self._thread = start_thread(self._run, "regrow-pump")

    def close_writers(self) -> None:
        """Close the agent's copies of the write ends of the workers' pipes.

        While one is open, the reader never sees the end of the file.
        """
        with suppress(KeyError):  # another thread may close them as well
            while self._writers:
                os.close(self._writers.popitem()[1])

    def await_end(self, local_rank: int, timeout: float) -> None:
        """Wait until all output of a worker that has ended is stored.

        Args:
            local_rank: the worker.
            timeout: seconds to wait, if a process holds the worker's streams open.
        """
        until = monotonic() + timeout
        streams = [stream for (rank, _), stream in self._streams.items() if rank == local_rank]
        with self._stream_ended:
            self._stream_ended.wait_for(lambda: all(s.reader < 0 for s in streams), timeout)
        if self._relay is not None and local_rank in self._kept:
            self._relay.await_end(self._kept[local_rank], max(0.0, until - monotonic()))

    def last_stderr(self, local_rank: int, timeout: float) -> str:
        """Return the last `KEPT` bytes of a worker's stderr; empty if they are not kept.

        Args:
            local_rank: the worker, which has ended.
            timeout: seconds to wait for its output, if a process holds its streams open.
        """
        self.await_end(local_rank, timeout)
        if self._relay is not None and local_rank in self._kept:
            return self._relay.last(self._kept[local_rank])
        stream = self._streams.get((local_rank, 2))
        return _end_of(stream.path) if stream is not None else ""

    def stop(self, timeout: float = 5.0, *, flush: bool = True) -> None:
        """Store all output of the workers, and show it.

        A second call from another thread, with a smaller timeout, shortens the first.

        Args:
            timeout: seconds to wait for streams that are still held open (by a process that a
                worker left behind). Their content at that time is stored, and they are closed. The
                same limit applies to a console that accepts nothing; `SLOW_FLUSH` times that
                applies to a slow console. After that, the console shows no more output: the rest is
                in the files, and a note on the console reports this.
            flush: wait for the console as described. Otherwise wait `MOMENT_S`, which is enough for
                a console without delay; a slower one continues on its own: see `Follower.flush`.
                The relay continues in any case.
        """
        self.close_writers()
        self.start()  # the workers may have ended before another thread does it
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
                self._console.report_at_once(
                    f"the file system of {path} hangs; output may be missing there"
                )
        until = monotonic() + MOMENT_S
        for rank in self._kept:
            self.await_end(rank, max(0.0, until - monotonic()))
        stall = max(timeout, MIN_FLUSH_S)
        self._copier.flush(self._copied, stall, stall * SLOW_FLUSH)
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
                        with self._stream_ended:
                            live.pop(fd).end()
                            self._stream_ended.notify_all()
            for stream in live.values():  # other processes hold it open: store its current content
                for _ in range(PIPE_SIZE // PAGE_SIZE):
                    if not self._move(stream, buffer):
                        break
        self._end()

    def _time_left(self) -> float | None:
        """Return the seconds until the deadline; None before a stop."""
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - monotonic())

    def _move(self, stream: Stream, buffer: memoryview) -> int | None:
        """Store a piece of a pipe's content; return 0 at its end, None if it is empty."""
        try:
            size = stream.take()
        except BlockingIOError:
            return None
        if size == 0:
            return 0
        rest, trouble = stream.store(buffer)
        if trouble is None:
            if stream.failing:
                stream.note_recovery()
                self._report_once("recovery", "output is stored again")
            return size
        stream.failing = True
        self._report_once(
            "failure",
            f"{stream.path} cannot be written: {_reason(trouble)}; the workers continue, and their"
            " output goes to the console until the file can be written",
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
        if self.unstored:
            lost = f", except {self.lost} bytes, for which it was too slow" if self.lost else ""
            text = f"{self.unstored} bytes of output are in no file; they went to the console"
            self._report_once("total", text + lost)

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._console.report(text)


def _end_of(path: str) -> str:
    """Return the last `KEPT` bytes of a file as text; empty if it is no file with an end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        size = os.fstat(fd).st_size
        return os.pread(fd, KEPT, max(size - KEPT, 0)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return f"[Errno {error.errno}] {error.strerror}"
