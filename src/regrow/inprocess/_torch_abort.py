"""Aborting torch's process groups: who waits in a collective fails, and new groups can be made.

Called from another thread than the one that runs the wrapped function, which may be waiting in any
of the groups; so all of them end, also those that the user made, and those that are being made.

What wakes whom:

- gloo: the connections of the groups are shut down (`_torch_sockets`). All collectives, sends,
  receives and `Work.wait` fail within milliseconds.
- NCCL: torch aborts the communicators, all within one `ncclGroupStart`: one after the other they
  may wait for each other for ever. Then the groups are destroyed.
- who makes a group is not in it yet, and may begin with that only after the abort; so it is woken
  as long as the function is interrupted (`_torch_waits`).

What is not woken, because neither torch nor gloo has a way to do it: `recv` without a source on
gloo; a wait in a FileStore, or in a TCPStore that is to live on, and so `init_process_group` and
`new_group` over them while other ranks have not come yet; gloo over ibverbs or libuv, MPI, UCC.
Such a wait ends at its own time-out, or the process at the hard time-out. A group whose store is a
`regrow.store.torch.TorchStore` waits in Python code, which an interrupt reaches.

The thread that is interrupted may be at any point of making a group, so torch's tables may be half
filled. The names of groups are counted in them, and ranks with different counts never meet again;
so an abort empties them in any case, and another one is due when the function is over.

NCCL's watchdog ends the process when a collective is overdue. The time-out of a group should
therefore be longer than the hard time-out, and `warn_of_short_timeouts` says so where it is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final

from regrow.inprocess._torch_sockets import end_gloo_connections
from regrow.utils import get_logger

logger = get_logger(__name__)

WATCHED: Final = {"nccl"}
"""Backends with a watchdog that ends the process; what gloo does is raise an exception."""


def abort_process_groups() -> None:
    """Abort and destroy all process groups of this process; does nothing where there are none.

    What torch raises on the way is logged: the groups count as gone.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    try:
        end_gloo_connections()
    except OSError as error:
        logger.warning(
            "who waits in a gloo collective is not woken: this process cannot look at itself: %s",
            error,
        )
    world = c10d._world
    if c10d.GroupMember.WORLD not in world.pg_map:  # the default group is being made
        c10d._update_default_pg(next(iter(world.pg_map), None))
    if c10d.GroupMember.WORLD is not None:
        try:
            _abort(c10d)
        except Exception:
            logger.exception("torch's process groups were not aborted as they should be")
            with suppress(Exception):
                distributed.destroy_process_group()
    world.group_count = 0


def process_groups() -> list[object]:
    """Return the process groups of this process, as torch's table has them."""
    from torch import distributed

    if not distributed.is_available():
        return []
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)


def warn_of_short_timeouts(limit: timedelta) -> None:
    """Log a warning if a watchdog of torch's may end this process before `limit` has passed.

    The same is said once in a process.

    Args:
        limit: the hard time-out.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return
    from torch.distributed import distributed_c10d as c10d

    _warn(c10d, limit)


def _warn(c10d: Any, limit: timedelta) -> None:
    for group in list(c10d._world.pg_names):
        for backend in _backends(group):
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if backend.name() in WATCHED and timeout is not None and timeout < limit:
                _warn_once(backend.name(), timeout, limit)


@cache
def _warn_once(backend: str, timeout: timedelta, limit: timedelta) -> None:
    logger.warning(
        "a process group of %s has a time-out of %s s, which is shorter than hard_timeout, %s s: it"
        " may end the process before the wrapper can restart it; give init_process_group and"
        " new_group a longer timeout",
        backend,
        timeout.total_seconds(),
        limit.total_seconds(),
    )


def _abort(c10d: Any) -> None:
    """Abort all groups and empty torch's tables."""
    if hasattr(c10d, "_abort_process_group"):  # since torch 2.5
        c10d._abort_process_group()
        return
    aborts = [
        abort
        for group in list(c10d._world.pg_names)
        for backend in _backends(group)
        if (abort := getattr(backend, "abort", getattr(backend, "_abort", None))) is not None
    ]
    _at_once(aborts)
    c10d.destroy_process_group()


def _backends(group: Any) -> Iterator[Any]:
    """The backends of a group; one that serves several kinds of devices once."""
    seen: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if not any(backend is other for other in seen):
            seen.append(backend)
            yield backend


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Make calls that may wait for each other."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
