"""The asking side of a stack dump: requests the stacks of processes, all at the same time.

The request is a signal, and an unhandled signal kills. So a signal is sent only to a process that
holds the memory for its dump and catches the signal (`answering`). This excludes a process that
never armed itself, an unrelated process, and one that started another program. A process that
cannot take the signal now would take it later. So no signal is sent to a process that is stopped,
is in an uninterruptible sleep, or blocks the signal.

Each process dumps its main thread. Only a process that is about to be killed also dumps its other
threads. A thread can be read safely if it took the signal itself. The other threads are read while
they run, and their frames may vanish. This was measured with threads that only call, return and
start others. 3 to 7 of 100 dumps of all threads killed the process (Python 3.11 to 3.13), and 2 of
48,000 dumps of the main thread (both 3.13). A worker that is only compared with the hanging one may
have a checkpoint to write. The main thread is dumped first in any case, and that stack counts. The
signal ends a `sleep` or `poll` of native code, so the thread may be elsewhere a moment later.

The signals are sent to the main thread. If a signal is sent to the process, any thread that runs
before the main thread wakes up takes it. This happened to 13 of 100 signals in a process that kept
starting threads.

A dump is complete when it has begun and its signal is neither pending nor blocked by the main
thread. The reason: the kernel blocks a signal while its handler runs. Linux wakes no process
at the end of a signal handler. So `capture` polls each half millisecond, for 50 ms. After that the
caller gets the result so far. More time is given to a process that waits for a processor on a
loaded machine, if it is about to be killed or the caller awaits it.

Native frames come from py-spy. It reads a process from outside by ptrace, and so shows in which
function of a library a thread waits. For a process with torch it takes a second or more. It stops
the process during that time, and many containers forbid it. So the user enables it, it has a
budget, and a line reports why it failed.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from regrow.timer.stacks.answering import Marker, Signals
from regrow.timer.stacks.report import Dump, Outcome, parse, where
from regrow.utils import get_logger, run_within

logger = get_logger(__name__)

STEP_S = 0.0005
"""Seconds between two polls of the processes with a request."""
QUEUED = 10
"""Factor of the budget that a process about to be killed may wait for a processor."""
PIDFD_SIGNAL_THREAD = 1
"""From linux/pidfd.h: the signal is for the thread, not for any thread of the process."""
MOST_BYTES = 4 << 20
"""Most bytes of a dump that are read: 100 threads of 100 frames are under 2 MB with long paths."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(10), *range(11, 32), *range(127, 160))}
"""Characters that a terminal obeys; faulthandler writes none, but the process may."""
KEEP_BYTES = 1 << 20
"""A memory with more bytes than this is emptied before its process writes more."""


class Target(NamedTuple):
    """A process to request stacks from."""

    pid: int
    pidfd: int
    """Pidfd of the process, so that a signal reaches no other process."""
    doomed: bool = False
    """Whether the process is about to be killed.

    If so, all its threads are dumped, which may end it sooner; else only the main thread is.
    """
    awaited: bool = False
    """Whether the process gets as much time as a doomed one, while it waits for a processor."""


def capture(
    targets: Sequence[Target], budget: float = 0.05, native: float = 0.0
) -> dict[int, Dump]:
    """Request the stacks of processes.

    Args:
        targets: the processes.
        budget: s, in all, for the Python stacks. Ten times that for a doomed or awaited process
            that waits for a processor.
        native: s, in all, for native stacks by py-spy, if that is installed; 0: without.

    Returns:
        an answer for every target, by pid.
    """
    requests = [_Request(target) for target in targets]
    begin = time.monotonic()
    unfinished = [each for each in requests if not each.poll()]
    while unfinished:
        if (passed := time.monotonic() - begin) >= budget:
            unfinished = [each for each in unfinished if each.queued and passed < QUEUED * budget]
        time.sleep(STEP_S)
        unfinished = [each for each in unfinished if not each.poll()]
    dumps = {each.pid: each.answer(budget) for each in requests}
    if native <= 0:
        return dumps
    # py-spy cannot read a stopped process.
    there = [pid for pid, dump in dumps.items() if dump.outcome not in ("gone", "stopped")]
    shown = native_stacks(there, native)
    return {pid: dump._replace(native=shown.get(pid, "")) for pid, dump in dumps.items()}


