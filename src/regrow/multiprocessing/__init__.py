"""Alias of `regrow.workers`, at the path torch has it."""

from regrow.workers import *  # noqa: F403
from regrow.workers import __all__ as __all__
