"""Alias of `regrow.workers.subprocess_handler`, at the path torch has it."""

from regrow.workers.subprocess_handler import *  # noqa: F403
from regrow.workers.subprocess_handler import __all__ as __all__
