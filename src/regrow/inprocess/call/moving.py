"""`Moves`: how a rank goes on in the next round of its job, in the same process.

When a host is lost, joins or leaves, the round of the agents ends. Without `Wrapper(elastic=True)`
each agent then ends its workers, and starts others in the next round. With it, the agent sends each
of its workers the order to leave the round:

1. A thread of the rank receives the order and closes the link to the group. The follower therefore
   aborts and interrupts the function, as after a fault.
2. The rank runs `finalize` and the health check, ends the threads of the call, and marks itself as
   *parked* in the page of steps: the function does not run, and does not run again before the next
   order. So the agent may join the next round, as after the end of the worker. If `finalize` or the
   health check fails, the rank ends.
3. The agent joins. When the round is formed, it sends the order to join, with the variables of the
   round: ranks, stores, addresses, fencing token.
4. The rank makes the call again, as a process that has just come to it: in a new group in the
   store of the new round, where the ranks that stayed and those in new processes meet.

A rank that cannot reach its store any more waits up to `ORDER_S` seconds for the order to leave,
because the store's host may be the one that was lost. The order to leave also ends a connection
attempt in the next round. If several hosts leave with notice, the round lasts until the last of
them has left, and the host of the store may have left long before. So when a host gives notice, the
agents of the other hosts send the order to wait: a rank that cannot continue waits for the order to
leave for as long as the order to wait says. It then also waits if another rank does not come to a
barrier, because that rank may still be saving.

An order is one line of JSON in a pipe that the agent holds, opened as `/proc/<agent>/fd/<n>`. The
order to leave names the attempt, so that a late one has no effect on the next attempt.

Only the first call of a wrapped function in a process moves. The ranks in new processes run the
script from its start, and make its first call.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from regrow import _progress as board
from regrow.inprocess.exception import BarrierTimeout, LinkClosedError, LinkLostError
from regrow.store import LAUNCHED_SIZE_ENV, StoreError
from regrow.utils import is_a, ready, start_thread
from regrow.utils.logging import library_logger

logger = library_logger(__name__)

ORDER_S: Final = 15.0
"""Longest wait in seconds of a rank without its store for the order to leave: by default, the nodes
have noticed a silent host after 5 s."""
LEAVE: Final = "leave"
JOIN: Final = "join"
WAIT: Final = "wait"
ATTEMPT: Final = "REGROW_ATTEMPT"
_CHUNK: Final = 1 << 16
LONGEST_ORDER: Final = 1 << 20
"""The longest order, in bytes: all variables of an environment fit into it."""


class RoundLeft(BaseException):
    """This rank is parked, and goes on in the next round; the user's code does not see it."""


