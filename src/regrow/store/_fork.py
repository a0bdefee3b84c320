"""What a forked child lets go of: descriptors by which others tell whether its parent lives."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that only the process that made it may use."""

    def disown(self) -> None:
        """Called in a forked child: give the descriptors back without a word to anybody."""


def disown_in_children(thing: Inherited) -> None:
    """Have a forked child disown `thing`, if it is still there then."""
    _inherited.add(thing)


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def _after_fork() -> None:
    for thing in list(_inherited):
        thing.disown()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork)
