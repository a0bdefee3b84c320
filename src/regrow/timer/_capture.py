"""The server's side of a stack dump: asking processes where they stand, all at the same time.

A process is asked by a signal, and an unhandled signal kills. So one is sent only to a process that
holds the memory its dump would be in and catches the signal (`_stacks`), which a process that never
armed itself, a foreign one, and one that started another program do not. Nor is one sent to a
process that cannot take it now, lest it be taken later, when nobody wants to know: one that is
stopped or in an uninterruptible sleep.

A dump is complete when it has begun and its signal is neither pending nor blocked, as the kernel
blocks a signal while its handler runs. That is said of the main thread, which takes the signals of
a process unless it blocks them. Where it does, another thread answers, whose mask is one of
hundreds to look through; then the dump is complete when it has not grown for `SETTLE_S`.

Nothing in Linux wakes anybody at the end of a signal handler, so that is looked for every half
millisecond, for the 50 that it may take. After them the caller has what there is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from regrow.utils import get_logger

from ._frames import Dump, Outcome, parse
from ._stacks import Marker, Signals

logger = get_logger(__name__)

#: Between two looks at the processes that were asked, s.
STEP_S = 0.0005
#: A dump by another thread than the main one is over when it has not grown for this long, s.
SETTLE_S = 0.005
#: Most bytes of a dump that are read: 100 threads of 100 frames are under 2 MB with long paths.
MOST_BYTES = 4 << 20
#: Memory with more than this is emptied before its process writes more, bytes.
KEEP_BYTES = 1 << 20


def dump_path(prefix: str, pid: int) -> str:
    """The file for the dump of a process whose launcher keeps its dumps at `prefix`."""
    return f"{prefix}.{pid}.txt"


def capture(
    targets: Sequence[tuple[int, int, str]], budget: float = 0.05, native: float = 0.0
) -> dict[int, Dump]:
    """Ask processes for their stacks.

    Args:
        targets: of each process its pid, a pidfd of it, and the file that its answer is to be
            appended to (empty: none).
        budget: s, in all, for the Python stacks.
        native: s, in all, for native stacks by py-spy, where that is installed; 0: without.

    Returns:
        an answer for every target, by pid.
    """
    asked = [_Asked(pid, pidfd) for pid, pidfd, _ in targets]
    deadline = time.monotonic() + budget
    listening = [each for each in asked if not each.look(time.monotonic())]
    while listening and (now := time.monotonic()) < deadline:
        time.sleep(STEP_S)
        listening = [each for each in listening if not each.look(now)]
    dumps = {each.pid: each.answer(budget) for each in asked}
    if native > 0:
        from ._native import native_stacks

        there = [pid for pid, dump in dumps.items() if dump.outcome != "gone"]
        shown = native_stacks(there, native)
        dumps = {pid: dump._replace(native=shown.get(pid, "")) for pid, dump in dumps.items()}
    return {pid: save(dumps[pid], path) for pid, _, path in targets}


class _Asked:
    """One process, from the first look at it to its answer."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._marker: Marker | None = None
        self._memory = -1
        self._other = False  # its main thread blocks the signal, so another one answers
        self._outcome: Outcome | None = None
        self._note = ""
        # Signals sent, and of the memory: its size when the dump began, when the last signal was
        # sent, and at the last look; and when it was first seen to have that size.
        self._sent = 0
        self._begin = self._asked = self._size = 0
        self._since = 0.0

    def look(self, now: float) -> bool:
        """Take the step that is possible now; whether the process has answered or will not."""
        status = _read(f"/proc/{self.pid}/status")
        state = _state(status)
        if state in "ZX":
            return self._end("gone")
        if state in "Tt":
            return self._end("stopped")
        signals = Signals.of(status)
        return self._listen(signals, now) if self._sent else self._ask(state, signals)

    def answer(self, budget: float) -> Dump:
        """What it said; `budget` is what it had, in seconds."""
        text = ""
        if self._memory >= 0:
            text = self._read_text()
            os.close(self._memory)
        main = self._marker.main if self._marker else 0
        outcome, note = self._outcome, self._note
        if outcome is None:
            late = f"within {budget * 1000:.0f} ms"
            note = (
                f"its dump was not complete {late}" if text else f"no answer {late}{self._state()}"
            )
            outcome = "silent"
        if text:
            outcome = "dumped"
        return Dump(self.pid, outcome, note, text, parse(text, main))

    def _ask(self, state: str, signals: Signals) -> bool:
        if self._memory < 0 and (why := self._open()):
            return self._end("no handler", why)
        marker = self._marker
        assert marker is not None
        if not _has(signals.caught, marker.all_threads):
            return self._end(
                "no handler", f"it does not catch signal {marker.all_threads} any more"
            )
        self._other = _has(signals.blocked, marker.all_threads)
        if state == "D" or (self._other and self._all_block(marker.all_threads)):
            return False  # which may be over at the next look
        self._begin = self._size = os.fstat(self._memory).st_size
        if self._begin > KEEP_BYTES:
            os.ftruncate(self._memory, 0)
            self._begin = self._size = 0
        return self._send(marker.all_threads)

    def _send(self, number: int) -> bool:
        self._asked = self._size
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return self._end("gone")
        except OSError as error:
            return self._end("no handler", f"it may not be signalled: {error.strerror}")
        self._sent += 1
        return False

    def _listen(self, signals: Signals, now: float) -> bool:
        marker = self._marker
        assert marker is not None
        size = os.fstat(self._memory).st_size
        if size != self._size:
            self._size, self._since = size, now
        number = marker.all_threads if self._sent == 1 else marker.one_thread
        busy = signals.pending if self._other else signals.pending | signals.blocked
        if size == self._asked or _has(busy, number):
            return False
        text, main = self._read_text(), f"hread 0x{marker.main:016x} "
        if f"Current t{main}" not in text and now - self._since < SETTLE_S:
            return False
        # It is not listed in a process of more threads than faulthandler lists.
        listed = main in text or self._sent == 2
        if listed or self._other or not _has(signals.caught, marker.one_thread):
            return self._end("dumped")
        return self._send(marker.one_thread)

    def _end(self, outcome: Outcome, note: str = "") -> bool:
        self._outcome, self._note = outcome, note
        return True

    def _open(self) -> str:
        """Open the memory that its dump will be in; returns why that fails, or nothing."""
        try:
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                path = f"/proc/{self.pid}/fd/{name}"
                marker = Marker.of(_target(path))
                if marker and marker.pid == self.pid:
                    self._memory = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    self._marker = marker
                    return ""
        except OSError as error:
            return f"its descriptors may not be looked at: {error.strerror}"
        return "it has armed no timer"

    def _read_text(self) -> str:
        data = os.pread(self._memory, MOST_BYTES, self._begin)
        return data.decode("utf-8", "backslashreplace")

    def _all_block(self, number: int) -> bool:
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:  # it has ended, which the next look tells
            return True
        statuses = (_read(f"/proc/{self.pid}/task/{thread}/status") for thread in threads)
        return all(_has(Signals.of(status).blocked, number) for status in statuses)

    def _state(self) -> str:
        """What the kernel says of a process that did not answer."""
        status = _read(f"/proc/{self.pid}/status")
        state = _state(status)
        if state == "D":
            place = _read(f"/proc/{self.pid}/wchan").decode("ascii", "replace").strip("0 \n")
            return ": in an uninterruptible sleep (state D)" + (f" at {place}" if place else "")
        if self._marker and not self._sent:
            return f": every thread blocks signal {self._marker.all_threads}"
        return f" (state {state})"


