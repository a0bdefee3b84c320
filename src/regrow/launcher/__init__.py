"""Alias of `regrow.launch`, at the path torch has it."""

from regrow.launch import *  # noqa: F403
from regrow.launch import __all__ as __all__
