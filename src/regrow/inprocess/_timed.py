"""A function that may take so long and no longer.

Python cannot end a thread, so a function that is late is left behind in one that does not hold up
the end of the process. What it raises in time is raised in the caller: a check that failed must not
look like one that passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from .exception import TimeoutError

__all__ = ["run_timed"]


def run_timed(function: Callable[[], object], timeout: timedelta, name: str) -> None:
    """Run `function` in a thread of its own called `name`, and return when it is through.

    Raises:
        TimeoutError: it was not through after `timeout`; it runs on.
        BaseException: what the function raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{name} was not through after {timeout.total_seconds():g} s")
    if raised:
        raise raised[0]
