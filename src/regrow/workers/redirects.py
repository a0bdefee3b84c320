"""Redirection of this process's stdout or stderr to a file, including output of C libraries."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect a stream with its descriptor, so that the output of C code is redirected as well.

    Args:
        std: `stdout` or `stderr`.
        to_file: path of the file, in an existing directory; old content is overwritten.

    Raises:
        ValueError: `std` is neither.
        OSError: the file cannot be opened.
    """
    if std not in ("stdout", "stderr"):
        raise ValueError(f"unknown standard stream <{std}>, must be one of stdout, stderr")
    stream = getattr(sys, std)
    number: int = stream.fileno()
    with open(to_file, "w+b") as file:
        original = os.dup(number)
        try:
            _point(std, number, file.fileno())
            try:
                yield
            finally:
                _point(std, number, original)
        finally:
            os.close(original)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _point(std: str, number: int, target: int) -> None:
    """Flush a stream's buffer, and then point its descriptor to another file."""
    getattr(sys, std).flush()
    ctypes.CDLL(None).fflush(None)
    os.dup2(target, number)
