"""Reports of worker failures to the agent: `record`, error files, `ProcessFailure`, the report.

A worker and its agent are two processes, so an exception travels between them in a file. The agent
passes the path in `TORCHELASTIC_ERROR_FILE`. The decorator `record` writes the file,
`ProcessFailure` reads it, and `ChildFailedError` shows the first failure.
"""

from regrow.workers.errors.error_handler import ErrorHandler
from regrow.workers.errors.failures import ChildFailedError, ProcessFailure
from regrow.workers.errors.handlers import Recording, get_error_handler, record, record_error

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
