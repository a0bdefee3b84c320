"""Alias of `regrow.agent`, at the path torch has it."""

from regrow.agent import *  # noqa: F403
from regrow.agent import __all__ as __all__
