"""Safe text for values of the user's classes.

`__repr__` and `__str__` of the user's classes can raise, or return a value that is no text. For
example, a tensor shows its values, which fails after a CUDA error. The functions here never raise,
so the report of a failure is always sent. Their results can be encoded as UTF-8.

A user's class can also define `__cause__`, `__context__` or `__traceback__` itself: as a property
that raises, or as a value that is no exception. `get_cause`, `get_context` and `get_traceback` read
the interpreter's own values instead, and never raise. `isinstance` reads `__class__`, which can
raise as well; `is_a` does not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType, UnionType
from typing import Any

MOST = 64 << 10
"""Most characters of a text; a longer text is cut."""
LINKS = 16
"""Most exceptions of a chain that `describe` shows."""


def repr_of(value: object) -> str:
    """Return `repr(value)`; if that raises, a placeholder with the type of the value."""
    return _shown(repr, value)


def str_of(value: object) -> str:
    """Return `str(value)`; if that raises, a placeholder with the type of the value."""
    return _shown(str, value)


def headline(error: BaseException) -> str:
    """Return an exception as in the last line of its traceback: `ValueError: x`."""
    return f"{_type_of(error)}: {str_of(error)}"


def describe(error: BaseException) -> str:
    """Return an exception in one line with its causes: `KeyError(3) <- ValueError('x')`."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < LINKS and not any(link is seen for seen in chain):
        chain.append(link)
        link = get_cause(link)
    return " <- ".join(map(repr_of, chain))[:MOST]


def place_of(error: BaseException) -> str:
    """Return the last line of the user's code that an exception has passed: ` (train.py:12)`.

    Files of installed packages, of Python and of regrow are not the user's. Empty if there is none.
    """
    place, link = "", get_traceback(error)
    while link is not None:
        file = link.tb_frame.f_code.co_filename
        if not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS):
            place = f" ({file.rpartition('/')[2]}:{link.tb_lineno})"
        link = link.tb_next
    return place


_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3.", "/regrow/inprocess/")


def _shown(show: Callable[[object], str], value: object) -> str:
    try:
        text = show(value)
        # A subclass of str can override its methods. A lone surrogate has no UTF-8 form.
        return str.encode(text, "utf-8", "backslashreplace").decode()[:MOST]
    except BaseException as raised:  # noqa: BLE001 - also SystemExit: it asks for a text only
        return f"<{_type_of(value)}: {show.__name__}() raises {_type_of(raised)}>"


def _type_of(value: object) -> str:
    return type.__dict__["__name__"].__get__(type(value))  # type: ignore[no-any-return]


_cause: Any = BaseException.__dict__["__cause__"]
_context: Any = BaseException.__dict__["__context__"]
_traceback: Any = BaseException.__dict__["__traceback__"]


def is_a(value: object, kinds: type | UnionType) -> bool:
    """Return whether the type of a value is one of these classes, or derives from one."""
    return issubclass(type(value), kinds)


def get_cause(error: BaseException) -> BaseException | None:
    """Return the cause of an exception (`raise ... from`)."""
    return _cause.__get__(error)  # type: ignore[no-any-return]


def get_context(error: BaseException) -> BaseException | None:
    """Return the exception that was being handled when this one was raised."""
    return _context.__get__(error)  # type: ignore[no-any-return]


def get_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception."""
    return _traceback.__get__(error)  # type: ignore[no-any-return]
