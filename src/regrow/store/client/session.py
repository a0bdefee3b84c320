"""A client's session with a store server: calls from any thread, over one connection at a time.

**At most once.** Every request has an id, ascending within the session. After a reconnect, the
client sends all unanswered requests again, in order. The server recognizes requests that it has
already run by their ids. A request that changes something also carries the id of the oldest
unanswered change, so the server can drop older answers. The client does not resend a call that was
given up (deadline, close). The error of such a call has `applied` "no" if the call was never sent
or changes nothing, and "unknown" otherwise.

**Reading.** A thread with a call reads the connection itself, if no other thread does. Waking a
second thread for every answer would cost more than the rest of the call. The reading thread passes
the other threads their answers. A long call (`wait`) leaves the reading to other threads, so that
short calls can read. The background thread of the process (`background.py`) reads when a call waits
and no call reads. It also detects a hang-up, and sends bytes that the kernel did not accept at
once. In a process with many sessions it reads for all calls.

**The next connection** is opened by a thread that exists only meanwhile. It also reports the
changes of state, and releases everything at the end of the session.

**Locks.** `_lock` guards the table of calls, the transport, and writing. No thread holds it while
it blocks. The reading thread holds `_reading`. A transport is closed only under `_reading`, so the
reader's descriptor stays valid. A thread takes `_reading` before `_lock`. A thread that holds
`_lock` takes `_reading` only if it need not wait.

**Interrupts** (Ctrl-C) may stop any step half-way. The order of the steps ensures that no answer is
lost, but an answer may arrive twice. A thread that is interrupted while it receives or sends may
leave half a message behind. So the client drops the connection, and repeats the unanswered requests
on the next one. A thread that only waited for an answer leaves nothing behind.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.store.client.background import serve
from regrow.store.client.connecting import dial_again, dial_first
from regrow.store.client.pending_calls import Calls, PendingCall, copy_of
from regrow.store.errors import (
    StoreClosedError,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
)
from regrow.store.limits import CLOSE_S
from regrow.store.protocol import wire
from regrow.utils import call_after_fork, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store.client.connecting import Dialer, Greeted
    from regrow.store.client.transport import Transport


class ConnectionState(Enum):
    """The state of a client's session."""

    CONNECTED = "connected"
    """The server answers."""
    SUSPENDED = "suspended"
    """The connection is lost and the client reconnects; calls wait for the reconnect.

    The session may have ended already by the server's clock.
    """
    LOST = "lost"
    """The session has ended for good.

    Calls in progress may have taken effect; their errors report this.
    """
    CLOSED = "closed"
    """The client was closed, or was inherited through a fork. All its calls fail."""


