"""The connections that carry a session, one after the other, and who reads and writes them.

Who reads. A thread that made a call reads the connection itself, if no other thread does:
that saves waking a second thread for every answer, which would cost more than the rest of
the call. The reader hands the other threads the answers that are theirs. Calls that are
meant to last (`wait`, `watch`) leave the reading to others, so that short calls have it.
A background thread reads when no call does and somebody waits; it also notices a hang-up
and writes what the kernel did not take at once.

Who holds what. `lock` guards the table of calls, the link, and writing. It is never held
while blocking. `_role` is held by whoever reads; a link is closed only under it, so the
reader's descriptor stays valid. Where both are held, `_role` was taken first.

A thread interrupted while it was reading or writing (Ctrl-C) may have left half a message
behind: the connection is dropped then, and the next one repeats what is unanswered.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from regrow.store._calls import Call, Calls, ConnectionState
from regrow.store._errors import StoreClosedError, StoreError, StoreProtocolError
from regrow.store._link import Link

if TYPE_CHECKING:
    from regrow.store._dial import Greeted


class Carrier:
    """A connection that may be lost and replaced; at first there is none.

    Args:
        calls: those it carries.
        endpoint: the server's, for messages.
    """

    def __init__(self, calls: Calls, endpoint: str) -> None:
        self.lock = threading.Lock()
        self.lost_at = 0.0
        """When the last connection was lost, on the monotonic clock."""
        self._role = threading.RLock()
        self._calls = calls
        self._endpoint = endpoint
        self._over: ConnectionState | None = None
        self._link: Link | None = None
        self._dead: Link | None = None
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable when the background thread has something to do."""
        self._epoll = select.epoll()
        self._epoll.register(self.wake, select.EPOLLIN)

    @property
    def state(self) -> ConnectionState:
        """What may be believed about the session."""
        if self._over is not None:
            return self._over
        return ConnectionState.SUSPENDED if self._link is None else ConnectionState.CONNECTED

    # ------------------------------------------------------------- in any thread

    def read_for(self, call: Call, deadline: float) -> None:
        """Read the connection until the call is answered, unless somebody else reads."""
        link = None
        try:
            if not self._role.acquire(blocking=False):
                return
            link = self._link
            if link is None:
                return
            link.disarm()
            while not call.over:
                if not link.readable(deadline - time.monotonic()) or not self._receive(link):
                    break
        except BaseException:
            with self.lock:
                self._drop(link)
            raise
        finally:
            # An interrupt may have struck between taking the role and anything that would
            # note it; the lock itself knows whose it is.
            try:
                self._role.release()
            except RuntimeError:
                link = None  # it was another thread's
            finally:
                self.hand_over()

    def hand_over(self) -> None:
        """Have the background thread read, if anybody waits.

        It is called after `_role` was released: whoever found the role taken had entered the
        table of calls before, and is seen here.
        """
        if self._calls.waiting:
            with self.lock:
                if self._link is not None:
                    self._link.arm()

    def _receive(self, link: Link) -> bool:
        """Hand out what has arrived; return False if the connection is lost."""
        try:
            replies = link.receive()
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError, StoreProtocolError):
            with self.lock:
                self._drop(link)
            return False
        with self.lock:
            refusal = self._calls.answer(replies)
            if refusal is not None:
                message = f"the store at {self._endpoint} refused: {refusal}"
                self.fail(StoreProtocolError(message), ConnectionState.LOST)
        return refusal is None

    # --------------------------------------------------------- holding the lock

    def post(self, call: Call) -> None:
        """Send a call; without a connection, the next one sends it."""
        if self._link is not None:
            call.sent = True
            self.send(call.data)

    def send(self, data: bytes) -> None:
        """Send something that the next connection need not repeat."""
        link = self._link
        if link is None:
            return
        try:
            link.send(data)
        except OSError:
            self._drop(link)
        except BaseException:
            self._drop(link)
            raise

    def fail(self, failure: StoreError, state: ConnectionState) -> None:
        """The session is over: fail every call, now and from now on."""
        if self._over is None or state is ConnectionState.CLOSED:
            self._calls.failure = failure
            self._over = state
            if self.wake >= 0:
                os.eventfd_write(self.wake, 1)
            self._calls.fail()
            self._drop(self._link)

    def _drop(self, link: Link | None) -> None:
        """The connection is of no more use: have the background thread make another."""
        if link is None or self._link is not link:
            return
        now = time.monotonic()
        # From here to the end no signal handler can run: all is done, or nothing was.
        self.lost_at = now
        self._dead = link
        self._link = None
        if self.wake >= 0:
            os.eventfd_write(self.wake, 1)

    # ------------------------------------------------- in the background thread

    def work(self) -> bool:
        """Wait for something to do, and do it; return False if there is no connection."""
        ready = {fd for fd, _ in self._epoll.poll()}
        if self.wake in ready:
            os.eventfd_read(self.wake)
        link = self._link
        if link is None:
            return False
        if link.write_fd in ready:
            with self.lock:
                try:
                    if self._link is link:
                        link.flush()
                except OSError:
                    self._drop(link)
        # If a call is reading, it hands over when it stops.
        if link.fd in ready and self._role.acquire(blocking=False):
            try:
                self._receive(link)
            finally:
                self._role.release()
            self.hand_over()
        return True

    def bury(self) -> None:
        """Close the connection that was lost."""
        dead = self._dead
        if dead is not None:
            dead.shutdown()  # whoever still reads it lets go of the role
            with self._role, self.lock:
                dead.close()
                self._dead = None

    def install(self, greeted: Greeted) -> None:
        """Go on over a new connection."""
        link = Link(greeted, self._epoll)
        with self._role, self.lock:
            self._link = link
            if self._over is not None:
                self._drop(link)
                return
            self.send(self._calls.again())
        self.hand_over()

    def release(self) -> None:
        """Give everything back; the session is over, or never was."""
        with self.lock:
            if self._over is not None:
                self._calls.fail()
            self._drop(self._link)
        self.bury()
        with self.lock:
            self._close()

    # ------------------------------------------------------------ in a forked child

    def disown(self) -> None:
        """Let go of what the parent still uses, and refuse every call."""
        self.lock, self._role = threading.Lock(), threading.RLock()
        self._calls.failure = StoreClosedError(
            "this store client was made by the parent of this process and cannot be used after "
            "a fork; connect anew in the child"
        )
        self._over = ConnectionState.CLOSED
        for link in (self._link, self._dead):
            if link is not None:
                link.forget()
        self._link = self._dead = None
        if self.wake >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self.wake)
        self.wake = -1
        self._epoll.close()
