"""How a monitor ends a rank that hangs.

    stacks ─► the store is told: HARD_TIMEOUT ─► SIGTERM, SIGCONT ─► grace ─► SIGKILL

The store comes before the signal: at the end of the process it would take the rank for one that has
died by itself. A store that does not answer puts the signal off by a few seconds, and no more.
A process that is stopped takes SIGTERM when it is continued, and runs nothing in between.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from regrow.inprocess._hard_watch import Terms
from regrow.inprocess._telling import HARD_TIMEOUT, End, note, tell_ranks, tell_store
from regrow.timer._capture import Target, capture
from regrow.timer._frames import where


def end_rank(terms: Terms, pid: int, pidfd: int, group: Sequence[socket.socket]) -> None:
    """End a rank.

    Args:
        terms: the rank's.
        pid: its process.
        pidfd: of that process; closed when it has ended.
        group: the connections of its group's ranks on this host, which tell the others where the
            monitor cannot.
    """
    try:
        dump = capture([Target(pid, pidfd)])[pid]
        message = f"no progress for {terms.hard:g} s: {where(dump)}"
        note(
            terms.logfile,
            f"initial rank {terms.rank} (process {pid}) is ended: {message}\n{dump.text}".rstrip(),
        )
        _tell(End(terms, HARD_TIMEOUT, message), group)
        if not _signalled(pidfd, terms.grace, signal.SIGTERM, signal.SIGCONT):
            note(
                terms.logfile,
                f"initial rank {terms.rank} (process {pid}) has not ended within {terms.grace:g} s "
                f"of SIGTERM, and is killed",
            )
            _signalled(pidfd, terms.grace, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _signalled(pidfd: int, patience: float, *signals: int) -> bool:
    """Send a process signals; whether it has ended within so many seconds."""
    for each in signals:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, each)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(math.ceil(patience * 1000)))


def _tell(end: End, group: Sequence[socket.socket]) -> None:
    """Have a rank counted out that is about to be ended."""
    terms = end.terms
    if not terms.endpoint:
        tell_ranks(end, group)  # its own connection as well: it will not read that
        return
    from regrow.store import StoreError

    try:
        tell_store([end])
    except StoreError as error:
        note(terms.logfile, f"the other ranks cannot be told of initial rank {terms.rank}: {error}")
