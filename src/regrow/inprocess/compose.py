"""`Compose`: chain several plug-ins into one."""

from __future__ import annotations

from collections.abc import Callable
from types import new_class
from typing import Any

from regrow.inprocess.ranks.assignment import apply

__all__ = ["Compose"]

_BY_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Compose:
    """Chain of callables: `Compose(a, b, c)(x)` is `a(b(c(x)))`, so the last one runs first.

    A `Compose` of plug-ins is an instance of their nearest common base class. It is accepted
    wherever a plug-in of that class is. Its parts may be of either generation.

    Args:
        instances: the callables, at least one.

    Raises:
        ValueError: no callable was given.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        """Create an instance of a new class: its bases are `Compose` and the parts' common base."""
        if not instances:  # copy.copy also passes none, and sets the attributes itself
            return super().__new__(cls)
        base = _common_base(instances)
        if base is object:
            return super().__new__(cls)
        made = new_class(
            f"Composed{base.__name__}",
            (cls, base),
            exec_body=lambda body: body.update(__module__=cls.__module__),
        )
        return object.__new__(made)

    def __init__(self, *instances: Callable[..., Any]) -> None:
        if not instances:
            raise ValueError("Compose() has nothing to compose: pass at least one callable")
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        """Call the parts from last to first, each with the result so far; return the result."""
        for instance in reversed(self.instances):
            args = apply(instance, args)
        return args if len(args) > 1 else next(iter(args), None)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def _common_base(instances: tuple[Callable[..., Any], ...]) -> type:
    shared = set.intersection(*(set(type(instance).__mro__) for instance in instances))
    mro = type(instances[0]).__mro__
    return next(base for base in mro if base in shared and _derivable(base))


def _derivable(base: Any) -> bool:
    """Return whether `object.__new__` can create instances of a class derived from `base`.

    This is false for the classes of functions and of chains.
    """
    plain = base.__new__ is object.__new__ and base.__flags__ & _BY_CLASS_STATEMENT
    return base is object or bool(plain)
