"""Environment look-up, and the one macro of a worker's command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .distributed import get_socket_with_port

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Return the value of the environment variable `env_name`.

    Raises:
        ValueError: the variable is not set.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


class macros:
    """The placeholder that the launcher replaces for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """Replace `${local_rank}` (or `$local_rank`) in every string of `args`.

        `$$` becomes `$`. Any other `$` and any value that is not a string stay unchanged.
        """
        args = list(args)
        if not any(isinstance(arg, str) and "$" in arg for arg in args):
            return args
        from string import Template

        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
