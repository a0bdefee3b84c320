"""Alias of `regrow.workers.api`, at the path torch has it."""

from regrow.workers.api import *  # noqa: F403
from regrow.workers.api import __all__ as __all__
