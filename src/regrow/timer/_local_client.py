"""A worker's requests, into a multiprocessing queue without its feeder.

`Queue.put` leaves what it is given to a thread of this process, which sends it later. For a timer
that is too late. If the block it guards is a native call that holds the GIL, the thread does not
run before that returns: the request to arm is never sent, and of the call that hangs nobody knows;
or the request to release is not, and the worker is killed for nothing. What is not sent when a
worker is killed is lost, and a program whose server no longer reads cannot exit, as it waits for
the thread. So the request is written here, at once, in the queue's own format and under its lock.

It is written only when the pipe has room for all of it, so that the write is one that happens or
does not: a worker that is killed leaves no half message. If a server is busy for long, the first
request for which there is no room waits `PATIENCE` seconds for it. From then on the training waits
for nothing; the latest request of each scope is kept, and a thread waits to send them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

from regrow.timer._api import TimerClient, TimerRequest
from regrow.timer._stacks import arm
from regrow.utils import get_logger

logger = get_logger(__name__)

PATIENCE = 0.5
"""Seconds that a request waits for room in the queue."""
LONGEST_SCOPE = 900
"""Characters, of four bytes at most, so that a message has room in one page (4096 bytes)."""


class LocalTimerClient(TimerClient):
    """A worker's way to a `LocalTimerServer`.

    Args:
        mp_queue: the queue that the server reads, a `multiprocessing.Queue` handed to this worker,
            or what behaves like it.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        # A manager's queue has none of these, and sends at once.
        self._room: Any = getattr(mp_queue, "_sem", None)
        self._lock: Any = getattr(mp_queue, "_wlock", None)
        self._writer: Any = getattr(mp_queue, "_writer", None)
        self._direct = None not in (self._room, self._lock, self._writer)
        self._begin(os.getpid())

    def _begin(self, pid: int) -> None:
        self._pid = pid
        self._unsent: dict[str, TimerRequest] = {}
        self._guard = threading.RLock()  # of the requests not sent; a signal may come anywhere
        self._sender: threading.Thread | None = None

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm this process's timer of a scope; see `TimerClient`."""
        arm()
        self._send(TimerRequest(os.getpid(), _short(scope_id), expiration_time))

    def release(self, scope_id: str) -> None:
        """Disarm this process's timer of a scope."""
        self._send(TimerRequest(os.getpid(), _short(scope_id), -1))

    def _send(self, request: TimerRequest) -> None:
        if not self._direct:
            self._mp_queue.put(request)
            return
        if self._pid != request.worker_id:  # forked: what was kept is the parent's
            self._begin(request.worker_id)
        with self._guard:
            self._unsent.pop(request.scope_id, None)
            self._unsent[request.scope_id] = request
        if not self._sent(0.0 if self._sender else PATIENCE) and self._sender is None:
            logger.warning(
                "the timer server does not read its queue: the timers of process %d do not count "
                "until it does. The program goes on",
                self._pid,
            )
            self._sender = threading.Thread(
                target=self._send_later, name="regrow-timer-client", daemon=True
            )
            try:
                self._sender.start()
            except RuntimeError:  # there are too many, or the program ends: the next request tries
                self._sender = None

    def _send_later(self) -> None:
        done = False
        while not done:
            if self._sent(PATIENCE):
                self._sender = None
                done = not self._unsent  # or somebody has relied on this thread until now

    def _sent(self, patience: float) -> bool:
        """Send what is kept, waiting so many seconds for each; whether nothing is left."""
        # Of a copy, which is made in one step: another thread, or a signal's handler in this one,
        # adds requests while this one looks for the first.
        while (request := next(iter(self._unsent.copy().values()), None)) is not None:
            if not self._room.acquire(timeout=patience):
                return False
            written = None
            try:
                written = self._written(request, patience)
            except OSError as error:
                logger.debug("the timers' queue cannot be written to: %s", error)
            if written is not True:
                self._room.release()
            if written is None:
                return False
        return True

    def _written(self, request: TimerRequest, patience: float) -> bool | None:
        """Write a kept request; False: another thread has, or knows a later one; None: no room."""
        end = time.monotonic() + patience
        poll = select.poll()
        poll.register(self._writer.fileno(), select.POLLOUT)
        # The lock of all writers also keeps the threads of this process in order. Nobody waits for
        # room while he holds it: see the server's `_set_free`.
        while self._lock.acquire(timeout=max(0.0, end - time.monotonic())):
            try:
                if self._unsent.get(request.scope_id) is not request:
                    return False
                if poll.poll(0):
                    # A page of the pipe is free: no message is longer, so it is written at once.
                    self._writer.send_bytes(ForkingPickler.dumps(request))
                    with self._guard:
                        if self._unsent.get(request.scope_id) is request:
                            del self._unsent[request.scope_id]
                    return True
            finally:
                self._unlock()
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                break
        return None

    def _unlock(self) -> None:
        try:
            self._lock.release()
        except ValueError:  # the server has, after the end of a process: see there
            logger.info("the lock of the timers' queue had been released")


def _short(scope: str) -> str:
    """A scope that fits into a page with its message: of a long one, the beginning and a mark."""
    if len(scope) <= LONGEST_SCOPE:
        return scope
    import hashlib

    mark = hashlib.blake2s(scope.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{scope[:LONGEST_SCOPE]}...{mark}"
