"""Alias of `regrow.workers.errors.error_handler`, at the path torch has it."""

from regrow.workers.errors.error_handler import *  # noqa: F403
from regrow.workers.errors.error_handler import __all__ as __all__
