"""Release of inherited descriptors in a forked child.

Other processes detect the end of the parent by these descriptors, so a child must not hold them.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """An object that only the process that created it may use."""

    def after_fork(self) -> None:
        """Close the descriptors in a forked child, without a message to any process."""


def call_after_fork(thing: Inherited) -> None:
    """Make each forked child call `after_fork` of `thing`, if it still exists at the fork."""
    _inherited.add(thing)


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def _after_fork() -> None:
    for thing in list(_inherited):
        thing.after_fork()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork)
