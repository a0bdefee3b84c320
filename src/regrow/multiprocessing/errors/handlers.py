"""Alias of `regrow.workers.errors.handlers`, at the path torch has it."""

from regrow.workers.errors.handlers import *  # noqa: F403
from regrow.workers.errors.handlers import __all__ as __all__