def _has(mask: int, number: int) -> bool:
    return mask >> (number - 1) & 1 == 1


def _state(status: bytes) -> str:
    """The state letter of a process in its status file; X where there is none."""
    _, found, rest = status.partition(b"\nState:\t")
    return rest[:1].decode() if found else "X"


def _target(link: str) -> str:
    """What a link of /proc shows; empty when it has gone since it was listed."""
    try:
        return os.readlink(link)  # noqa: PTH115 - shows what is not a path, too
    except FileNotFoundError:
        return ""


def _read(path: str) -> bytes:
    """A file of /proc; empty when its process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def save(dump: Dump, path: str) -> Dump:
    """Append an answer to a file; where that fails the log says so, and it has no path.

    Args:
        dump: what `capture` returned.
        path: where to; empty: nowhere.

    Returns:
        the answer with its path.
    """
    if not path or not (dump.text or dump.native):
        return dump
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    note = f": {dump.note}" if dump.note else ""
    whole = f"Process {dump.pid}, {when}{note}\n\n{dump.text}\n"
    if dump.native:
        whole += f"With native frames:\n\n{dump.native}\n"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="replace") as file:
            file.write(whole)
    except OSError as error:
        logger.warning("the stacks of process %d are not in %s: %s", dump.pid, path, error.strerror)
        return dump
    return dump._replace(path=path)
