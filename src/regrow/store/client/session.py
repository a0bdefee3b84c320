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
short calls can read. The background thread reads when a call waits and no call reads. It also
detects a hang-up, sends bytes that the kernel did not accept at once, opens the next connection,
and reports every change of state.

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
import select
import threading
import time
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.store.client.connecting import dial_again, dial_first
from regrow.store.errors import (
    StoreClosedError,
    StoreError,
    StoreLimitError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    StoreValueError,
)
from regrow.store.keyspace import Query
from regrow.store.limits import CLOSE_S
from regrow.store.protocol import wire
from regrow.utils import call_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from regrow.store.client.connecting import Dialer, Greeted
    from regrow.store.client.transport import Transport
    from regrow.store.errors import Applied


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


class PendingCall:
    """One call without an answer."""

    __slots__ = ("changes", "data", "failure", "gate", "id", "reply", "sent")

    def __init__(self, id: int, data: bytes, changes: bool) -> None:
        self.id = id
        self.data = data
        self.changes = changes
        self.sent = False
        self.reply: wire.Reply | None = None
        self.failure: StoreError | None = None
        """The reason why the session ended before it answered."""
        self.gate = threading.Lock()
        """Released when the call has an answer, or the session has ended."""
        self.gate.acquire()

    @property
    def applied(self) -> Applied:
        """The possible effect of the call if the caller gives up now."""
        return "unknown" if self.changes and self.sent else "no"


class Calls:
    """The unanswered calls of one session; guarded by the lock of its `Session`."""

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        """The reason why no more calls are possible."""
        self.pending: dict[int, PendingCall] = {}
        """The calls that wait for an answer, by id."""
        self._next = 1

    def make(self, request: type[Any], args: tuple[Any, ...], frame_bytes: int) -> PendingCall:
        """Create a call from a message type and its arguments, with the next id."""
        if self.failure is not None:
            raise copy_of(self.failure)
        id = self._next
        changes = issubclass(request, wire.Mutation)
        if changes:
            unanswered = (call.id for call in self.pending.values() if call.changes)
            args = (next(unanswered, id) if self.pending else id, *args)
        try:
            data = wire.frame(request(id, *args))
        except (UnicodeEncodeError, OverflowError) as error:
            raise StoreValueError(f"the arguments cannot be sent: {error}") from None
        if len(data) > frame_bytes + wire.HEADER:
            raise StoreLimitError(
                f"the call has {len(data)} bytes, and the server takes at most "
                f"{frame_bytes} at once (Limits.frame_bytes)"
            )
        self._next = id + 1
        return PendingCall(id, data, changes)

    def nudge(self) -> bytes:
        """Create a small message; no caller waits for its answer."""
        self._next += 1
        return wire.frame(wire.Read(self._next - 1, Query("num_keys")))

    def answer(self, replies: Iterable[wire.Reply]) -> str | None:
        """Distribute answers; return the server's error if it ends the session."""
        for reply in replies:
            call = self.pending.get(reply.id)
            if call is not None:
                # In this order, an interrupt between two steps loses no answer.
                if call.reply is None:
                    call.reply = reply
                    call.gate.release()
                self.pending.pop(reply.id, None)
            elif isinstance(reply, wire.Failed) and reply.id == 0:
                return reply.message
        return None

    def again(self) -> bytes:
        """Return all data to send again over a new connection."""
        for call in self.pending.values():
            call.sent = True
        return b"".join(call.data for call in self.pending.values())

    def fail(self) -> None:
        """Wake the caller of every call, because the session has ended."""
        for call in self.pending.values():
            if call.failure is None:
                call.failure = self.failure
                call.gate.release()
        self.pending.clear()


def copy_of(failure: StoreError, applied: Applied = "no") -> StoreError:
    """Return a new error to raise for the end of a session.

    A raised exception holds the frames that it passed, and these frames hold the session. If the
    session also held the raised exception, the client would stay alive until the garbage collector
    runs.
    """
    return type(failure)(str(failure), applied=applied)


class Session:
    """A session and its current connection.

    Args:
        dialer: connects to the server.
        grace: seconds for which the session should outlive a lost connection.
        timeout: seconds within which the first connection must succeed.
        on_state: called from the background thread after each change of state.
        refusal_is_final: give up the first connection if no server listens, or the server hangs up.
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
        self._reported = ConnectionState.CONNECTED
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable when the background thread has work."""
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        try:
            dialer.wakes = {self._wake} if stop is None else {self._wake, stop}
            greeted = dial_first(dialer, grace, timeout, refusal_is_final=refusal_is_final)
            dialer.wakes = {self._wake}
            self.welcome = greeted.welcome
            """The terms that the server granted."""
            self._install(greeted)
        except BaseException:
            self._release()
            raise
        call_after_fork(self)
        self._thread = threading.Thread(target=self._run, name="regrow-store", daemon=True)
        self._thread.start()

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
            if lasting:
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
            f"timed out after {seconds:g} s: no answer from the store at "
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
            if self._thread is not threading.current_thread():
                self._thread.join(CLOSE_S)

    def _begin(self, request: type[Any], args: tuple[Any, ...]) -> PendingCall:
        with self._lock:
            call = self._calls.make(request, args, self.welcome.frame_bytes)
            try:
                self._calls.pending[call.id] = call
                if self._transport is not None:  # else the next transport sends it
                    call.sent = True
                    self._send(call.data)
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
            self._notify()
            self._calls.fail()
            self._drop(self._transport)

    def _drop(self, transport: Transport | None) -> None:
        """Make the background thread replace a connection that no longer works."""
        if transport is None or self._transport is not transport:
            return
        now = time.monotonic()
        # From here to the end no signal handler can run: all steps run, or none.
        self._lost_at = now
        self._dead = transport
        self._transport = None
        self._notify()

    def _notify(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------- in the background thread

    def _run(self) -> None:
        try:
            while self._calls.failure is None:
                if not self._work() and self._calls.failure is None:
                    self._reconnect()
                self._report()
        except BaseException as error:
            message = f"the client's background thread failed: {error!r}"
            with self._lock:
                self._fail(StoreSessionLost(message))
            raise
        finally:
            self._release()
        self._report()

    def _work(self) -> bool:
        """Wait for work, and do it; return False if there is no connection."""
        ready = {fd for fd, _ in self._epoll.poll()}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        transport = self._transport
        if transport is None:
            return False
        if transport.fd not in ready:
            return True
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
        return True

    def _reconnect(self) -> None:
        self._report()
        self._close_lost()
        try:
            greeted = dial_again(
                self.dialer, self.welcome.session, self.welcome.grace, self._lost_at
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
        transport = greeted.transport
        transport.register(self._epoll)
        with self._reading, self._lock:
            self._transport = transport
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

    def _report(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            if self._on_state is not None:
                self._on_state(state)

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
        if self._wake >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self._wake)
        self._wake = -1
        self._epoll.close()
