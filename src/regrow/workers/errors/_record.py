"""The decorator `record`."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, overload

from regrow.workers.errors._child_failed import ChildFailedError
from regrow.workers.errors.handlers import get_error_handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.workers.errors.error_handler import ErrorHandler

P = ParamSpec("P")
R = TypeVar("R")


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
    """Leave uncaught exceptions of a function in the error file; for a worker's main function.

    An `Exception` is recorded and raised on. A `ChildFailedError` hands on the error file of the
    child that failed first. `sys.exit()` and `sys.exit(0)` return None; any other exit is raised
    on and leaves no file, and so does Ctrl-C.

    Args:
        fn: the function. Without it the result is a decorator: `@record(error_handler=...)`.
        error_handler: what records; None is `get_error_handler()`.

    Returns:
        The function wrapped, or the decorator.
    """
    handler = error_handler if error_handler is not None else get_error_handler()

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            handler.initialize()
            try:
                return function(*args, **kwargs)
            except SystemExit as exit:
                if exit.code in (None, 0):
                    return None
                raise
            except ChildFailedError as error:
                _, failure = error.get_first_failure()
                if failure.has_error_file:
                    handler.dump_error_file(failure.error_file, failure.exitcode)
                raise
            except Exception as error:
                handler.record_exception(error)
                raise

        return recorded

    return decorate if fn is None else decorate(fn)
