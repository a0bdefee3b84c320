"""What surrounds one call of a wrapped function in its process.

Garbage. What the function leaves behind may be reachable from itself only (exceptions hold frames,
frames hold tensors), and has to go before the next call. To look through everything that a process
with torch has loaded takes a quarter of a second, none of which can be garbage. So what was there
when the call began is put aside for as long as it lasts (`gc.freeze`), unless somebody else has.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from regrow.inprocess._call import CallWrapper
from regrow.inprocess._config import Config
from regrow.inprocess._logging import own_log

_live: set[int] = set()
"""The process, while a call is live in it; a set, so that the child of a fork has none."""


def run(config: Config, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a wrapped function until all ranks are done.

    Returns:
        What it returned, or None on a rank in reserve.

    Raises:
        ValueError: torch.distributed is initialized.
        RuntimeError: another call is live in this process.
        BaseException: what ended this rank.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ValueError(
            "torch.distributed is initialized: call init_process_group in the wrapped function, "
            "since it is called anew with each restart"
        )
    with _only_one(), own_log(), _heap_put_aside(), CallWrapper(config) as wrapper:
        return wrapper(fn, args, kwargs)


@contextmanager
def _only_one() -> Iterator[None]:
    pid = os.getpid()
    if pid in _live:
        raise RuntimeError("a wrapped function is running in this process already; end it first")
    _live.add(pid)
    try:
        yield
    finally:
        _live.discard(pid)


@contextmanager
def _heap_put_aside() -> Iterator[None]:
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
