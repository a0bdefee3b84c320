"""A client's session with a store server: calls from any thread, over one connection.

Who reads. A thread that made a call reads the connection itself, if no other thread does:
that saves waking a second thread for every answer, which would cost more than the rest of
the call. The reader hands the other threads the answers that are theirs. Calls that are
meant to last (`wait`, `watch`) leave the reading to others, so that short calls have it.
A background thread reads when no call does and somebody waits; it also notices a hang-up,
writes what the kernel did not take at once, and reconnects.

Who holds what. `_lock` guards the table of calls, the ids, the state, and writing. It is
never held while blocking. `_role` is held by whoever reads; a link is closed only under
it, so the reader's descriptor stays valid. Where both are held, `_role` was taken first.

At most once. Every request has an id, ascending within the session. After a reconnect
everything unanswered is sent again, in order, and the server knows by the id what it has
done already. A call that is given up (deadline, close) is not sent again; its exception
says "no" if it was never sent or changes nothing, "unknown" otherwise. A thread
interrupted while it was reading or writing (Ctrl-C) may have left half a message behind:
the connection is dropped then, and the next one repeats what is unanswered.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.store import _wire as wire
from regrow.store._calls import Call, ConnectionState
from regrow.store._errors import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreHungUp,
    StoreLimitError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    StoreValueError,
)
from regrow.store._link import Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store._dial import Dialer

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5
_LAST_SECONDS = 2.0


class Connection:
    """A session and the connection that carries it.

    Args:
        dial: makes the dialer, given descriptors whose readability stops it.
        grace: seconds the session is to outlive a lost connection.
        timeout: seconds within which the first connection must be made.
        on_state: called from the background thread after each change of state.
        refusal_is_final: the first connection is given up when nobody listens, or hangs up.
        stop: another descriptor that stops the making of the first connection.
    """

    def __init__(
        self,
        dial: Callable[[set[int]], Dialer],
        grace: float,
        timeout: float,
        on_state: Callable[[ConnectionState], None] | None,
        *,
        refusal_is_final: bool = False,
        stop: int | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._role = threading.RLock()
        self._pending: dict[int, Call] = {}
        self._changes: dict[int, None] = {}
        self._next = 1
        self._failure: StoreError | None = None
        self._state = self._told = ConnectionState.CONNECTED
        self._on_state = on_state
        self._closing = False
        self._lost_at = 0.0
        self._link: Link | None = None
        self._dead: Link | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        # The dialer shares the set.
        self._wakes = {self._wake} if stop is None else {self._wake, stop}
        self._dialer = dial(self._wakes)
        try:
            self._first(grace, time.monotonic() + timeout, timeout, refusal_is_final)
            self._wakes &= {self._wake}
        except BaseException:
            self._epoll.close()
            os.close(self._wake)
            raise
        _connections.add(self)
        self._thread = threading.Thread(target=self._run, name="regrow-store", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ConnectionState:
        """What may be believed about the session."""
        return self._state

    @property
    def server(self) -> str:
        """See `StoreClient.server`."""
        return self._dialer.server

    @property
    def local_host(self) -> str:
        """See `StoreClient.local_host`."""
        return self._dialer.local_host

    def call(
        self,
        request: Callable[..., msgspec.Struct],
        *args: Any,
        changes: bool,
        seconds: float,
        lasting: bool = False,
        at_once: bool = False,
        nudge: float = threading.TIMEOUT_MAX,
    ) -> wire.Reply:
        """Make a call and return the answer.

        Args:
            request: the type of the message; made from id, ack (if `changes`) and `args`.
            changes: the call changes something.
            seconds: when to give up.
            lasting: the call is meant to block, so leave the reading to others.
            at_once: have the server answer at once, "cancelled" if it would block.
            nudge: seconds without an answer after which something else is sent, again and again.
        """
        deadline = time.monotonic() + seconds
        call = self._begin(request, args, changes, at_once)
        try:
            if lasting:
                self._hand_over()
            else:
                self._read_for(call, min(deadline, time.monotonic() + nudge))
            if call.reply is None and call.error is None:
                self._await(call, deadline, nudge)
        except BaseException:
            self._give_up(call)
            self._hand_over()
            raise
        if call.reply is None and call.error is None:
            self._give_up(call)
        if call.reply is not None:
            return call.reply
        if call.error is not None:
            raise call.error
        state = "" if self._state is ConnectionState.CONNECTED else f" ({self._state.value})"
        raise StoreTimeout(
            f"timed out after {seconds:g} s: no answer from the store at "
            f"{self._dialer.endpoint}{state}",
            applied=call.applied,
        )

    def close(self, timeout: float) -> None:
        """End the session, for the server too if it answers in time; calls under way raise."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            connected = self._link is not None
        try:
            if connected:
                # If this fails, the server ends the session when its grace is over.
                with suppress(StoreError):
                    self.call(wire.Bye, changes=False, seconds=timeout)
        finally:
            with self._lock:
                self._fail(StoreClosedError("the store client was closed"), ConnectionState.CLOSED)
            if self._thread is not threading.current_thread():
                # It ends at once, unless it is looking up a name.
                self._thread.join(_LAST_SECONDS)

    # ------------------------------------------------------------- in any thread

    def _begin(
        self, request: Callable[..., msgspec.Struct], args: Any, changes: bool, at_once: bool
    ) -> Call:
        with self._lock:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure))
            id = self._next
            try:
                if changes:
                    data = wire.frame(request(id, next(iter(self._changes), id), *args))
                else:
                    data = wire.frame(request(id, *args))
            except (UnicodeEncodeError, OverflowError) as error:
                raise StoreValueError(f"the arguments cannot be sent: {error}") from None
            if len(data) > self._frame_bytes + wire.HEADER:
                raise StoreLimitError(
                    f"the call has {len(data)} bytes, and the server takes at most "
                    f"{self._frame_bytes} at once (Limits.frame_bytes)"
                )
            if at_once:
                data += wire.frame(wire.Cancel(id))
            call = Call(id, data, changes)
            self._next = id + 1
            try:
                self._pending[id] = call
                if changes:
                    self._changes[id] = None
                if self._link is not None:
                    call.sent = True
                    self._send(self._link, data)
            except BaseException:
                self._pending.pop(id, None)
                self._changes.pop(id, None)
                raise
        return call

    def _send(self, link: Link, data: bytes) -> None:
        try:
            link.send(data)
        except OSError:
            self._drop(link)
        except BaseException:
            self._drop(link)
            raise

    def _await(self, call: Call, deadline: float, nudge: float) -> None:
        """Wait until another thread has read the answer.

        Bytes that were lost are sent again within a round trip if others follow them. If none do,
        TCP waits for a timer that doubles with each loss, which costs seconds on a bad line; so a
        call that is in a hurry has a small one follow, whose answer does the same for its own.
        """
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if call.gate.acquire(timeout=min(left, nudge)) or left <= nudge:
                return
            with self._lock:
                if self._link is not None:
                    self._send(self._link, wire.frame(wire.NumKeys(self._next)))
                    self._next += 1

    def _read_for(self, call: Call, deadline: float) -> None:
        """Read the connection until the call is answered, unless somebody else reads."""
        link = None
        try:
            if not self._role.acquire(blocking=False):
                return
            link = self._link
            if link is None:
                return
            link.disarm()
            while call.reply is None and call.error is None:
                if not link.readable(deadline - time.monotonic()) or not self._receive(link):
                    break
        except BaseException:
            with self._lock:
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
                self._hand_over()

    def _hand_over(self) -> None:
        """Have the background thread read, if anybody waits.

        It is called after `_role` was released: whoever found the role taken had entered the
        table of calls before, and is seen here.
        """
        if self._pending:
            with self._lock:
                if self._link is not None:
                    self._link.arm()

    def _receive(self, link: Link) -> bool:
        """Hand out what has arrived; return False if the connection is lost."""
        try:
            replies = link.receive()
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError, StoreProtocolError):
            with self._lock:
                self._drop(link)
            return False
        with self._lock:
            for reply in replies:
                call = self._pending.get(reply.id)
                if call is not None:
                    # In this order, an interrupt between two steps loses no answer.
                    if call.reply is None:
                        call.reply = reply
                        call.gate.release()
                    self._changes.pop(call.id, None)
                    self._pending.pop(call.id, None)
                elif isinstance(reply, wire.Failed) and reply.id == 0:
                    message = f"the store at {self._dialer.endpoint} refused: {reply.message}"
                    self._fail(StoreProtocolError(message), ConnectionState.LOST)
                    return False
        return True

    def _give_up(self, call: Call) -> None:
        with self._lock:
            if self._pending.pop(call.id, None) is None:
                return
            self._changes.pop(call.id, None)
            if self._link is not None and not call.changes:
                self._send(self._link, wire.frame(wire.Cancel(call.id)))

    # --------------------------------------------------------- holding the lock

    def _drop(self, link: Link | None) -> None:
        """The connection is of no more use: have the background thread make another."""
        if link is None or self._link is not link:
            return
        now = time.monotonic()
        # From here to the end no signal handler can run: all is done, or nothing was.
        self._lost_at = now
        if self._failure is None:
            self._state = ConnectionState.SUSPENDED
        self._dead = link
        self._link = None
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _fail(self, failure: StoreError, state: ConnectionState) -> None:
        """The session is over: fail every call, now and from now on."""
        if self._failure is None or state is ConnectionState.CLOSED:
            self._failure = failure
            self._state = state
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._fail_calls(failure)
            self._drop(self._link)

    def _fail_calls(self, failure: StoreError) -> None:
        for call in self._pending.values():
            if call.error is None:
                call.error = type(failure)(str(failure), applied=call.applied)
                call.gate.release()
        self._pending.clear()
        self._changes.clear()

    # ------------------------------------------------- in the background thread

    def _run(self) -> None:
        try:
            while self._failure is None:
                ready = {fd for fd, _ in self._epoll.poll()}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._serve(ready)
                self._tell()
        except BaseException as error:
            with self._lock:
                self._fail(
                    StoreSessionLost(f"the client's background thread failed: {error!r}"),
                    ConnectionState.LOST,
                )
            raise
        finally:
            self._release()
        self._tell()

    def _serve(self, ready: set[int]) -> None:
        link = self._link
        if link is None:
            if self._failure is None:
                self._reconnect()
            return
        if link.write_fd in ready:
            with self._lock:
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
            self._hand_over()

    def _reconnect(self) -> None:
        self._tell()
        self._bury()
        deadline = self._lost_at + self._grace
        pause, failure = _FIRST_PAUSE, "the connection was lost"
        while time.monotonic() < deadline:
            try:
                channel, welcome, received = self._dialer.dial(self._session, self._grace, deadline)
            except StoreClosedError:
                return
            except StoreError as error:
                failure = str(error)
                if self._sleep(min(pause, deadline - time.monotonic())):
                    return
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if welcome.session != self._session:
                channel.close()
                failure = f"the store at {self._dialer.endpoint} no longer knows this session"
                break
            self._install(Link(channel, self._epoll, received, welcome.frame_bytes))
            return
        with self._lock:
            self._fail(
                StoreSessionLost(
                    f"the session is lost after {self._grace:g} s of grace: {failure}"
                ),
                ConnectionState.LOST,
            )

    def _install(self, link: Link) -> None:
        with self._role, self._lock:
            self._link = link
            if self._failure is not None:
                self._drop(link)
                return
            self._state = ConnectionState.CONNECTED
            for call in self._pending.values():
                call.sent = True
            self._send(link, b"".join(call.data for call in self._pending.values()))
        self._hand_over()

    def _first(self, grace: float, deadline: float, timeout: float, refusal_is_final: bool) -> None:
        pause = _FIRST_PAUSE
        failure: StoreError | None = None
        while True:
            try:
                channel, welcome, received = self._dialer.dial(b"", grace, deadline)
                break
            except StoreConnectionError as error:
                failure = error
                refused = isinstance(error, StoreHungUp) or isinstance(
                    error.__cause__, ConnectionRefusedError
                )
                if isinstance(error, StoreClosedError) or (refused and refusal_is_final):
                    raise
                self._sleep(min(pause, deadline - time.monotonic()))
                pause = min(pause * 2, _LONGEST_PAUSE)
            except StoreTimeout as error:
                failure = failure or error
            if time.monotonic() >= deadline:
                raise type(failure)(f"{failure} (tried for {timeout:g} s)") from failure
        self._session = welcome.session
        self._grace = welcome.grace
        self._frame_bytes = welcome.frame_bytes
        self._link = Link(channel, self._epoll, received, welcome.frame_bytes)

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return True at once if the client is closed meanwhile."""
        poll = select.poll()
        for wake in self._wakes:
            poll.register(wake, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def _tell(self) -> None:
        state = self._state
        if state is not self._told:
            self._told = state
            if self._on_state is not None:
                self._on_state(state)

    def _bury(self) -> None:
        dead = self._dead
        if dead is not None:
            dead.shutdown()  # whoever still reads it lets go of the role
            with self._role, self._lock:
                dead.close()
                self._dead = None

    def _release(self) -> None:
        with self._lock:
            if self._failure is not None:
                self._fail_calls(self._failure)
            self._drop(self._link)
        self._bury()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
            self._epoll.close()

    # ------------------------------------------------------------ in a forked child

    def _forked(self) -> None:
        """Let go of what the parent still uses, and refuse every call."""
        self._lock, self._role = threading.Lock(), threading.RLock()
        self._closing = True
        self._failure = StoreClosedError(
            "this store client was made by the parent of this process and cannot be used after "
            "a fork; connect anew in the child"
        )
        self._state = ConnectionState.CLOSED
        for link in (self._link, self._dead):
            if link is not None:
                link.forget()
        self._link = self._dead = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._epoll.close()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
"""The connections of this process, to be let go of in a forked child."""


def _after_fork() -> None:
    for connection in list(_connections):
        connection._forked()
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork)
