"""Alias of `regrow.workers.tail_log`, at the path torch has it."""

from regrow.workers.tail_log import *  # noqa: F403
from regrow.workers.tail_log import __all__ as __all__
