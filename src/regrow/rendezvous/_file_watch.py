"""Waiting for a change in a shared directory.

The kernel tells of changes that were made through it (inotify), which on a local file system are
all there are. Of what another host changes on a shared one it tells nothing, on any of them; there
a waiter also looks for itself, soon after it began to wait and then ever more rarely.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_PAUSE = 0.01  # seconds between two looks for what other hosts have changed
_LONGEST_PAUSE = 0.5
_GROWTH = 1.4

_IN_CREATE = 0x00000100
_IN_DELETE_SELF = 0x00000400
_IN_MOVE_SELF = 0x00000800
_IN_ONLYDIR = 0x01000000


class Watch:
    """Blocks threads until something changes in a directory; they may wait for different ones.

    Args:
        shared: whether other hosts may change things, too.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._free: list[int] = []  # to close one of these takes long: they are kept
        self._waiting = 0
        self._interrupted = False
        self._closed = False

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` or `close` was called."""
        return self._interrupted

    def wait(self, directory: str, ready: Callable[[], bool], timeout: float) -> bool:
        """Block until something holds.

        Args:
            directory: in which a new name appears whenever that may have come to hold.
            ready: looks whether it does; what it raises passes through.
            timeout: seconds.

        Returns:
            Whether it holds; False when the time was up, or after `interrupt`.
        """
        deadline = time.monotonic() + timeout
        if ready():
            return True
        with self._lock:
            if self._interrupted:
                return False
            self._waiting += 1
            told = self._free.pop() if self._free else -1
        try:
            if told < 0:
                told = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            return self._wait(told, directory, ready, deadline)
        finally:
            with self._lock:
                self._waiting -= 1
                if told >= 0:
                    self._free.append(told)
                self._close_what_is_free()

    def _wait(self, told: int, directory: str, ready: Callable[[], bool], deadline: float) -> bool:
        watch = -1
        poll = select.poll()
        poll.register(self._interrupt, select.POLLIN)
        if told >= 0:
            watch = self._add(told, directory)
            poll.register(told, select.POLLIN)
        # Without a watch (a user may have 128 of these files) it looks, as for other hosts.
        looks = self.shared or watch < 0
        pause = _FIRST_PAUSE
        try:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0 or self._interrupted:
                    return False
                spread = pause * random.uniform(0.75, 1.25)
                poll.poll((min(left, spread) if looks else min(left, 86400.0)) * 1000)
                pause = min(pause * _GROWTH, _LONGEST_PAUSE)
                if told >= 0:
                    _drain(told)
            return True
        finally:
            if watch >= 0:
                self._libc.inotify_rm_watch(told, watch)
                _drain(told)

    def _add(self, told: int, directory: str) -> int:
        mask = _IN_CREATE | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR
        watch: int = self._libc.inotify_add_watch(told, os.fsencode(directory), mask)
        if watch < 0 and (code := ctypes.get_errno()) not in (errno.ENOSPC, errno.ENOMEM):
            raise OSError(code, os.strerror(code), directory)
        return watch

    def interrupt(self) -> None:
        """End every `wait`, now and later."""
        with self._lock:
            if not self._interrupted:
                self._interrupted = True
                os.eventfd_write(self._interrupt, 1)

    def close(self) -> None:
        """Interrupt, and give back all files, those in use as soon as their waits have ended."""
        self.interrupt()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_what_is_free()

    def _close_what_is_free(self) -> None:
        if not self._closed:
            return
        while self._free:
            os.close(self._free.pop())
        if not self._waiting and self._interrupt >= 0:
            os.close(self._interrupt)
            self._interrupt = -1


def _drain(told: int) -> None:
    try:
        while os.read(told, 65536):
            pass
    except BlockingIOError:
        pass
