"""How a worker's failure reaches its agent: `record`, error files, `ProcessFailure`, the report.

A worker and its agent are two processes, so an exception travels between them as a file: the
agent names it in `TORCHELASTIC_ERROR_FILE`, the decorator `record` writes it, `ProcessFailure`
reads it, and `ChildFailedError` shows what failed first.
"""

from regrow.workers.errors._child_failed import ChildFailedError
from regrow.workers.errors._failure import ProcessFailure
from regrow.workers.errors._record import record
from regrow.workers.errors.error_handler import ErrorHandler
from regrow.workers.errors.handlers import get_error_handler

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
