"""What a monitor does about a rank that hangs.

    stacks ─► the store is told: SOFT_TIMEOUT
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
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from regrow.inprocess._hard_watch import Terms
from regrow.inprocess._link import SOFT_TIMEOUT
from regrow.inprocess._telling import HARD_TIMEOUT, Seen, note, tell_ranks, tell_store
from regrow.timer._capture import Target, capture
from regrow.timer._frames import where


class Hung(NamedTuple):
    """A rank that hangs."""

    terms: Terms
    pid: int
    """Its process."""
    pidfd: int
    """Of that process; closed by who is called with this."""
    group: Sequence[socket.socket]
    """The connections of the others of its group on this host, which tell where the monitor cannot;
    not its own, which it would read when it comes back."""
    asking: threading.Lock
    """Held while the process is asked where it stands."""


def tell_of(rank: Hung, iteration: int) -> None:
    """Have an iteration ended for a rank that has not done so itself at its soft time-out."""
    try:
        message = _where(rank, rank.terms.soft, "does not answer")
        _tell(Seen(rank.terms, SOFT_TIMEOUT, message, iteration), rank.group)
    finally:
        os.close(rank.pidfd)


def end_rank(rank: Hung) -> None:
    """End a rank."""
    terms, pid, pidfd, group, _ = rank
    try:
        message = _where(rank, terms.hard, "is ended")
        _tell(Seen(terms, HARD_TIMEOUT, message), group)
        if not _signalled(pidfd, terms.grace, signal.SIGTERM, signal.SIGCONT):
            note(
                terms.logfile,
                f"initial rank {terms.rank} (process {pid}) has not ended within {terms.grace:g} s "
                f"of SIGTERM, and is killed",
            )
            _signalled(pidfd, terms.grace, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _where(rank: Hung, allowed: float, fate: str) -> str:
    """Return for the others where a rank stands, and note it for people."""
    with rank.asking:
        dump = capture([Target(rank.pid, rank.pidfd, awaited=True)])[rank.pid]
    message = f"no progress for {allowed:g} s: {where(dump)}"
    said = f"initial rank {rank.terms.rank} (process {rank.pid}) {fate}: {message}\n{dump.text}"
    note(rank.terms.logfile, said.rstrip())
    return message


def _signalled(pidfd: int, patience: float, *signals: int) -> bool:
    """Send a process signals; whether it has ended within so many seconds."""
    for each in signals:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, each)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(math.ceil(patience * 1000)))


def _tell(seen: Seen, group: Sequence[socket.socket]) -> None:
    """Have the others told of a rank."""
    terms = seen.terms
    if not terms.endpoint:
        tell_ranks(seen, group)
        return
    from regrow.store import StoreError

    try:
        tell_store([seen])
    except StoreError as error:
        note(terms.logfile, f"the other ranks cannot be told of initial rank {terms.rank}: {error}")
