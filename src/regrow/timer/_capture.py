"""The server's side of a stack dump: asking processes where they stand, all at the same time.

A process is asked by a signal, and an unhandled signal kills. So one is sent only to a process that
holds the memory its dump would be in and catches the signal (`_stacks`), which a process that never
armed itself, a foreign one, and one that started another program do not. Nor is one sent to a
process that cannot take it now, lest it take it later, when nobody asks any more: one that is
stopped, in an uninterruptible sleep, or blocks the signal.

Every process is asked for its main thread, and only one that is to be killed for the others as
well. A thread can be read safely where it took the signal itself, as it stands still meanwhile;
the others are read while they run, and what is read may vanish. Under threads that do nothing but
call, return and start others, 3 to 7 of 100 dumps of all threads killed the process (Python 3.11 to
3.13), and 2 of 48,000 of the main thread (both 3.13). But a worker that is merely compared with the
one that hangs may have a checkpoint to write. The main thread comes first in any case, and that
stack counts: the signal ends a `sleep` or `poll` of native code, as any signal does, so that a
moment later the thread may stand elsewhere.

The signals are sent to the main thread. One that is sent to a process is taken by any thread that
comes by before the main one wakes up, as 13 of 100 were in a process that kept starting threads.
Only where the main thread blocks them, the process is sent one for all threads, as long as there is
a thread that takes it.

A dump is complete when it has begun and its signal is neither pending nor blocked by the thread
that took it, as the kernel blocks a signal while its handler runs.

Nothing in Linux wakes anybody at the end of a signal handler, so that is looked for every half
millisecond, for the 50 that it may take. After them the caller has what there is. Only where the
machine is so loaded that a process which is to be killed has not come to answer, it is worth more
to know where it stood than to have it killed at once. The same holds where the asker says that it
awaits a process, as it tells others of it; for one that is merely compared nobody waits.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from regrow.timer._frames import Dump, Outcome, parse
from regrow.timer._stacks import Marker, Signals

#: Between two looks at the processes that were asked, s.
STEP_S = 0.0005
#: Times the budget that a process which is to be killed may be in the queue for a processor.
QUEUED = 10
#: A main thread that blocks the signals at this many looks in a row does so for good; while it
#: starts a thread or forks, the C library blocks them for a moment.
DEAF = 4
#: From linux/pidfd.h: the signal is for the thread, not for any of the process.
PIDFD_SIGNAL_THREAD = 1
#: Most bytes of a dump that are read: 100 threads of 100 frames are under 2 MB with long paths.
MOST_BYTES = 4 << 20
#: What a terminal would obey; faulthandler writes none of it, but the memory is its process's.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(10), *range(11, 32), *range(127, 160))}
#: Memory with more than this is emptied before its process writes more, bytes.
KEEP_BYTES = 1 << 20


class Target(NamedTuple):
    """A process to ask."""

    pid: int
    pidfd: int
    """Names that process for ever, so that a signal reaches no other."""
    doomed: bool = False
    """Whether it is about to be killed. Then all its threads are dumped, which may end it sooner;
    else only the main thread."""
    awaited: bool = False
    """Whether it is waited for as for one that is doomed, while it waits for a processor."""


def capture(
    targets: Sequence[Target], budget: float = 0.05, native: float = 0.0
) -> dict[int, Dump]:
    """Ask processes for their stacks.

    Args:
        targets: the processes.
        budget: s, in all, for the Python stacks; ten times that where a process which is to be
            killed, or is awaited, would answer, but is waiting for a processor.
        native: s, in all, for native stacks by py-spy, where that is installed; 0: without.

    Returns:
        an answer for every target, by pid.
    """
    asked = [_Asked(target) for target in targets]
    begin = time.monotonic()
    listening = [each for each in asked if not each.look()]
    while listening:
        if (passed := time.monotonic() - begin) >= budget:
            listening = [each for each in listening if each.queued and passed < QUEUED * budget]
        time.sleep(STEP_S)
        listening = [each for each in listening if not each.look()]
    dumps = {each.pid: each.answer(budget) for each in asked}
    if native <= 0:
        return dumps
    from regrow.timer._native import native_stacks

    # It can read none that is stopped.
    there = [pid for pid, dump in dumps.items() if dump.outcome not in ("gone", "stopped")]
    shown = native_stacks(there, native)
    return {pid: dump._replace(native=shown.get(pid, "")) for pid, dump in dumps.items()}


class _Asked:
    """One process, from the first look at it to its answer."""

    def __init__(self, target: Target) -> None:
        self.pid = target.pid
        self._pidfd = target.pidfd
        self._awaited = target.doomed or target.awaited
        self._doomed = target.doomed and target.pid != os.getpid()  # who asks goes on to live
        self._marker: Marker | None = None
        self._memory = -1
        self._deaf = 0  # looks in a row at which its main thread blocked the signals
        self._hearing: list[str] = []  # then, the threads that do not
        self._sent: list[int] = []
        self.queued = False  # it is awaited, was asked, and is runnable
        self._begin = self._asked = 0  # size of its memory before all, and when it was last asked
        self._outcome: Outcome | None = None
        self._note = ""

    def look(self) -> bool:
        """Take the step that is possible now; whether there will be no other."""
        # In this order: if it has begun, the masks show whether it goes on.
        begun = bool(self._sent) and os.fstat(self._memory).st_size != self._asked
        status = _read(f"/proc/{self.pid}/status")
        state = _state(status)
        if state in "ZX":
            return self._end("gone", "it ended while its stacks were dumped" if self._sent else "")
        if state in "Tt":
            return self._end("stopped")
        self.queued = self._awaited and state == "R" and bool(self._sent)
        signals = Signals.of(status)
        return self._listen(begun, signals) if self._sent else self._ask(state, signals)

    def answer(self, budget: float) -> Dump:
        """What it said; `budget` is as in `capture`."""
        text = ""
        if self._memory >= 0:
            text = self._text()
            os.close(self._memory)
        main = self._marker.main if self._marker else 0
        outcome, note = self._outcome, self._note
        if outcome is None:
            had = budget * (QUEUED if self.queued else 1)
            outcome, within = "silent", f"within {had * 1000:.0f} ms"
            note = f"not all of it came {within}"
            if not text:
                note = self._silence(_state(_read(f"/proc/{self.pid}/status")), within)
        return Dump(self.pid, "dumped" if text else outcome, note, text, parse(text, main))

    def _ask(self, state: str, signals: Signals) -> bool:
        if self._memory < 0 and (why := self._open()):
            return self._end("no handler", why)
        marker = self._marker
        assert marker is not None
        blocked = _has(signals.blocked, marker.one_thread)
        self._deaf = self._deaf + 1 if blocked else 0
        threads = self._threads() if self._deaf >= DEAF and self._doomed else []
        self._hearing = [each for each in threads if not self._blocks(each)]
        if state == "D" or (blocked and not self._hearing):
            return False  # which may be otherwise at the next look
        return self._send(marker.all_threads if blocked else marker.one_thread, signals)

    def _send(self, number: int, signals: Signals) -> bool:
        if not _has(signals.caught, number):
            return self._end("no handler", f"it does not catch signal {number} any more")
        self._asked = os.fstat(self._memory).st_size
        try:
            if self._doomed:
                _spare_core(self.pid)
            if self._hearing:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                _signal_main_thread(self.pid, self._pidfd, number)
        except ProcessLookupError:
            return self._end("gone")
        except OSError as error:
            return self._end("no handler", f"it may not be signalled: {error.strerror}")
        self._sent.append(number)
        return False

    def _listen(self, begun: bool, signals: Signals) -> bool:
        marker, number = self._marker, self._sent[-1]
        assert marker is not None
        goes_on = _has(signals.blocked, number)
        if self._hearing:
            goes_on = any(map(self._blocks, self._hearing))
        if not begun or goes_on or _has(signals.pending, number):
            return False
        if number == marker.one_thread and self._doomed:
            return self._send(marker.all_threads, signals)
        return self._end("dumped")

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
                    memory = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    if Marker.of(_target(f"/proc/self/fd/{memory}")) != marker:  # any more
                        os.close(memory)
                        continue
                    self._memory, self._marker = memory, marker
                    if os.fstat(self._memory).st_size > KEEP_BYTES:
                        os.ftruncate(self._memory, 0)
                    self._begin = os.fstat(self._memory).st_size
                    return ""
        except OSError as error:
            return f"its descriptors may not be looked at: {error.strerror}"
        return "it has neither imported regrow nor set a timer"

    def _text(self) -> str:
        text = os.pread(self._memory, MOST_BYTES, self._begin).decode("utf-8", "backslashreplace")
        return text.translate(CONTROLS)

    def _threads(self) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/task")
        except OSError:  # it has ended, which the next look tells
            return []

    def _blocks(self, thread: str) -> bool:
        """Whether a thread blocks the signal for all threads; one that has ended does not."""
        assert self._marker is not None
        status = _read(f"/proc/{self.pid}/task/{thread}/status")
        return _has(Signals.of(status).blocked, self._marker.all_threads)

    def _silence(self, state: str, within: str) -> str:
        """Why it may not have answered."""
        if state == "D":
            place = _read(f"/proc/{self.pid}/wchan").decode("ascii", "replace").strip("0 \n")
            return "in an uninterruptible sleep in the kernel" + (f", at {place}" if place else "")
        if self._deaf and self._marker:
            return f"no answer {within}: its main thread blocks signal {self._marker.one_thread}"
        return f"no answer {within} (state {state})"


def _spare_core(pid: int) -> None:
    """Should a process crash from now on, leave no core: of a training it takes minutes to write.

    Raises:
        OSError: it is gone, or another user's.
    """
    _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
    # One byte is too little for a file, and a program that is piped cores is not started.
    resource.prlimit(pid, resource.RLIMIT_CORE, (1 if most else 0, most))


def _signal_main_thread(pid: int, pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number, None, PIDFD_SIGNAL_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 6.9. Its number is its own as long as it is there.
        signal.pidfd_send_signal(pidfd, 0)
        import ctypes

        if ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, number):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code)) from None


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