def log_stacks(lines: Mapping[Target, str]) -> None:
    """Request the stacks of processes with expired timers, and log them.

    Args:
        lines: by process, the text of the log line before the location.
    """
    dumps = capture([target for target in lines if target.pidfd >= 0])
    for target, line in lines.items():
        dump = dumps.get(target.pid, Dump(target.pid, "gone", "no descriptor is free"))
        logger.warning("%s; location: %s\n%s", line, where(dump), dump.text)


class _Request:
    """One process with a request, from the first poll to its answer."""

    def __init__(self, target: Target) -> None:
        self.pid = target.pid
        self._pidfd = target.pidfd
        self._awaited = target.doomed or target.awaited
        self._doomed = target.doomed and target.pid != os.getpid()  # this process continues
        self._marker: Marker | None = None
        self._memory = -1
        self._blocked = False  # whether its main thread blocked the signal at the last poll
        self._sent: list[int] = []
        self.queued = False  # it is awaited, has a request, and is runnable
        self._begin = self._asked = 0  # size of its memory at first, and at the last request
        self._outcome: Outcome | None = None
        self._note = ""

    def poll(self) -> bool:
        """Take the next possible step; return whether it was the last."""
        # In this order: if the dump has begun, the masks show whether it continues.
        begun = bool(self._sent) and os.fstat(self._memory).st_size != self._asked
        status = _read(f"/proc/{self.pid}/status")
        state = state_of(status)
        if state in "ZX":
            return self._end("gone", "it ended while its stacks were dumped" if self._sent else "")
        if state in "Tt":
            return self._end("stopped")
        self.queued = self._awaited and state == "R" and bool(self._sent)
        signals = Signals.of(status)
        return self._check_dump(begun, signals) if self._sent else self._ask(state, signals)

    def answer(self, budget: float) -> Dump:
        """Return the answer; `budget` is as in `capture`."""
        text = ""
        if self._memory >= 0:
            text = self._text()
            os.close(self._memory)
        main = self._marker.main if self._marker else 0
        outcome, note = self._outcome, self._note
        if outcome is None:
            had = budget * (QUEUED if self.queued else 1)
            outcome, within = "silent", f"within {had * 1000:.0f} ms"
            note = f"the dump was not complete {within}"
            if not text:
                note = self._silence(state_of(_read(f"/proc/{self.pid}/status")), within)
        return Dump(self.pid, "dumped" if text else outcome, note, text, parse(text, main))

    def _ask(self, state: str, signals: Signals) -> bool:
        if self._memory < 0 and (why := self._open()):
            # A process that ends closes its files after it has released its memory.
            is_ending = b"\nVmSize:" not in _read(f"/proc/{self.pid}/status")
            return self._end("gone", "it is ending") if is_ending else self._end("no handler", why)
        marker = self._marker
        assert marker is not None
        self._blocked = _has(signals.blocked, marker.one_thread)
        if state == "D" or self._blocked:
            return False  # the process may be ready at the next poll
        return self._send(marker.one_thread, signals)

    def _send(self, number: int, signals: Signals) -> bool:
        if not _has(signals.caught, number):
            return self._end("no handler", f"it does not catch signal {number} any more")
        self._asked = os.fstat(self._memory).st_size
        try:
            if self._doomed:
                _disable_core(self.pid)
            signal_main_thread(self.pid, self._pidfd, number)
        except ProcessLookupError:
            return self._end("gone")
        except OSError as error:
            return self._end("no handler", f"it cannot be sent a signal: {error.strerror}")
        self._sent.append(number)
        return False

    def _check_dump(self, begun: bool, signals: Signals) -> bool:
        marker, number = self._marker, self._sent[-1]
        assert marker is not None
        if not begun or _has(signals.blocked, number) or _has(signals.pending, number):
            return False
        if number == marker.one_thread and self._doomed:
            return self._send(marker.all_threads, signals)
        return self._end("dumped")

    def _end(self, outcome: Outcome, note: str = "") -> bool:
        self._outcome, self._note = outcome, note
        return True

    def _open(self) -> str:
        """Open the memory for the dump; return the reason if that failed, else empty."""
        try:
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                path = f"/proc/{self.pid}/fd/{name}"
                marker = Marker.of(link_target(path))
                if marker and marker.pid == self.pid:
                    memory = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    # The descriptor may have been reused.
                    if Marker.of(link_target(f"/proc/self/fd/{memory}")) != marker:
                        os.close(memory)
                        continue
                    self._memory, self._marker = memory, marker
                    if os.fstat(self._memory).st_size > KEEP_BYTES:
                        os.ftruncate(self._memory, 0)
                    self._begin = os.fstat(self._memory).st_size
                    return ""
        except OSError as error:
            return f"its descriptors cannot be listed: {error.strerror}"
        return "it has neither imported regrow nor set a timer"

    def _text(self) -> str:
        text = os.pread(self._memory, MOST_BYTES, self._begin).decode("utf-8", "backslashreplace")
        return text.translate(CONTROLS)

    def _silence(self, state: str, within: str) -> str:
        """Return the reason for a missing answer, as far as it is known."""
        if state == "D":
            place = _read(f"/proc/{self.pid}/wchan").decode("ascii", "replace").strip("0 \n")
            return "in an uninterruptible sleep in the kernel" + (f", at {place}" if place else "")
        if self._blocked and self._marker:
            return f"no answer {within}: its main thread blocks signal {self._marker.one_thread}"
        return f"no answer {within} (state {state})"