class Session:
    """A session and its current connection.

    Args:
        dialer: connects to the server.
        grace: seconds for which the session should outlive a lost connection.
        timeout: seconds within which the first connection must succeed.
        on_state: called after each change of state, from the thread that opens the connections.
        refusal_is_final: give up the first connection if no server listens, or the server hangs up.
        refusal_ends: returns whether the session ends if it has lost its connection and no server
            listens.
        stop: a descriptor that stops the first connection when it becomes readable.
    """

    def __init__(
        self,
        dialer: Dialer,
        grace: float,
        timeout: float,
        on_state: Callable[[ConnectionState], None] | None,
        *,
        refusal_is_final: bool = False,
        refusal_ends: Callable[[], bool] = lambda: False,
        stop: int | None = None,
    ) -> None:
        self.dialer = dialer
        self._calls = Calls()
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self._transport: Transport | None = None
        self._dead: Transport | None = None
        self._lost_at = 0.0
        """Time of the last connection loss, on the monotonic clock."""
        self._on_state = on_state
        self._refusal_ends = refusal_ends
        self._reported = ConnectionState.CONNECTED
        self._closing = False
        self._ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable when the session ends, which stops dialing."""
        self._mending = False
        """Whether a thread opens the next connection, or releases everything."""
        self._mender: threading.Thread | None = None  # the last such thread
        self._released = threading.Event()
        self._background = serve(self)
        try:
            dialer.wakes = {self._ending} if stop is None else {self._ending, stop}
            greeted = dial_first(dialer, grace, timeout, refusal_is_final=refusal_is_final)
            dialer.wakes = {self._ending}
            self.welcome = greeted.welcome
            """The terms that the server granted."""
            call_after_fork(self)
            self._install(greeted)
        except BaseException:
            self._mending = True  # no thread may begin to reconnect
            self._release()
            raise

    @property
    def state(self) -> ConnectionState:
        """The state of the session."""
        failure = self._calls.failure
        if failure is not None:
            closed = isinstance(failure, StoreClosedError)
            return ConnectionState.CLOSED if closed else ConnectionState.LOST
        return ConnectionState.SUSPENDED if self._transport is None else ConnectionState.CONNECTED

    # ------------------------------------------------------------- in any thread

    def call(
        self,
        request: type[Any],
        *args: Any,
        seconds: float,
        lasting: bool = False,
        nudge: float = threading.TIMEOUT_MAX,
    ) -> wire.Reply:
        """Make a call and return the answer.

        Args:
            request: the type of the message; made from id, ack (for a change) and `args`.
            args: the fields of the message after id and ack.
            seconds: time-out of the call.
            lasting: the call should block, so it leaves the reading to other threads.
            nudge: seconds without an answer after which the client sends a small message, and again
                after twice the time, and so on.
        """
        now = time.monotonic()
        deadline = now + seconds
        call = self._begin(request, args)
        try:
            if lasting or self._background.is_crowded:
                self._hand_over()
            else:
                self._read_for(call, min(deadline, now + nudge))
            if call.reply is None:
                self._await(call, deadline, nudge)
        except BaseException:
            self._give_up(call)
            self._hand_over()
            raise
        if call.reply is None:
            self._give_up(call)
        if call.reply is not None:
            return call.reply
        if call.failure is not None:
            raise copy_of(call.failure, call.applied)
        state = "" if self.state is ConnectionState.CONNECTED else f" ({self.state.value})"
        raise StoreTimeout(
            f"timed out after {round(seconds, 2):g} s: no answer from the store at "
            f"{self.dialer.endpoint}{state}",
            applied=call.applied,
        )

    def close(self, timeout: float) -> None:
        """End the session, also on the server if it answers in time; calls in progress raise."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            connected = self.state is ConnectionState.CONNECTED
        try:
            if connected:
                # If this fails, the server ends the session at the end of its grace.
                with suppress(StoreError):
                    self.call(wire.Bye, seconds=timeout)
        finally:
            with self._lock:
                self._fail(StoreClosedError("the store client was closed"))
            if self._mender is not threading.current_thread():
                self._released.wait(CLOSE_S)
                if self._mender is not None and not self._background.is_this_thread:
                    self._mender.join(CLOSE_S)

    def _begin(self, request: type[Any], args: tuple[Any, ...]) -> PendingCall:
        with self._lock:
            call = self._calls.make(request, args, self.welcome.frame_bytes)
            try:
                self._calls.pending[call.id] = call
                if self._transport is not None:
                    call.sent = True
                    self._send(call.data)
                else:  # the next transport sends it
                    self._background.attend(self)  # an interrupt may have cut `_drop` short
            except BaseException:
                self._calls.pending.pop(call.id, None)
                raise
        return call

    def _read_for(self, call: PendingCall, until: float) -> None:
        """Read the connection until the call has its answer, unless another thread reads."""
        transport, receiving = None, False
        try:
            if not self._reading.acquire(blocking=False):
                return
            transport = self._transport
            if transport is None:
                return
            with self._lock:  # else a `send` at this moment could wait for free space in vain
                transport.claim()
            while call.reply is None and transport.readable(until - time.monotonic()):
                receiving = True
                if not self._receive(transport):
                    break
                receiving = False
        except BaseException:
            if receiving:
                with self._lock:
                    self._drop(transport)
            raise
        finally:
            # An interrupt may come between taking the lock and any code that records this. But the
            # lock itself knows its owner.
            mine = True
            try:
                self._reading.release()
            except RuntimeError:
                mine = False  # another thread reads, and hands over when it stops
            finally:
                if mine:
                    self._hand_over()

    def _await(self, call: PendingCall, deadline: float, nudge: float) -> None:
        """Wait until another thread has read the answer.

        TCP resends lost bytes within a round trip if other bytes follow. If none follow, TCP waits
        for a timer that doubles with each loss, which costs seconds on a bad link. So a call with
        `nudge` sends a small message afterwards. The server's answer to this message does the same
        for the lost answer.
        """
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if call.gate.acquire(timeout=min(left, nudge)) or left <= nudge:
                return
            with self._lock:
                self._send(self._calls.nudge())
            nudge *= 2  # the server may just be overloaded, and each message adds to its load

    def _give_up(self, call: PendingCall) -> None:
        with self._lock:
            if self._calls.pending.pop(call.id, None) is not None and not call.changes:
                self._send(wire.frame(wire.Cancel(call.id)))

    def _hand_over(self) -> None:
        """Make the background thread read, if a call waits.

        The caller has already released `_reading`. A thread that found `_reading` taken has already
        added its call to the table, so this method sees that call.
        """
        if self._calls.pending:
            with self._lock:
                if self._transport is not None:
                    self._transport.watch(read=True)

    def _receive(self, transport: Transport) -> bool:
        """Pass on received answers, holding `_reading`; return False if the connection is lost."""
        try:
            replies = transport.receive()
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError, StoreProtocolError):
            with self._lock:
                self._drop(transport)
            return False
        with self._lock:
            refusal = self._calls.answer(replies)
            if refusal is not None:
                message = f"the store at {self.dialer.endpoint} refused: {refusal}"
                self._fail(StoreProtocolError(message))
        return refusal is None

    # ------------------------------------------------------------ holding `_lock`

    def _send(self, data: bytes) -> None:
        """Send data that the next connection need not repeat."""
        transport = self._transport
        if transport is None:
            return
        try:
            transport.send(data)
        except OSError:
            self._drop(transport)
        except BaseException:
            self._drop(transport)
            raise

    def _fail(self, failure: StoreError) -> None:
        """End the session: fail every call, now and from now on."""
        if self._calls.failure is None or isinstance(failure, StoreClosedError):
            self._calls.failure = failure
            if self._ending >= 0:
                os.eventfd_write(self._ending, 1)
            self._calls.fail()
            self._drop(self._transport)
            self._background.attend(self)

    def _drop(self, transport: Transport | None) -> None:
        """Let a connection be replaced that no longer works."""
        if transport is None or self._transport is not transport:
            return
        now = time.monotonic()
        # No signal handler can run between these three steps: all run, or none.
        self._lost_at = now
        self._dead = transport
        self._transport = None
        self._background.attend(self)

    # ------------------------------------------------- in the background thread

    def on_ready(self, fd: int) -> None:
        """See `background.Served`."""
        transport = self._transport
        if transport is None or transport.fd != fd:
            return
        with self._lock:
            # A reading call hands over when it stops, which it cannot do in the meantime.
            reads = self._reading.acquire(blocking=False)
            try:
                if self._transport is transport:
                    transport.flush()
                    transport.watch(read=False)
            except OSError:
                self._drop(transport)
        if reads:
            try:
                self._receive(transport)
            finally:
                self._reading.release()
            self._hand_over()

    def attend(self) -> None:
        """See `background.Served`."""
        if self._mending or self._is_whole():
            return
        self._mending = True
        try:
            start_thread(self._mend, "regrow-store reconnect")
        except RuntimeError:  # the interpreter ends, or there are too many threads
            self._mend()

    def fail(self, error: Exception) -> None:
        """See `background.Served`."""
        with self._lock:
            self._fail(StoreSessionLost(f"the client's background thread failed: {error!r}"))

    def _is_whole(self) -> bool:
        """Return whether nothing is left to do: there is a connection, or all is released."""
        if self._calls.failure is not None:
            return self._released.is_set()
        return self._transport is not None

    # ------------------------------- in the thread that opens the next connection

    def _mend(self) -> None:
        self._mender = threading.current_thread()
        try:
            while self._calls.failure is None and self._transport is None:
                self._reconnect()
                self._report()
        except BaseException as error:
            message = f"the thread that reconnects failed: {error!r}"
            with self._lock:
                self._fail(StoreSessionLost(message))
            raise
        finally:
            if self._calls.failure is not None:
                self._release()
                self._report()
                self._released.set()
            self._mending = False
            if not self._is_whole():  # the next connection was lost meanwhile
                self._background.attend(self)

    def _reconnect(self) -> None:
        self._report()
        self._close_lost()
        try:
            welcome = self.welcome
            greeted = dial_again(
                self.dialer, welcome.session, welcome.grace, self._lost_at, self._refusal_ends
            )
        except StoreClosedError:
            return
        except StoreSessionLost as error:
            # The error itself holds the frames of this method, and they hold this session.
            with self._lock:
                self._fail(StoreSessionLost(str(error)))
        else:
            self._install(greeted)

    def _install(self, greeted: Greeted) -> None:
        """Continue over a new connection."""
        transport, background = greeted.transport, self._background
        with self._reading, self._lock:
            # Before it is registered: a hang-up may follow at once, and wakes the thread only once.
            self._transport = transport
            background.add(transport.fd, self)
            transport.register(background.epoll)
            if self._calls.failure is not None:
                self._drop(transport)
                return
            self._send(self._calls.again())
        self._hand_over()

    def _close_lost(self) -> None:
        dead = self._dead
        if dead is not None:
            dead.shutdown()  # a thread that still reads it then releases `_reading`
            with self._reading, self._lock:
                self._background.remove(dead.fd)
                dead.close()
                self._dead = None

    def _release(self) -> None:
        """Release all resources; the session has ended, or never started."""
        with self._lock:
            self._calls.fail()
            self._drop(self._transport)
        self._close_lost()
        with self._lock:
            self._close()
        self._background.leave(self)

    def _report(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            if self._on_state is not None:
                try:
                    self._on_state(state)
                except Exception:  # noqa: BLE001 - the user's error does not end the session
                    from regrow.utils import get_logger

                    get_logger(__name__).exception(
                        "the function on_state of a store client raised an exception for %s", state
                    )

    # ------------------------------------------------------------ in a forked child

    def after_fork(self) -> None:
        """Leave the session to the parent process, and refuse every call."""
        self._closing = True
        self._lock, self._reading = threading.Lock(), threading.RLock()
        self._calls.failure = StoreClosedError(
            "the parent of this process made this store client, which cannot be used after a fork; "
            "connect again in the child"
        )
        for transport in (self._transport, self._dead):
            if transport is not None:
                transport.forget()
        self._transport = self._dead = None
        if self._ending >= 0:
            self._close()

    def _close(self) -> None:
        # In this order, because a child may be forked in between (`background.Background`).
        ending, self._ending = self._ending, -1
        os.close(ending)
