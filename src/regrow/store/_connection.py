"""A client's session with a store server: calls from any thread, over one connection.

A call enters the table of calls (`_calls`), which is how it takes effect at most once; is sent;
and then either its thread reads the connection, or it waits for the thread that does (`_carrier`).
While the connection is gone, calls wait for the next one. The background thread makes it, as
patiently as `_redial` says, and tells of every change of state.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regrow.store import _wire as wire
from regrow.store._calls import Call, Calls, ConnectionState
from regrow.store._carrier import Carrier
from regrow.store._errors import StoreClosedError, StoreError, StoreSessionLost, StoreTimeout
from regrow.store._fork import disown_in_children
from regrow.store._redial import dial_again, dial_first

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from regrow.store._dial import Dialer

_LAST_SECONDS = 2.0


class Connection:
    """A session and the connection that carries it.

    Args:
        dialer: reaches the server.
        grace: seconds the session is to outlive a lost connection.
        timeout: seconds within which the first connection must be made.
        on_state: called from the background thread after each change of state.
        refusal_is_final: the first connection is given up when nobody listens, or hangs up.
        stop: a descriptor whose readability stops the making of the first connection.
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
        self._calls = Calls()
        self._carrier = Carrier(self._calls, dialer.endpoint)
        self._dialer = dialer
        self._on_state = on_state
        self._told = ConnectionState.CONNECTED
        self._closing = False
        try:
            dialer.wakes = {self._carrier.wake} if stop is None else {self._carrier.wake, stop}
            greeted = dial_first(dialer, grace, timeout, refusal_is_final=refusal_is_final)
            dialer.wakes = {self._carrier.wake}
            self._welcome = greeted.welcome
            self._carrier.install(greeted)
        except BaseException:
            self._carrier.release()
            raise
        disown_in_children(self)
        self._thread = threading.Thread(target=self._run, name="regrow-store", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ConnectionState:
        """What may be believed about the session."""
        return self._carrier.state

    @property
    def server(self) -> str:
        """See `StoreClient.server`."""
        return self._dialer.server

    @property
    def local_host(self) -> str:
        """See `StoreClient.local_host`."""
        return self._dialer.local_host

    # ------------------------------------------------------------- in any thread

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
                self._carrier.hand_over()
            else:
                self._carrier.read_for(call, min(deadline, time.monotonic() + nudge))
            if not call.over:
                self._await(call, deadline, nudge)
        except BaseException:
            self._give_up(call)
            self._carrier.hand_over()
            raise
        if not call.over:
            self._give_up(call)
        if call.reply is not None:
            return call.reply
        if call.error is not None:
            raise call.error
        state = "" if self.state is ConnectionState.CONNECTED else f" ({self.state.value})"
        raise StoreTimeout(
            f"timed out after {seconds:g} s: no answer from the store at "
            f"{self._dialer.endpoint}{state}",
            applied=call.applied,
        )

    def _begin(
        self,
        request: Callable[..., msgspec.Struct],
        args: tuple[Any, ...],
        changes: bool,
        at_once: bool,
    ) -> Call:
        with self._carrier.lock:
            call = self._calls.make(
                request,
                args,
                changes=changes,
                at_once=at_once,
                frame_bytes=self._welcome.frame_bytes,
            )
            try:
                self._calls.enter(call)
                self._carrier.post(call)
            except BaseException:
                self._calls.remove(call)
                raise
        return call

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
            with self._carrier.lock:
                self._carrier.send(self._calls.nudge())

    def _give_up(self, call: Call) -> None:
        with self._carrier.lock:
            if self._calls.remove(call) and not call.changes:
                self._carrier.send(wire.frame(wire.Cancel(call.id)))

    def close(self, timeout: float) -> None:
        """End the session, for the server too if it answers in time; calls under way raise."""
        with self._carrier.lock:
            if self._closing:
                return
            self._closing = True
            connected = self.state is ConnectionState.CONNECTED
        try:
            if connected:
                # If this fails, the server ends the session when its grace is over.
                with suppress(StoreError):
                    self.call(wire.Bye, changes=False, seconds=timeout)
        finally:
            self._fail(StoreClosedError("the store client was closed"), ConnectionState.CLOSED)
            if self._thread is not threading.current_thread():
                # It ends at once, unless it is looking up a name.
                self._thread.join(_LAST_SECONDS)

    def _fail(self, failure: StoreError, state: ConnectionState) -> None:
        with self._carrier.lock:
            self._carrier.fail(failure, state)

    # ------------------------------------------------- in the background thread

    def _run(self) -> None:
        try:
            while self._calls.failure is None:
                if not self._carrier.work() and self._calls.failure is None:
                    self._reconnect()
                self._tell()
        except BaseException as error:
            message = f"the client's background thread failed: {error!r}"
            self._fail(StoreSessionLost(message), ConnectionState.LOST)
            raise
        finally:
            self._carrier.release()
        self._tell()

    def _reconnect(self) -> None:
        self._tell()
        self._carrier.bury()
        session, grace = self._welcome.session, self._welcome.grace
        try:
            greeted = dial_again(self._dialer, session, grace, self._carrier.lost_at)
        except StoreClosedError:
            return
        except StoreSessionLost as error:
            self._fail(error, ConnectionState.LOST)
        else:
            self._carrier.install(greeted)

    def _tell(self) -> None:
        state = self.state
        if state is not self._told:
            self._told = state
            if self._on_state is not None:
                self._on_state(state)

    # ------------------------------------------------------------ in a forked child

    def disown(self) -> None:
        """Leave the session to the parent, and refuse every call."""
        self._closing = True
        self._carrier.disown()
