"""A rank's word to the monitor of its host: until when it may go on without progress.

What makes no progress may not be able to do anything about it: native code can hold the
interpreter's lock, and a stopped process runs nothing at all. So the hard time-out is kept by a
process of its own (`_monitor`), one for the ranks of a job on a host. It sees to the soft one, too,
of a rank that should have reported that itself and did not.

A word is one packet, and never waits: if there is no room the next one says the same. A monitor
that is gone is started again by the thread that looks for progress.

The monitor itself can tell a store of ours of a rank that hangs, or that has ended. A c10d store
is torch's, which it does not load. There it has the other ranks of the host tell, in packets the
other way, for which a thread of each sleeps.

Who needs the monitor no more says goodbye. An end of the connection without it says nothing yet:
the process may have ended, which the monitor then hears from the kernel, or comes back.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from regrow.inprocess._deadlines import NOT_JUDGED, Word
from regrow.inprocess._link import SOFT_TIMEOUT, LinkError
from regrow.inprocess._monitor_start import reach
from regrow.timer._stacks import arm
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.inprocess._link import Link

logger = get_logger(__name__)

WORD: Final = struct.Struct("<Qdq")
"""A `Word`, its time in seconds of CLOCK_MONOTONIC."""
GOODBYE: Final = b"goodbye"
"""The last packet of a rank that needs no monitor any more."""
LONGEST: Final = 1 << 16
"""Bytes of a packet, at most."""
_LONGEST_PAUSE: Final = 60.0
"""Seconds between two attempts to start a monitor again, at most."""
_LEAVE_TIME: Final = 1.0
"""Seconds for the thread to end at the end of the call; one that waits for the store is left."""


class Terms(NamedTuple):
    """What the monitor has to know of a rank."""

    rank: int
    """The initial rank."""
    hard: float
    """Seconds without progress after which the rank is ended."""
    grace: float
    """Seconds from SIGTERM to SIGKILL."""
    group: str
    """The name of the rank's group in its store."""
    process: str = ""
    """The name of this process there; empty: the rank has never another one."""
    endpoint: str = ""
    """Where the store is that the others are told by; empty: the ranks of this host tell them."""
    token: str = ""
    """The secret by which it is reached, as hexadecimal digits."""
    logfile: str = ""
    """What the monitor has to say of the rank is appended to; empty: stderr."""
    pidfile: str = ""
    """Where the monitor is to write its pid; empty: nowhere."""
    soft: float = math.inf
    """Seconds without progress after which the others restart."""
    overdue: float = math.inf
    """See `overdue_after`."""


class HardWatch:
    """Keeps the monitor of this host told of one rank.

    Args:
        terms: of the rank.
        job: what the ranks share that one monitor watches.
        link: tells the others of another rank when the monitor asks for it, which is in a thread of
            its own; None if the monitor can tell them itself.
    """

    def __init__(self, terms: Terms, job: str, link: Link | None = None) -> None:
        self._terms = terms
        self._link = link
        self._pid = os.getpid()
        self._job = job
        self._socket: socket.socket | None = None
        self._ear: threading.Thread | None = None
        self._said: bytes = b""  # the last word that has arrived
        self._pause = 1.0
        self._try_at = 0.0
        self._warned = False
        self._started = 0  # a process to be waited for
        self.changes = 0
        """How often the main thread has spoken."""
        arm()  # so that the monitor can ask where this process stands
        self.keep(0, None)

    def change(self, until: float | None, iteration: int = NOT_JUDGED) -> None:
        """This rank may go on until then; for the main thread.

        Args:
            until: seconds on the monotonic clock; None: for ever.
            iteration: which one ends at the soft time-out before that, if any does.
        """
        self.changes += 1
        self.say(self.changes, until, iteration)

    def say(self, change: int, until: float | None, iteration: int = NOT_JUDGED) -> None:
        """Say what was found out after a change; does not count if there was another meanwhile.

        Args:
            change: `changes`, read before that was found out.
            until: as in `change`.
            iteration: as in `change`.
        """
        word = WORD.pack(*_word(change, until, iteration))
        connection = self._socket
        if word == self._said or connection is None or self._pid != os.getpid():
            return  # a fork has its parent's connection, and nothing to say
        try:
            connection.send(word, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the next one says the same
        except OSError:
            self._lost(connection)
            return
        self._said = word

    def keep(self, change: int, until: float | None, iteration: int = NOT_JUDGED) -> None:
        """Have a monitor there, if it is gone, and say this to it; for one thread at a time.

        Args:
            change: as in `say`.
            until: as in `say`.
            iteration: as in `say`.
        """
        if self._started:
            self._reap()
        if self._link is None:
            self._look()
        if self._socket is not None or time.monotonic() < self._try_at:
            return
        lost, self._try_at = bool(self._try_at), time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if lost and not self._warned:
            self._warned = True
            logger.warning(
                "the monitor that keeps the hard time-out of initial rank %d has ended; it is "
                "started again",
                self._terms.rank,
            )
        try:
            connection, self._started = reach(self._job)
            connection.setblocking(True)  # whatever the default is: who listens waits
            # In one packet: between two, the main thread may take the interpreter's lock for good.
            first = {"terms": self._terms._asdict(), "word": _word(change, until, iteration)}
            packet = json.dumps(first).encode()
            connection.send(packet, socket.MSG_DONTWAIT)
        except OSError as error:
            logger.error(
                "nobody keeps the hard time-out of %g s of initial rank %d: no monitor can be "
                "started: %s",
                self._terms.hard,
                self._terms.rank,
                error,
            )
            return
        self._said = b""
        self._socket = connection
        if self._link is not None:
            self._ear = threading.Thread(
                target=self._listen,
                args=(connection, self._link),
                name="regrow-monitor",
                daemon=True,
            )
            self._ear.start()

    def close(self) -> None:
        """This rank needs no monitor any more."""
        connection, self._socket = self._socket, None
        if connection is not None and self._pid == os.getpid():
            with suppress(OSError):
                connection.send(GOODBYE, socket.MSG_DONTWAIT)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes who listens
        if self._ear is not None:
            self._ear.join(_LEAVE_TIME)
        if connection is not None:
            connection.close()
        if self._started:
            self._reap()

    def _listen(self, connection: socket.socket, link: Link) -> None:
        """Hear of other ranks that hang or have ended, until the monitor's end."""
        while packet := self._received(connection):
            rank, kind, message, iteration = json.loads(packet)
            try:
                if kind == SOFT_TIMEOUT:
                    link.overdue(rank, iteration, message)
                else:
                    link.accuse(rank, kind, message)
            except LinkError as error:  # which this rank hears of by its link in any case
                logger.info("the others cannot be told of rank %s: %s", rank, error)
        self._lost(connection)

    def _look(self) -> None:
        """Notice that the monitor has ended; where nobody listens."""
        connection = self._socket
        if connection is None:
            return
        with suppress(BlockingIOError):
            if not self._received(connection, socket.MSG_DONTWAIT):
                self._lost(connection)

    @staticmethod
    def _received(connection: socket.socket, flags: int = 0) -> bytes:
        """Return a packet; nothing at the end of the connection."""
        try:
            return connection.recv(LONGEST, flags)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def _lost(self, connection: socket.socket) -> None:
        if self._socket is connection:
            self._socket, self._said = None, b""
        connection.close()

    def _reap(self) -> None:
        """Wait for what was started, which ends at once."""
        with suppress(ChildProcessError):  # somebody has waited for all children
            os.waitpid(self._started, 0)
        self._started = 0


def _word(change: int, until: float | None, iteration: int) -> Word:
    return Word(change, math.inf if until is None else until, iteration)