class Moves:
    """The orders of the agent to one rank.

    Args:
        path: the pipe with the orders.

    Raises:
        OSError: the pipe cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._orders = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.leaves = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """A descriptor that is readable from the order to leave to the order to join."""
        self._leaving = threading.Event()
        self._unread = b""
        self._waiting: deque[dict[str, Any]] = deque()
        self._over = False  # whether the agent has ended, so that no order comes any more
        self.leave_timeout = 0.0
        """Seconds for which a rank that cannot continue waits for the order to leave.

        They count from its error. The agent sets them by the order to wait; 0 without that order.
        """

    def close(self) -> None:
        """Release the descriptors."""
        for fd in (self._orders, self._end, self.leaves):
            os.close(fd)

    @property
    def leaving(self) -> bool:
        """Whether the rank has to leave its round."""
        return self._leaving.is_set()

    def listen(self, leave: Callable[[], object]) -> Callable[[], None]:
        """Call `leave` in another thread when the order comes; return a function that ends it."""
        thread = start_thread(lambda: self._listen(leave), "regrow-moves")

        def end() -> None:
            os.eventfd_write(self._end, 1)
            thread.join()
            with suppress(BlockingIOError):
                os.eventfd_read(self._end)

        return end

    def _listen(self, leave: Callable[[], object]) -> None:
        while True:
            while (order := self._next()) is not None:
                if str(order.get("attempt")) != _attempt():
                    continue
                if order.get("kind") == WAIT:
                    self.leave_timeout = order.get("seconds", 0.0)
                elif order.get("kind") == LEAVE:
                    self._leaving.set()
                    os.eventfd_write(self.leaves, 1)
                    leave()
                    return
            if self._over or self._end in ready([self._orders, self._end]):
                return

    def takes(self, error: BaseException, timeout: float) -> bool:
        """Return whether a rank that cannot continue goes on in the next round.

        Args:
            error: why it cannot continue. Without its store it waits for the order to leave.
            timeout: seconds for which it waits, at most `ORDER_S`, unless the agent has ordered it
                to wait for longer.
        """
        missing = bool(self.leave_timeout) and is_a(error, BarrierTimeout)  # a rank that saves
        if self.leaving:
            return missing or is_a(error, LinkClosedError | LinkLostError | StoreError)
        if not missing and not is_a(error, LinkLostError | StoreError):
            return False
        timeout = max(min(timeout, ORDER_S), self.leave_timeout)
        logger.warning("this rank waits %g s for the next round, because: %s", timeout, error)
        return self._leaving.wait(timeout)

    def park(self) -> None:
        """Report to the agent that this rank has left its round."""
        self.leave_timeout = 0.0
        board.set_restart_state(board.OWES_RESULT | board.MAY_STAY | board.PARKED)
        board.wake_agent()

    def join(self) -> None:
        """Wait, parked, for the order to join the next round, and take its variables.

        The wait has no time limit of its own: the guardian ends this process with the lease of the
        round that it has left.

        Raises:
            LinkLostError: the agent has ended.
        """
        begun = time.monotonic()
        while True:
            while (order := self._next()) is not None:
                if order.get("kind") == JOIN:
                    _take(order)
                    board.reopen()  # the next step is the first one of the next attempt
                    self._leaving.clear()
                    os.eventfd_read(self.leaves)
                    logger.warning(
                        "rank %s of %s goes on in the next round, %.3f s after it left its round",
                        os.environ.get("RANK"),
                        os.environ.get("WORLD_SIZE"),
                        time.monotonic() - begun,
                    )
                    return
                if order.get("kind") == LEAVE:
                    self.park()  # the next round has ended before it began
                elif str(order.get("attempt")) != _attempt():  # an order to wait in the next round
                    self.leave_timeout = order.get("seconds", 0.0)
            if self._over:
                raise LinkLostError("the agent of this rank has ended")
            ready([self._orders])

    def _next(self) -> dict[str, Any] | None:
        """Return the next order that has arrived whole; None if there is none now."""
        if not self._waiting and not self._over:
            with suppress(BlockingIOError):
                chunk = os.read(self._orders, _CHUNK)
                self._over = not chunk
                self._unread += chunk
            *lines, self._unread = self._unread.split(b"\n")
            if len(self._unread) > LONGEST_ORDER:
                logger.error("an order of more than %d bytes is ignored", LONGEST_ORDER)
                self._unread = b""
            self._waiting += filter(None, map(_parsed, lines))
        return self._waiting.popleft() if self._waiting else None


def open_moves(elastic: bool) -> Moves | None:
    """Return the orders for a call; None if its ranks cannot move.

    Args:
        elastic: see `Wrapper`; only the first call of a process moves.
    """
    path = os.environ.get(board.ORDERS_ENV)
    if not elastic or not path or not board.has_agent():
        return None
    # No process that the function starts may read the orders: some programs start others like them.
    del os.environ[board.ORDERS_ENV]
    try:
        return Moves(path)
    except OSError as error:
        logger.warning("elastic=True has no effect: the agent's orders do not arrive: %s", error)
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return an order; None if the line is none."""
    try:
        order = json.loads(line)
        env = order.get("env", {})
        valid = isinstance(order.get("seconds", 0.0), float) and all(
            isinstance(name, str) and (value is None or isinstance(value, str))
            for name, value in env.items()
        )
    except (ValueError, AttributeError, TypeError, RecursionError):
        valid = False
    if not valid:
        logger.error("not an order of the agent: %.200r", line)
        return None
    return cast("dict[str, Any]", order)


def _take(order: dict[str, Any]) -> None:
    """Set the variables of the next round; None removes a variable."""
    os.environ.pop(LAUNCHED_SIZE_ENV, None)  # WORLD_SIZE is the launcher's again
    for name, value in order.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _attempt() -> str:
    return os.environ.get(ATTEMPT, "")
