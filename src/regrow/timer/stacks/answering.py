"""The worker's side of a stack dump: prepares a process to dump its stacks on request.

`arm` makes `faulthandler` dump the stacks of all Python threads on a signal. Its handler is C code
and takes no lock. So it works during `time.sleep`, an endless loop, and native code that holds the
GIL. There, a Python signal handler would wait for the interpreter.

The handler writes the dump into a memfd of the process, which the asking process opens through
`/proc/<pid>/fd`. A file would be simpler, but has three defects:
- A file system that hangs is a common reason for a training to hang, and the handler would hang
  there too.
- A full disk loses the dump.
- Each process that never hangs leaves an empty file.

The name of the memfd (`Marker`) carries all information that the other side needs. A process
receives the signal only while it holds such a memfd and catches the signal, because an unhandled
real-time signal kills. A process that started another program has neither, and an unrelated process
that uses the signal itself has no memfd. The handler cannot write into a file that got the number
of a closed descriptor, because then no process sends the signal.

The signals are the first two of `CANDIDATES` that the process neither catches nor ignores. They are
real-time signals, because all others have a meaning. glibc uses 32 and 33. Other runtimes in the
same process use the ends of the remaining range: .NET uses 34, Java 62. So the candidates are in
the middle, and a library that has taken a candidate first keeps it.

The second signal dumps only the thread that takes it. faulthandler lists at most 100 threads, the
newest first, so a process with more threads would not show its main thread.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

CANDIDATES = range(44, 56)
"""Real-time signals of Linux that may be used to request stacks."""

_PREFIX = "regrow-stacks"
_LINK = re.compile(
    rf"/memfd:{_PREFIX}\.(\d{{1,9}})\.(\d\d)\.(\d\d)\.([0-9a-f]{{1,16}}) \(deleted\)", re.A
)


class Marker(NamedTuple):
    """Fields of the name of a process's memfd."""

    pid: int
    """The owner: a forked child has its parent's memfd until the child arms itself."""
    all_threads: int
    """The signal that dumps every thread."""
    one_thread: int
    """The signal that dumps the thread that takes it."""
    main: int
    """Identity of the main thread, as in dumps."""

    @property
    def name(self) -> str:
        return f"{_PREFIX}.{self.pid}.{self.all_threads}.{self.one_thread}.{self.main:x}"

    @classmethod
    def of(cls, link: str) -> Marker | None:
        """Parse a link in `/proc/<pid>/fd`; None: it is another file."""
        if (match := _LINK.fullmatch(link)) is None:
            return None
        pid, every, one, main = match.groups()
        marker = cls(int(pid), int(every), int(one), int(main, 16))
        # Any other signal has another effect.
        return marker if {marker.all_threads, marker.one_thread} <= set(CANDIDATES) else None


class Signals(NamedTuple):
    """Signal masks of a process, as in `/proc/<pid>/status`; bit n - 1 is signal n."""

    pending: int
    """Signals sent to the main thread or to the process, and not taken yet."""
    blocked: int
    """Signals blocked by the main thread; within a handler, the handler's own signal too."""
    ignored: int
    caught: int

    @classmethod
    def of(cls, status: bytes) -> Signals:
        """Parse a status file; a missing mask is empty."""
        found = {
            line[:6]: int(line[7:], 16)
            for line in status.splitlines()
            if line[:7] in (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")
        }
        pending = found.get(b"SigPnd", 0) | found.get(b"ShdPnd", 0)
        return cls(pending, *(found.get(name, 0) for name in (b"SigBlk", b"SigIgn", b"SigCgt")))


class Armed(NamedTuple):
    """The state of `arm` in this process; only one, because there is one handler."""

    pid: int = 0
    memory: int = -1
    marker: Marker | None = None
    """None: this process cannot dump its stacks."""


armed = Armed()


def arm() -> Marker | None:
    """Prepare this process for requests for its stacks.

    The function acts once in each process, and once in a forked child. It never raises. If a
    process cannot be prepared, one warning gives the reason, and an expired timer is reported
    without stacks.

    Returns:
        the name of this process's memfd; None: it cannot dump its stacks.
    """
    global armed
    if armed.pid == os.getpid():
        return armed.marker
    inherited, armed = armed, armed._replace(pid=os.getpid())
    try:
        armed = _register(inherited)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        from regrow.utils import get_logger

        get_logger(__name__).warning(
            "timers: the stacks of process %d will not be known: %s", armed.pid, error
        )
    return armed.marker if armed.marker and armed.marker.pid == armed.pid else None


def _register(inherited: Armed) -> Armed:
    import faulthandler
    import fcntl
    import threading

    with open("/proc/self/status", "rb") as status:
        signals = Signals.of(status.read())
    taken = signals.caught | signals.ignored
    if inherited.marker:  # inherited by a fork, with the handlers
        for number in (inherited.marker.one_thread, inherited.marker.all_threads):
            # The handler was lost since; faulthandler would not set it again.
            if not taken >> number - 1 & 1:
                faulthandler.unregister(number)
            taken &= ~(1 << number - 1)
    free = [number for number in CANDIDATES if not taken >> number - 1 & 1]
    if len(free) < 2:
        raise RuntimeError(
            f"it must leave two of the signals {CANDIDATES[0]} to {CANDIDATES[-1]} unused"
        )
    marker = Marker(os.getpid(), free[0], free[1], threading.main_thread().ident or 0)
    memory = os.memfd_create(marker.name, os.MFD_CLOEXEC)
    # The asking process may truncate the memfd between two dumps.
    fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(marker.one_thread, memory, all_threads=False, chain=False)
    faulthandler.register(marker.all_threads, memory, all_threads=True, chain=False)
    return Armed(marker.pid, memory, marker)
