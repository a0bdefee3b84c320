"""`expires`: a time limit around a block of code, in the process that runs it.

The limit is kept by another process (or thread), which reaps this one if the block does not end in
time. All that happens here is a request at the begin and one at the end, so the limit holds also
for code that never comes back to Python. The names are torch's; what is different is small:

- The default scope is the file and line of the caller, which is what torch's documentation says.
  torch takes those of `contextlib`, the same for every caller, so that there the end of an inner
  block releases the timer of the outer one. One frame is looked at, not the whole stack.
- It decorates functions, and works around `async with` and coroutines. Within one thread, blocks of
  one scope end in the reverse order of their beginning. Tasks of an event loop do not, so each
  asynchronous block has a scope of its own unless it is given one.
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

    from regrow.timer._api import TimerClient

__all__ = ["configure", "expires"]

logger = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
"""Where an agent tells its workers the path of its server's pipe. The name is torch's."""

_client: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses in this process if it is given none.

    Args:
        timer_client: the client; None: none, as at the start of the program.
    """
    global _client
    _client = timer_client
    logger.info("timer client: %s", type(timer_client).__name__)


class expires:  # in lower case: it is called like torch's function
    """Have this worker reaped if a block of code takes longer than it may.

        with expires(after=60):
            train_step()

        @expires(after=600)
        def save(): ...

        async with expires(after=5):
            await reply()

    Entered again while it is armed, by recursion for instance, a scope is armed anew, and the inner
    end releases it.

    Args:
        after: seconds from the begin of the block.
        scope: what the timer is called, in logs and reports; this worker has one timer in each
            scope. Default: the file and line of the caller, `train.py#42`; for `async with` and
            coroutine functions with an addition, so that tasks do not release each other's.
        client: who is told. Default: the one given to `configure`; without one, and if the agent
            has a timer server (`regrow run --timers`), a client of that server.

    Raises:
        TypeError, ValueError: `after` is not a number.
        RuntimeError: when the block begins: there is no client.
    """

    __slots__ = ("_after", "_client", "_own", "_scope", "_told")

    _told: TimerClient  # who was told of the begin, and is to be told of the end

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
        self._own = scope is None  # whether an asynchronous block gets a scope of its own
        if scope is None:
            caller = sys._getframe(1)
            scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
        self._scope = scope

    def __enter__(self) -> None:
        self._told = _configured() if self._client is None else self._client
        try:
            self._told.acquire(self._scope, time.time() + self._after)
        except BaseException:  # of a signal handler, for instance, when it had been sent
            with suppress(Exception):
                self._told.release(self._scope)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._told.release(self._scope)
        except BaseException:  # of a signal handler, for instance, before it was sent
            with suppress(Exception):
                self._told.release(self._scope)
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
        """A function (or coroutine function) every call of which has this limit.

        Raises:
            TypeError: `function` is a generator function, which does nothing when it is called.
        """
        import inspect

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator function: calling it takes no time. "
                "Write `with expires(...)` inside of it, around what is to be limited"
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
        """The same limit, for one call among several that may run at once."""
        once = expires(self._after, self._scope, self._client)
        once._own = self._own
        return once


def _configured() -> TimerClient:
    """The client of this process."""
    if _client is None:
        path = os.environ.get(TIMER_FILE)
        if not path:
            raise RuntimeError(
                "Configure timer client before using countdown timers. Start the script with "
                "`regrow run --timers`, or call `regrow.timer.configure(...)` with the client of "
                "a timer server that you have started, in each worker"
            )
        from regrow.timer._file_client import FileTimerClient

        # Two threads at once may each make one. That does no harm: what counts is the process.
        configure(FileTimerClient(path))
        return _configured()
    return _client
