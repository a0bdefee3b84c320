"""`expires`: a time limit around a block of code, in the process that runs the block.

Another process (or thread) keeps the limit, and reaps this process if the block does not end in
time. This process only sends a request at the start and one at the end. So the limit also holds for
code that never returns to Python. The names are torch's. The differences are small:

- The default scope is the file and line of the caller, as torch's documentation promises. torch
  uses those of `contextlib`, the same for every caller. So in torch the end of an inner block
  releases the timer of the outer one. Only one frame is read, not the whole stack.
- It decorates functions, and works around `async with` and coroutines. Within one thread, blocks of
  one scope end in the reverse order of their start. Tasks of an event loop do not, so each
  asynchronous block gets its own scope unless one is given.
- A worker of an agent that has a timer server needs no `configure`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from regrow.utils import get_logger

if TYPE_CHECKING:
    from types import TracebackType

    from regrow.timer.api import TimerClient

__all__ = ["configure", "expires"]

logger = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
"""Environment variable with the path of the server's pipe, set by the agent; torch's name."""

_client: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the default client of `expires` in this process.

    Args:
        timer_client: the client; None: no client, as at the start of the program.
    """
    global _client
    _client = timer_client
    logger.info("timer client: %s", type(timer_client).__name__)


class expires:  # lower case, because it is called like torch's function
    """Make the timer server reap this worker if a block of code exceeds its time limit.

        with expires(after=60):
            train_step()

        @expires(after=600)
        def save(): ...

        async with expires(after=5):
            await reply()

    If a scope is entered again while it is armed, for example by recursion, its timer is armed
    again, and the inner end releases it.

    Args:
        after: seconds from the start of the block.
        scope: name of the timer in logs and reports; this worker has one timer in each scope.
            Default: the file and line of the caller, `train.py#42`. For `async with` and coroutine
            functions a suffix is added, so that tasks do not release each other's timers.
        client: receives the requests. Default: the client given to `configure`; without one, and if
            the agent has a timer server (`regrow run --timers`), a client of that server.

    Raises:
        TypeError, ValueError: `after` is not a number.
        RuntimeError: when the block starts: there is no client.
    """

    __slots__ = ("_after", "_client", "_own", "_scope", "_started")

    _started: TimerClient  # the client that received the start, and must receive the end

    def __init__(
        self, after: float, scope: str | None = None, client: TimerClient | None = None
    ) -> None:
        try:
            if math.isnan(after):
                raise ValueError(f"expires(after={after}): give a number of seconds")
        except TypeError as error:
            raise TypeError(f"expires(after={after!r}): give a number of seconds") from error
        self._after = after
        self._client = client
        self._own = scope is None  # whether an asynchronous block gets its own scope
        if scope is None:
            caller = sys._getframe(1)
            scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
        self._scope = scope

    def __enter__(self) -> None:
        self._started = _configured() if self._client is None else self._client
        try:
            self._started.acquire(self._scope, time.time() + self._after)
        except BaseException:  # for example of a signal handler, after the request was sent
            with suppress(Exception):
                self._started.release(self._scope)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._started.release(self._scope)
        except BaseException:  # for example of a signal handler, before the request was sent
            with suppress(Exception):
                self._started.release(self._scope)
            raise

    async def __aenter__(self) -> None:
        if self._own:  # no other block that is armed now has the same id
            self._scope, self._own = f"{self._scope}@{id(self):x}", False
        self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: F) -> F:
        """Return a function (or coroutine function) with this limit on every call.

        Raises:
            TypeError: `function` is a generator function, which does nothing when it is called.
        """
        import inspect

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator function: calling it takes no time. "
                "Write `with expires(...)` inside it, around the code to limit"
            )
        limited: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def limited(*args: Any, **kwargs: Any) -> Any:
                async with self._once():
                    return await function(*args, **kwargs)

        else:

            def limited(*args: Any, **kwargs: Any) -> Any:
                with self._once():
                    return function(*args, **kwargs)

        return cast("F", functools.wraps(function)(limited))

    def _once(self) -> expires:
        """Return the same limit, for one call among several that may run at once."""
        once = expires(self._after, self._scope, self._client)
        once._own = self._own
        return once


def _configured() -> TimerClient:
    """Return the client of this process."""
    if _client is None:
        path = os.environ.get(TIMER_FILE)
        if not path:
            raise RuntimeError(
                "Configure timer client before using countdown timers. Start the script with "
                "`regrow run --timers`, or call `regrow.timer.configure(...)` with the client of "
                "a timer server that you have started, in each worker"
            )
        from regrow.timer.fifo.client import FileTimerClient

        # Two threads may each create a client at once. This is harmless, because timers belong to
        # the process.
        configure(FileTimerClient(path))
        return _configured()
    return _client
