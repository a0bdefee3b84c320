"""How a monitor tells of a rank: by a visit to the store, or by the ranks beside it.

A store of ours is visited, for as long as a question takes. A c10d store is torch's, which the
monitor does not load; all ranks of the group on this host are told instead, since one may hang.

A process that has ended is nobody's to wait for, and the store hears of it in the end by itself. So
such a visit is made by a thread, which has loaded what it takes by then; it is one for all that
have ended meanwhile, and one that fails is nothing to speak of: when a whole job ends, its store is
gone before the last of its ranks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from regrow.inprocess._deadlines import NOT_JUDGED
from regrow.inprocess._hard_watch import Terms
from regrow.inprocess._link import SOFT_TIMEOUT

TERMINATED: Final = "TERMINATED"
HARD_TIMEOUT: Final = "HARD_TIMEOUT"
"""As `attribution.Interruption` names them."""
VISIT: Final = 2.0
"""Seconds that the store may take to be reached, and to answer."""


class Seen(NamedTuple):
    """What is seen of a rank."""

    terms: Terms
    kind: str
    """`SOFT_TIMEOUT`, of which it may come back; by all others it is counted out."""
    message: str
    """What was seen, for people."""
    iteration: int = NOT_JUDGED
    """Which one ends by a `SOFT_TIMEOUT`."""


def tell_store(seen: Sequence[Seen]) -> None:
    """Tell a store of ranks; it has to be one of ours, and the same for all.

    Raises:
        StoreError: it cannot be reached, or did not answer; says why.
    """
    from regrow.inprocess._accuse import accuse, overdue
    from regrow.store._worker import visit

    first = seen[0].terms
    with visit(first.endpoint, bytes.fromhex(first.token), VISIT) as client:
        for terms, kind, message, iteration in seen:
            who = {"group": terms.group, "process": terms.process}
            if kind == SOFT_TIMEOUT:
                overdue(client, terms.rank, iteration, message, **who, timeout=VISIT)
            else:
                accuse(client, terms.rank, kind, message, **who, timeout=VISIT)


def tell_ranks(seen: Seen, group: Iterable[socket.socket]) -> None:
    """Have the others told of a rank by those of its group on this host; one that does not read
    waits for nothing.

    Args:
        seen: of the rank.
        group: their connections, which never block.
    """
    packet = json.dumps([seen.terms.rank, *seen[1:]]).encode()
    for connection in group:
        with suppress(OSError):
            connection.send(packet)


class Teller:
    """Tells stores of processes that have ended, in a thread that begins with the first need."""

    def __init__(self) -> None:
        self._ends: SimpleQueue[Seen | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Be ready to tell a store."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def tell(self, end: Seen) -> None:
        """Have a rank counted out; waits for nothing."""
        self.prepare()
        self._ends.put(end)

    def close(self) -> None:
        """Wait until all is told."""
        if self._thread is not None:
            self._ends.put(None)
            self._thread.join()

    def _run(self) -> None:
        import regrow.inprocess._accuse
        import regrow.store._client
        import regrow.store._worker  # noqa: F401 - loaded before there is a hurry
        from regrow.store import StoreError

        over = False
        while not over:
            waiting = [self._ends.get()]
            with suppress(Empty):
                while True:
                    waiting.append(self._ends.get_nowait())
            over = None in waiting
            ends = [end for end in waiting if end is not None]
            if ends:
                with suppress(StoreError):
                    tell_store(ends)


def note(path: str, text: str) -> None:
    """Say something, in a file if there is one to be written, else on stderr."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} regrow monitor: {text}\n"
    if path:
        try:
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line)
        except OSError as error:
            line = f"{line}{path} cannot be written: {error}\n"
        else:
            return
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))
