"""The error handler that `record` uses where it is given none."""

from regrow.workers.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """A new `ErrorHandler`."""
    return ErrorHandler()
