"""Alias of `regrow.workers.redirects`, at the path torch has it."""

from regrow.workers.redirects import *  # noqa: F403
from regrow.workers.redirects import __all__ as __all__