def _disable_core(pid: int) -> None:
    """Disable the core dump of a process, because that of a training takes minutes to write.

    Raises:
        OSError: the process is gone, or belongs to another user.
    """
    _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
    # One byte is too little for a file, and the kernel starts no program that receives cores.
    resource.prlimit(pid, resource.RLIMIT_CORE, (1 if most else 0, most))


def signal_main_thread(pid: int, pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number, None, PIDFD_SIGNAL_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # For Linux before 6.9. The pid is not reused while the process exists.
        signal.pidfd_send_signal(pidfd, 0)
        import ctypes

        if ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, number):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code)) from None


def _has(mask: int, number: int) -> bool:
    return mask >> (number - 1) & 1 == 1


def state_of(status: bytes) -> str:
    """Return the state letter of a process from its status file; X if there is none."""
    _, found, rest = status.partition(b"\nState:\t")
    return rest[:1].decode() if found else "X"


def link_target(link: str) -> str:
    """Return the target of a link in /proc; empty: the link has vanished since it was listed."""
    try:
        return os.readlink(link)  # noqa: PTH115 - shows what is not a path, too
    except FileNotFoundError:
        return ""


def _read(path: str) -> bytes:
    """Read a file of /proc; empty: its process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def native_stacks(pids: Sequence[int], budget: float) -> dict[int, str]:
    """Return the output of py-spy for each process, or a line with the reason if there is none.

    Args:
        pids: the processes; py-spy runs once for each, all at the same time.
        budget: s, in all; after that, py-spy is killed.
    """
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(pids, "py-spy is not installed (pip install py-spy)")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(1, len(pids))) as pool:
        return dict(
            zip(pids, pool.map(lambda pid: _native(program, pid, budget), pids), strict=True)
        )


def find_py_spy() -> str | None:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _native(program: str, pid: int, budget: float) -> str:
    try:
        done = run_within([program, "dump", "--native", "--pid", str(pid)], budget)
    except OSError as error:
        return f"{program} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"py-spy did not finish within {budget:g} s"
    if done.returncode == 0:
        return done.stdout
    # The other lines explain how to use sudo, or are a backtrace of py-spy itself.
    line = next(filter(None, done.stderr.splitlines()), f"exit code {done.returncode}")
    advice = "; it needs CAP_SYS_PTRACE" if "ermission" in line else ""
    return f"py-spy failed: {line.removeprefix('Error: ')}{advice}"
