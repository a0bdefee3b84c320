"""Alias of `regrow.workers.errors`, at the path torch has it."""

from regrow.workers.errors import *  # noqa: F403
from regrow.workers.errors import __all__ as __all__
