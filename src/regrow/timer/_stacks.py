"""The worker's side of a stack dump: a process that can be asked where it stands.

`arm` lets `faulthandler` answer a signal with the stacks of all Python threads. Its handler is C
and takes no lock, so the answer comes from a thread in `time.sleep`, from an endless loop, and from
native code that holds the GIL; a Python signal handler would wait for the interpreter in all three.

Where the answer goes: into memory of the process, a memfd that whoever asks opens through
`/proc/<pid>/fd`, as `regrow.step` does with the agent's. A file would be the obvious place, and is
a bad one: what hangs a training is often its file system, and a handler that writes there hangs as
well; a full disk loses the answer; and every process that never hangs leaves an empty file. The
name of the memfd tells the rest (`Marker`), so that the two sides agree on nothing but this module,
and a process is only ever signalled while it holds such a memfd and catches the signal: one that
started another program has neither, and a foreign one that has its own use for the signal has no
memfd. Nor can the handler write into a file that took the number of a descriptor closed behind
its back, since then nobody asks.

Which signals: the first two of `CANDIDATES` that the process neither catches nor ignores. They are
real-time signals, as all others have a meaning. glibc keeps 32 and 33 of them, and other runtimes
that may be in the same process take theirs from the ends of the rest: .NET's has 34, Java's 62. The
middle is left; and whoever has taken a candidate first, keeps it.

The second signal dumps only the thread that takes it. faulthandler lists at most 100 threads, the
newest first, so that in a process with more the main thread, the one that matters, is not among
them.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import NamedTuple

#: Real-time signals of Linux that a process may be asked by.
CANDIDATES = range(44, 56)

_PREFIX = "regrow-stacks"
_LINK = re.compile(
    rf"/memfd:{_PREFIX}\.(\d{{1,9}})\.(\d\d)\.(\d\d)\.([0-9a-f]{{1,16}}) \(deleted\)", re.A
)


class Marker(NamedTuple):
    """What the name of a process's memfd tells those who would ask it."""

    pid: int
    """Whose it is: a forked child has its parent's until it arms itself."""
    all_threads: int
    """The signal that dumps every thread."""
    one_thread: int
    """The signal that dumps the thread that takes it."""
    main: int
    """Identity of the main thread, as dumps have it."""

    @property
    def name(self) -> str:
        return f"{_PREFIX}.{self.pid}.{self.all_threads}.{self.one_thread}.{self.main:x}"

    @classmethod
    def of(cls, link: str) -> Marker | None:
        """What a link in `/proc/<pid>/fd` says; None: it is of something else."""
        if (match := _LINK.fullmatch(link)) is None:
            return None
        pid, every, one, main = match.groups()
        marker = cls(int(pid), int(every), int(one), int(main, 16))
        # To any other signal it would do something else.
        return marker if {marker.all_threads, marker.one_thread} <= set(CANDIDATES) else None


class Signals(NamedTuple):
    """Masks of a process as `/proc/<pid>/status` has them; bit n - 1 is signal n."""

    pending: int
    """Sent to the main thread or to the process, and not taken yet."""
    blocked: int
    """Blocked by the main thread; within a handler, the handler's own signal too."""
    ignored: int
    caught: int

    @classmethod
    def of(cls, status: bytes) -> Signals:
        """Read a status file; what it lacks counts as empty."""
        found = {
            line[:6]: int(line[7:], 16)
            for line in status.splitlines()
            if line[:7] in (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")
        }
        pending = found.get(b"SigPnd", 0) | found.get(b"ShdPnd", 0)
        return cls(pending, *(found.get(name, 0) for name in (b"SigBlk", b"SigIgn", b"SigCgt")))


class _Armed:
    """What the handler of this process writes into: as there is one handler, there is one."""

    __slots__ = ("marker", "memory", "pid")

    def __init__(self) -> None:
        self.pid = 0
        self.memory = -1
        self.marker: Marker | None = None


_armed = _Armed()


def arm() -> None:
    """Let this process be asked for its stacks.

    Once per process, and again in a forked child; a call that finds it done costs next to nothing.
    It never raises: where a process cannot be asked, one warning says why, and a timer that expires
    is reported without stacks.
    """
    if _armed.pid == os.getpid():
        return
    _armed.pid = os.getpid()
    try:
        _register()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        from regrow.utils import get_logger

        get_logger(__name__).warning(
            "if a timer expires in process %d, its stacks will not be known: %s", _armed.pid, error
        )


def _register() -> None:
    import faulthandler
    import fcntl
    import threading

    with open("/proc/self/status", "rb") as status:
        signals = Signals.of(status.read())
    taken = signals.caught | signals.ignored
    inherited = _armed.marker
    if inherited:  # by a fork, with the handlers
        for number in (inherited.one_thread, inherited.all_threads):
            if not taken >> number - 1 & 1:  # lost since; faulthandler would not set it again
                faulthandler.unregister(number)
        taken &= ~(1 << inherited.all_threads - 1 | 1 << inherited.one_thread - 1)
    free = [number for number in CANDIDATES if not taken >> number - 1 & 1]
    if len(free) < 2:
        raise RuntimeError(
            f"it catches or ignores the signals {CANDIDATES[0]} to {CANDIDATES[-1]}; two of them"
            " are needed"
        )
    marker = Marker(os.getpid(), free[0], free[1], threading.main_thread().ident or 0)
    memory = os.memfd_create(marker.name, os.MFD_CLOEXEC)
    # Whoever asks may empty it between two dumps.
    fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(marker.one_thread, memory, all_threads=False, chain=False)
    faulthandler.register(marker.all_threads, memory, all_threads=True, chain=False)
    before, _armed.memory, _armed.marker = _armed.memory, memory, marker
    with suppress(OSError):  # whoever daemonizes may have closed it, and given its number away
        link = os.readlink(f"/proc/self/fd/{before}")  # noqa: PTH115 - is no path
        if inherited and Marker.of(link) == inherited:
            os.close(before)
