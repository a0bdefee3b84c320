"""`Wrapper`: the decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, ParamSpec, TypeVar

from regrow.inprocess._call import CallWrapper
from regrow.inprocess._config import Config
from regrow.inprocess._run import run
from regrow.inprocess.param_utils import count_type_in_params

P = ParamSpec("P")
T = TypeVar("T")


class Wrapper:
    """Has a function run on all ranks until they complete it together, in the same processes.

    When a rank fails, the function ends on all of them, and is called again on those that are left
    and healthy: `Wrapper(...)(fn)` is the function with that.

    Its arguments are keywords, those of nvidia-resiliency-ext's Wrapper, and so are their defaults;
    `regrow.inprocess._config.Config` has a sentence on each.

    Raises:
        TypeError: an argument is of the wrong type, or there is none of that name.
        ValueError: two of them contradict each other; says which inequality is broken.
    """

    def __init__(self, **arguments: Any) -> None:
        for name in arguments:
            if name not in _ARGUMENTS:
                raise TypeError(_unknown(name))
        self.config = Config(**arguments)

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]:
        """Return the function with restarts, which returns None on a rank in reserve.

        Raises:
            TypeError: more than one of its parameters is for the `CallWrapper`.
        """
        if not self.config.enabled:
            return fn
        if count_type_in_params(fn, CallWrapper) > 1:
            raise TypeError(
                f"{fn!r} has more than one parameter for the CallWrapper: leave one, it is the same"
            )

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
            result: T | None = run(self.config, fn, args, kwargs)
            return result

        return wrapped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"


_ARGUMENTS: Final = tuple(field.name for field in fields(Config))


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, _ARGUMENTS, n=1)
    meant = f"; did you mean {close[0]!r}" if close else ""
    return f"Wrapper() has no argument {name!r}{meant}. It takes {', '.join(_ARGUMENTS)}"


Wrapper.__signature__ = inspect.signature(Config)  # type: ignore[attr-defined]
