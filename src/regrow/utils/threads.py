"""Daemon threads, which never delay the end of the user's program."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread and return it.

    Raises:
        RuntimeError: no thread can be started.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def call_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread; return the future of its result or exception.

    Python cannot end a thread. So a function continues to run after its caller has stopped waiting.
    """
    from concurrent.futures import Future

    called: Future[T] = Future()

    def run() -> None:
        try:
            called.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            called.set_exception(error)

    start_thread(run, name)
    return called


class BackgroundWriter(Generic[T]):
    """A queue with a writing thread; `add` never blocks, and the first item starts the thread.

    Some outputs block the thread that writes to them: a stopped terminal (Ctrl-S), a pipe without a
    reader, a file system that hangs. A check before each write does not help. Other processes write
    to the same output, and a non-blocking mode would apply to all these processes.

    Args:
        write: called in the thread with the waiting items and the number of items lost after them;
            must not raise.
        name: name of the thread.
        most: number of items that may wait; further items are dropped and counted.
    """

    def __init__(self, write: Callable[[list[T], int], None], name: str, most: int = 256) -> None:
        self._write = write
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._items: list[T] = []
        self._lost = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, item: T) -> None:
        """Queue an item for writing."""
        with self._changed:
            if len(self._items) == self._most:
                self._lost += 1
                return
            self._items.append(item)
            self._changed.notify()
            if self._thread is None:
                self._thread = start_thread(self._run, self._name)

    def close(self, seconds: float) -> bool:
        """Write the remaining items, for at most `seconds`; return whether all are written."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                items, self._items = self._items, []
                lost, self._lost = self._lost, 0
                if not items:
                    self._thread = None  # an item that comes after `close` starts another
                    return
            self._write(items, lost)
