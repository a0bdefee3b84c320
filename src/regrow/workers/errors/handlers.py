"""The decorator `record`, and its default error handler."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast, overload

from regrow.utils import describe, is_a
from regrow.workers.errors.error_handler import ErrorHandler, print_problem
from regrow.workers.errors.failures import ChildFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["get_error_handler"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


def get_error_handler() -> ErrorHandler:
    """Return a new `ErrorHandler`."""
    return ErrorHandler()


@overload
def record(
    fn: Callable[P, R], error_handler: ErrorHandler | None = None
) -> Callable[P, R | None]: ...
@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def record(
    fn: Callable[P, R] | None = None, error_handler: ErrorHandler | None = None
) -> Callable[P, R | None] | Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Write uncaught exceptions of a function to the error file; for a worker's main function.

    An exception is recorded and raised again, also one that is no `Exception` (the `RestartAbort`
    of `regrow.inprocess`). A `ChildFailedError` passes on the error file of the child that failed
    first. `sys.exit()` and `sys.exit(0)` return None. Any other exit and Ctrl-C are raised again
    and leave no file.

    Args:
        fn: the function. Without it the result is a decorator: `@record(error_handler=...)`.
        error_handler: records the exceptions; None is `get_error_handler()`.

    Returns:
        The wrapped function, or the decorator.
    """
    handler = error_handler if error_handler is not None else get_error_handler()

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                with Recording(handler):
                    return function(*args, **kwargs)
            except SystemExit as exit:
                if exit.code in (None, 0):
                    return None
                raise

        return recorded

    return decorate if fn is None else decorate(fn)


class Recording:
    """Context in which an exception is recorded as by `record`; it leaves the context in any case.

    Args:
        handler: records the exceptions.
    """

    def __init__(self, handler: ErrorHandler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._handler.initialize()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            record_error(self._handler, error)


def record_error(handler: ErrorHandler, error: BaseException) -> None:
    """Write an exception that ends a worker to the error file; exits and Ctrl-C leave no file."""
    if is_a(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return
    if is_a(error, ChildFailedError):
        _, failure = cast("ChildFailedError", error).get_first_failure()
        if failure.has_error_file:
            _try(handler.dump_error_file, failure.error_file, failure.exitcode)
    else:
        _try(handler.record_exception, error)


def _try(write: Callable[Q, object], *args: Q.args, **kwargs: Q.kwargs) -> None:
    """Call a method of an error handler; an exception in it must not hide the failure."""
    try:
        write(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the failure itself is about to be raised
        print_problem(f"the error handler raised {describe(error)}: the error file may be missing")
