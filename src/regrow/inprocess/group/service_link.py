"""A rank's connection to its group, over the store server that runs the group (`group_service`).

Every method sends one question. The server parks a question until it has an answer, so the rank
does not poll. After `POLL` seconds without an answer the question is sent again, which costs little
and detects a server that is gone. The session itself restores a broken connection and repeats open
questions. When the session is lost, the link sends the question over a new session. The server
identifies this process by its name, and its answer includes what happened to the rank meanwhile.

The session is the rank's sign of life. So it belongs to this link alone and ends with it. While the
function runs (`follow`), the link tolerates a silent server. If the server does not end a barrier
in time, the link gives up the barrier.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from regrow.inprocess.exception import (
    BarrierOverflow,
    BarrierTimeout,
    CallOverError,
    EvictedError,
    LinkClosedError,
    LinkError,
    LinkLostError,
)
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import (
    SOFT_TIMEOUT,
    Admitted,
    Faults,
    Met,
    Timeouts,
)
from regrow.store import ServiceClient, StoreClosedError, StoreError, StoreTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store import StoreClient

R = TypeVar("R")

POLL: Final = 60.0
"""Seconds after which a waiting question is sent again."""
ANSWER: Final = 30.0
"""Seconds within which the server has to answer a question that does not wait."""
SLACK: Final = 10.0
"""Seconds by which the server may end a barrier late."""
RECONNECT: Final = 5.0
"""Seconds to reach a server after the session is lost. The session has retried until then."""
NUDGE: Final = 0.25
"""Seconds after which a question that does not wait counts as lost in transit."""


class ServiceLink:
    """A rank's connection to its group, over a store server.

    Calls raise the subclass of `LinkError` that names the reason.

    Args:
        connect: opens a session with the server, for this link alone, within the given seconds. It
            is called now, and again when the session is lost. It raises StoreError if it fails.
        group: the name of the group, the same on all ranks. No other call of a wrapped function in
            this store may use it, in this process or an earlier one.
        rank: the initial rank of this process.
        size: number of ranks in the group.
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
        self._me = group, rank, os.urandom(8).hex()
        self._size = size
        self._timeouts = timeouts
        self._reports = itertools.count(1)
        self._client = ServiceClient(
            messages.NAME, lambda seconds, _: connect(seconds), connect_within=RECONNECT
        )
        try:
            self._client.connect(timeouts.barrier)
        except StoreError as error:
            raise LinkLostError(self._unreachable(error)) from error

    @property
    def process(self) -> str:
        """Name by which the server identifies this process."""
        return self._me[2]

    def join(self) -> int:
        """Join the group; return the iteration to enter when all ranks have joined.

        Sends one question. Blocks until all initial ranks have joined. A rank that joined and died
        meanwhile is a fault of iteration 0, unless another process takes its place in time.

        Raises:
            BarrierTimeout: not all ranks joined within `Timeouts.barrier`; the text names the
                missing ones.
            BarrierOverflow: a process with this rank has joined already.
        """
        question = messages.Join(*self._me, self._size, self._timeouts)
        reply = self._wait(question, self._timeouts.barrier)
        return self._expect(messages.Go, reply).iteration

    def take_over(self, incarnation: int, origin: str = "") -> Admitted | int | None:
        """Join the group in place of a process of this rank that has ended.

        Sends one question. Blocks until the other ranks meet for their next iteration, which may
        take long if this rank is in reserve.

        Args:
            incarnation: number of processes that had this rank before.
            origin: see `Joined.origin`.

        Returns:
            How the other ranks met, and the place of this rank. If they have not met before: the
            iteration to enter. None if the call is over without this rank.
        """
        origin = origin[: messages.ORIGIN]
        question = messages.Join(*self._me, self._size, self._timeouts, incarnation, origin)
        reply = self._wait(question)
        if isinstance(reply, messages.Admitted):
            return reply
        if isinstance(reply, messages.Over):
            return None
        return self._expect(messages.Go, reply).iteration

    def enter(
        self, iteration: int, rank: int, world_size: int, *, active: bool = True
    ) -> Faults | None:
        """Enter an iteration with the place that the rank assignment gave this rank.

        Sends one question, in the first iteration and after each `ready`. Blocks until all living
        ranks have entered, or have left because the assignment discarded them.

        Args:
            iteration: the number that `join` or `ready` returned.
            rank: this rank's place in the new world.
            world_size: the number of places; the same on all ranks. Each rank has a different
                place.
            active: whether this rank calls the function; otherwise it waits in reserve.

        Returns:
            None: all ranks have entered, and the function may be called. Otherwise the faults that
            ended the iteration before it began; continue as after `follow`.

        Raises:
            BarrierTimeout: not all ranks entered within `Timeouts.barrier`.
            BarrierOverflow: the ranks disagree about the world; the text names the ranks and their
                values.
        """
        question = messages.Enter(*self._me, iteration, rank, world_size, active)
        return self._wait_for_end(question, self._timeouts.barrier)

    def follow(self, iteration: int) -> Faults | None:
        """Wait for the end of an iteration; for a separate thread.

        Sends one question. Blocks until the first fault, which may be this rank's own.

        Returns:
            The known faults, or None if no further fault can follow: all ranks are done, or this
            rank has left.
        """
        return self._wait_for_end(messages.Follow(*self._me, iteration))

    def report(self, iteration: int, kind: str, message: str, lag: float = 0.0) -> None:
        """Report a fault that this rank survives; it ends the iteration for all ranks.

        Sends one question, which the server answers at once. The follower thread receives the
        fault, as on every other rank. A report for an iteration that has already ended is added to
        the records of that iteration while they are kept. It ends no other iteration.

        Args:
            iteration: the iteration of the fault.
            kind: the name of the `Interruption`; SOFT_TIMEOUT counts once per iteration.
            message: description for people; its first 1,000 characters are kept.
            lag: seconds since the fault.
        """
        text = message[: messages.TEXT]
        number = messages.OVERDUE if kind == SOFT_TIMEOUT else next(self._reports)
        self._ask(messages.Report(*self._me, iteration, number, kind, text, lag), nudge=NUDGE)

    def answer_last_call(self, iteration: int) -> Faults:
        """Answer the last call of an iteration.

        This rank waits for no other rank now, and has reported its own faults.

        Sends one question. Blocks until every living rank has answered, at most for
        `Timeouts.last_call` from the first fault.

        Returns:
            All faults recorded until then.
        """
        question = messages.AnswerLastCall(*self._me, iteration)
        reply = self._wait(question, self._timeouts.last_call)
        return self._expect(messages.Interrupted, reply).faults

    def ready(self, iteration: int) -> Met:
        """Report that this rank is ready for the next iteration, and wait for the other ranks.

        The rank is healthy, and all its work for the ended iteration is done.

        Sends one question. Blocks until all living ranks are ready, and the replacements of lost
        ranks have joined, the latter for at most `Timeouts.replacement` after the last loss.

        Raises:
            BarrierTimeout: not all ranks came within `Timeouts.barrier`; the text names the missing
                ones. Or the store did not answer for longer than all these waits take.
        """
        question = messages.Ready(*self._me, iteration)
        # The loss of each rank may begin the wait for a replacement again.
        within = self._timeouts.barrier + self._size * self._timeouts.replacement
        reply = self._wait(question, within)
        return self._expect(messages.Gathered, reply).met

    def completed(self, iteration: int) -> None:
        """Report that this rank's function has returned; wakes the ranks in reserve.

        Sends one question, which the server answers at once.
        """
        self._ask(messages.Completed(*self._me, iteration), nudge=NUDGE)

    def wait_completed(self, iteration: int) -> Faults | None:
        """Wait, in reserve, until some rank has completed.

        Sends one question. Returns None when a rank has completed, or the faults that ended the
        iteration.
        """
        return self._wait_for_end(messages.WaitCompleted(*self._me, iteration))

    def done(self, iteration: int) -> Faults | None:
        """Wait for the other ranks at the end of the call.

        Sends one question. Blocks until all living ranks are done. A rank that is still missing
        `Timeouts.completion` after the first one has a fault (SOFT_TIMEOUT), and all ranks restart.

        Returns:
            None: all ranks are done, and `confirm` is next. Otherwise the faults that ended the
            iteration.
        """
        question = messages.RankDone(*self._me, iteration)
        return self._wait_for_end(question, self._timeouts.completion)

    def confirm(self, iteration: int) -> Faults | None:
        """Confirm that this rank knows that all ranks are done; after `done` has returned None.

        Before this call, the caller records for its launcher that no rank continues in its place.
        If the rank dies before all ranks have confirmed, the others do continue. The launcher then
        counts a failure, which costs more but loses nothing.

        Sends one question. Blocks until all living ranks have confirmed. A rank that is still
        missing `Timeouts.completion` after all were done has a fault (SOFT_TIMEOUT).

        Returns:
            None: the call is over on every rank. Otherwise the faults that ended the iteration.
        """
        question = messages.Confirm(*self._me, iteration)
        return self._wait_for_end(question, self._timeouts.completion)

    def terminated(
        self,
        iteration: int,
        kind: str,
        message: str,
        *,
        discarded: bool = False,
        lag: float = 0.0,
        replaced: bool = False,
    ) -> Faults:
        """Leave for good; the other ranks continue without this one.

        Sends one question, which the server answers at once. The exit is recorded as a fault, and
        ends the iteration if no fault has ended it yet. A rank that was discarded before it entered
        is the exception: its exit is no fault.

        Args:
            iteration: the iteration of the fault.
            kind: the name of the `Interruption`.
            message: the reason, for people; its first 1,000 characters are kept.
            discarded: the rank assignment gave this rank no place. The other ranks know this from
                their own assignment, so they do not restart for it.
            lag: seconds since the fault.
            replaced: whether the other ranks wait for another process in place of this one.

        Returns:
            The faults recorded so far, including this one; no records if there was no fault. The
            first record is the root cause, and the same for all ranks that leave in this iteration.

        Raises:
            BarrierError: the group had failed before; the other ranks do not continue either.
            CallOverError: the call is over; no other rank continues in place of this one.
        """
        text = message[: messages.TEXT]
        question = messages.LeaveGroup(*self._me, iteration, kind, text, discarded, lag, replaced)
        reply = self._ask(question, nudge=NUDGE)
        if isinstance(reply, messages.Over):
            raise CallOverError(
                f"the call of the wrapped function has ended on all ranks, so no rank can continue "
                f"in place of initial rank {self._me[1]}"
            )
        return self._expect(messages.Left, reply).faults

    def close(self) -> None:
        """Close the connection; the server counts a rank as lost if it neither left nor was done.

        Calls that block in other threads raise LinkClosedError.
        """
        self._client.close()

    def abandon(self) -> None:
        """Close the connection without waiting for the server, which may be lost."""
        self._client.close(0.0)

    # ------------------------------------------------------------------ helpers

    def _wait_for_end(self, question: messages.Asked, within: float = math.inf) -> Faults | None:
        """Wait for an event; return the faults if the iteration ends first."""
        reply = self._wait(question, within)
        if isinstance(reply, messages.Go | messages.Over):
            return None
        return self._expect(messages.Interrupted, reply).faults

    def _wait(self, question: messages.Asked, within: float = math.inf) -> messages.GroupReply:
        """Send a question that waits, until it has an answer or exceeds the server's bound."""
        deadline = time.monotonic() + within + SLACK
        while True:
            try:
                return self._ask(question, min(POLL, max(deadline - time.monotonic(), 0.0)))
            except _SilenceError as error:
                if time.monotonic() >= deadline:
                    raise BarrierTimeout(
                        f"initial rank {self._me[1]}: the store did not answer "
                        f"{type(question).__name__} within {within:g} s and {SLACK:g} s more: "
                        f"{error}"
                    ) from error

    def _ask(
        self, question: messages.Asked, seconds: float = ANSWER, nudge: float | None = None
    ) -> messages.GroupReply:
        try:
            answer = self._client.ask(messages.encode(question), seconds, nudge=nudge)
            reply: messages.GroupReply = messages.decode_reply(answer)
        except StoreClosedError as error:
            raise LinkClosedError(f"the link was closed: {error}") from error
        except StoreTimeout as error:
            silence = nudge is None and self._client.session is not None
            raise (_SilenceError if silence else LinkLostError)(str(error)) from error
        except (StoreError, msgspec.MsgspecError) as error:
            raise LinkLostError(self._unreachable(error)) from error
        if isinstance(reply, messages.GroupRefusal):
            raise _ERRORS[reply.reason](reply.text)
        return reply

    def _expect(self, kind: type[R], reply: messages.GroupReply) -> R:
        if isinstance(reply, kind):
            return reply
        raise LinkError(
            f"initial rank {self._me[1]} received an unexpected answer from the store, "
            f"{reply!r:.200}. Run the same release of regrow in all processes"
        )

    def _unreachable(self, why: object) -> str:
        group, rank, _ = self._me
        return f"initial rank {rank} cannot reach the store of its group {group!r}: {why}"


class _SilenceError(LinkLostError):
    """The server sent no answer in the given time."""


_ERRORS: Final[dict[messages.Reason, type[LinkError]]] = {
    "missing": BarrierTimeout,
    "mismatch": BarrierOverflow,
    "evicted": EvictedError,
    "unknown": LinkLostError,
    "impossible": LinkError,
}
