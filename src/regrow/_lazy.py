"""Names of a package that are loaded when they are first used.

A package's `__getattr__` is made of the table of such names, so that what a program does not use
costs it no import:

    __getattr__ = lazily(globals(), {"Server": "_server"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Here, and so in the main thread, before any thread of regrow's own imports anything: CPython 3.11
# breaks its import system where two threads are the first to import importlib at the same time.
from importlib import import_module


def lazily(package: dict[str, object], modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's `__getattr__` (PEP 562).

    Args:
        package: the package's `globals()`, where a name is kept once it is loaded.
        modules: for each name the module of the package that has it.
    """

    def __getattr__(name: str) -> object:
        where = package["__name__"]
        if name not in modules:
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        package[name] = getattr(import_module(f"{where}.{modules[name]}"), name)
        return package[name]

    return __getattr__
