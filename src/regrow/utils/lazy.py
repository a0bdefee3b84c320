"""Package attributes that are imported at their first use.

A package builds its `__getattr__` and `__dir__` (PEP 562) from a table of such names. So a program
pays only for the imports that it uses:

    __getattr__, __dir__ = lazily(globals(), {"_server": "Server Session", "_tls": "Tls"})
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

# The import is here, so the main thread runs it before any thread of regrow imports a module.
# CPython 3.11 breaks its import system if two threads are the first to import importlib at the same
# time.
from importlib import import_module


def lazily(
    package: dict[str, object], modules: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package, or of a module in a package.

    Args:
        package: the package's `globals()`, which keeps each name after its first use.
        modules: for each module of the package, the names that it defines, separated by blanks.
        submodules: modules that are attributes of the package without an explicit import.
    """
    where = package["__package__"]
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name in module_of:
            package[name] = getattr(import_module(f"{where}.{module_of[name]}"), name)
            return package[name]
        if name in submodules:
            return import_module(f"{where}.{name}")
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*package, *module_of, *submodules})

    return __getattr__, __dir__
