"""A rank's side of its group, over the store server that runs it (`_service`).

Every method is one question. What waits is parked at the server, so the question is put once and
answered when there is an answer. It is put again when nothing has come for `POLL` seconds, which
costs nothing and finds out whether anybody is there. A connection that broke is made again by the
session itself, which repeats what has no answer. When the session is lost, the question is put over
a new one: the server knows this process by its name, and says what became of its rank meanwhile.

The session is the rank's sign of life, so it belongs to this link alone, and ends with it. Silence
of the server is borne as long as the function runs, which is `follow`. A barrier that the server
does not end in time is given up here.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from regrow.inprocess import _messages as messages
from regrow.inprocess._link import (
    SOFT_TIMEOUT,
    BarrierOverflow,
    BarrierTimeout,
    CountedOutError,
    Faults,
    LinkClosedError,
    LinkError,
    LinkLostError,
    Met,
    Timeouts,
)
from regrow.store import (
    ConnectionState,
    StoreClosedError,
    StoreError,
    StoreSessionLost,
    StoreTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store import StoreClient

POLL: Final = 60.0
"""Seconds after which a question that waits is put again."""
ANSWER: Final = 30.0
"""Seconds within which what is answered at once has to be answered."""
SLACK: Final = 10.0
"""Seconds by which the server may be late to end a barrier."""
RECONNECT: Final = 5.0
"""Seconds within which a server must be there when the session with it is lost; until then the
session has been trying already."""
NUDGE: Final = 0.25
"""Seconds after which a call that is answered at once is taken to be lost on the way."""


class ServiceLink:
    """One rank's side of its group, over a store server; a `Link`.

    Args:
        connect: begins a session with the server, for this link alone, within so many seconds;
            called now, and again when the session is lost. Raises StoreError if it cannot.
        group: the name of the group, the same on all ranks, and of no other call of a wrapped
            function in this store, in this process or before it.
        rank: the initial rank of this process.
        size: how many ranks the group has.
        timeouts: the same on all ranks.

    Raises:
        LinkLostError: the server cannot be reached.
    """

    def __init__(
        self,
        connect: Callable[[float], StoreClient],
        group: str,
        rank: int,
        size: int,
        timeouts: Timeouts,
    ) -> None:
        self._connect = connect
        self._me = group, rank, os.urandom(8).hex()
        self._size = size
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._closed = False
        self._reports = itertools.count(1)
        self._client: StoreClient | None = None
        self._begin(timeouts.barrier)

    @property
    def process(self) -> str:
        """The name by which the server knows this process."""
        return self._me[2]

    def join(self) -> int:
        """See `Link.join`."""
        question = messages.Join(*self._me, self._size, self._timeouts)
        told = self._wait(question, self._timeouts.barrier, "join")
        if not isinstance(told, messages.Go):
            raise self._nonsense(told)
        return told.iteration

    def enter(self, iteration: int, rank: int, world_size: int) -> Faults | None:
        """See `Link.enter`."""
        question = messages.Enter(*self._me, iteration, rank, world_size)
        return self._faults(self._wait(question, self._timeouts.barrier, "enter"))

    def follow(self, iteration: int) -> Faults | None:
        """See `Link.follow`."""
        return self._faults(self._wait(messages.Follow(*self._me, iteration)))

    def report(self, iteration: int, kind: str, message: str, lag: float = 0.0) -> None:
        """See `Link.report`."""
        text = message[: messages.TEXT]
        number = messages.OVERDUE if kind == SOFT_TIMEOUT else next(self._reports)
        self._say(messages.Report(*self._me, iteration, number, kind, text, lag))

    def overdue(self, rank: int, iteration: int, message: str) -> None:
        """See `Link.overdue`."""
        self._say(messages.overdue(self._me[0], rank, "", iteration, message))

    def heard(self, iteration: int) -> Faults:
        """See `Link.heard`."""
        question = messages.Heard(*self._me, iteration)
        told = self._wait(question, self._timeouts.last_call, "heard")
        if not isinstance(told, messages.Interrupted):
            raise self._nonsense(told)
        return told.faults

    def ready(self, iteration: int) -> Met:
        """See `Link.ready`."""
        question = messages.Ready(*self._me, iteration)
        told = self._wait(question, self._timeouts.barrier, "ready")
        if not isinstance(told, messages.Gathered):
            raise self._nonsense(told)
        return told.met

    def completed(self, iteration: int) -> None:
        """See `Link.completed`."""
        self._say(messages.Completed(*self._me, iteration))

    def wait_completed(self, iteration: int) -> Faults | None:
        """See `Link.wait_completed`."""
        return self._faults(self._wait(messages.WaitCompleted(*self._me, iteration)))

    def done(self, iteration: int) -> Faults | None:
        """See `Link.done`."""
        question = messages.Done(*self._me, iteration)
        return self._faults(self._wait(question, self._timeouts.completion, "done"))

    def terminated(
        self,
        iteration: int,
        kind: str,
        message: str,
        *,
        discarded: bool = False,
        lag: float = 0.0,
    ) -> Faults:
        """See `Link.terminated`."""
        text = message[: messages.TEXT]
        told = self._say(messages.Leave(*self._me, iteration, kind, text, discarded, lag))
        if not isinstance(told, messages.Left):
            raise self._nonsense(told)
        return told.faults

    def accuse(self, rank: int, kind: str, message: str) -> bool:
        """See `Link.accuse`."""
        told = self._say(messages.Accuse(self._me[0], rank, "", kind, message[: messages.TEXT]))
        return isinstance(told, messages.Noted) and told.news

    def close(self) -> None:
        """See `Link.close`."""
        with self._lock:
            self._closed = True
            client = self._client
        if client is not None:
            client.close()

    # ------------------------------------------------------------------ helpers

    def _say(self, question: messages.Asked) -> messages.Told:
        """Put a question that is answered at once."""
        return self._ask(question, ANSWER, nudge=NUDGE)

    def _wait(
        self, question: messages.Asked, bound: float | None = None, barrier: str = ""
    ) -> messages.Told:
        """Put a question that waits, until it is answered or late by the server's own bound."""
        deadline = None if bound is None else time.monotonic() + bound + SLACK
        while True:
            left = POLL if deadline is None else min(POLL, deadline - time.monotonic())
            try:
                return self._ask(question, max(left, 0.0))
            except _SilenceError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise BarrierTimeout(
                        f"rank {self._me[1]} has waited at the barrier {barrier!r} for {bound:g} s "
                        f"and {SLACK:g} s more, and the store does not end it: {error}"
                    ) from error

    def _ask(
        self, question: messages.Asked, seconds: float, nudge: float | None = None
    ) -> messages.Told:
        body = messages.encode(question)
        while True:
            client = self._session()
            try:
                answer = client.ask(messages.NAME, body, seconds, nudge=nudge)
                return self._checked(messages.decode_answer(answer))
            except StoreSessionLost:
                self._drop(client)
            except StoreClosedError as error:
                raise LinkClosedError(f"the link was closed: {error}") from error
            except StoreTimeout as error:
                silence = nudge is None and client.state is not ConnectionState.CLOSED
                raise (_SilenceError if silence else LinkLostError)(str(error)) from error
            except (StoreError, msgspec.MsgspecError) as error:
                raise LinkLostError(self._gone(error)) from error

    def _session(self) -> StoreClient:
        """Return the session, beginning one if there is none."""
        client = self._client
        if client is not None:
            return client
        with self._connecting:
            client = self._known()
            if client is None:
                client = self._begin()
        return client

    def _is_closed(self) -> bool:
        return self._closed

    def _known(self) -> StoreClient | None:
        return self._client

    def _begin(self, seconds: float = RECONNECT) -> StoreClient:
        if self._is_closed():
            raise LinkClosedError("the link was closed")
        try:
            client = self._connect(seconds)
        except StoreError as error:
            raise LinkLostError(self._gone(error)) from error
        with self._lock:
            self._client = client
        if self._is_closed():  # meanwhile
            client.close(0)
        return client

    def _drop(self, client: StoreClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
        client.close(0)

    def _checked(self, told: messages.Told) -> messages.Told:
        group, rank, _ = self._me
        if isinstance(told, messages.Failed):
            raise (BarrierTimeout if told.timeout else BarrierOverflow)(told.text)
        if isinstance(told, messages.CountedOut):
            fault = told.fault
            raise CountedOutError(
                f"rank {rank} was counted out ({fault.kind}: {fault.message}), and the others go "
                f"on without it"
            )
        if isinstance(told, messages.Unknown):
            raise LinkLostError(
                f"{told.text}: the store was started again, or gave the group up. Start the job "
                f"again; it goes on from its last checkpoint"
            )
        if isinstance(told, messages.Problem):
            raise LinkError(f"rank {rank} of the group {group!r}: {told.text}")
        return told

    def _faults(self, told: messages.Told) -> Faults | None:
        if isinstance(told, messages.Interrupted):
            return told.faults
        if isinstance(told, messages.Go | messages.Over):
            return None
        raise self._nonsense(told)

    def _gone(self, why: object) -> str:
        return f"rank {self._me[1]} cannot reach the store of its group {self._me[0]!r}: {why}"

    def _nonsense(self, told: messages.Told) -> LinkError:
        return LinkError(
            f"rank {self._me[1]} and the store do not understand each other: it answered "
            f"{told!r:.200}. Run the same release of regrow in all processes"
        )


class _SilenceError(LinkLostError):
    """The server had nothing to say in the time given."""
