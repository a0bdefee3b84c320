"""Daemon threads, which never delay the end of the user's program."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

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
