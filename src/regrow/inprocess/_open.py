"""Which link a rank uses, and by which its monitor tells the others: as the store allows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from regrow.inprocess.store import TCPStore

if TYPE_CHECKING:
    from regrow.inprocess._config import Config
    from regrow.inprocess._hard_watch import HardWatch
    from regrow.inprocess._link import Link, Timeouts
    from regrow.store import Store

_calls = itertools.count()
"""Numbers the calls of wrapped functions in this process."""


def open_link(
    store: Any, connect: Callable[[], Any], group: str, rank: int, size: int, timeouts: Timeouts
) -> Link:
    """Return this rank's link to its group.

    Args:
        store: what the wrapper's `store_factory` has made: our `TCPStore`, or any c10d store.
        connect: makes another of it, for a c10d store; called for each thread that waits in it.
        group: see `group_name`.
        rank: the initial rank.
        size: how many ranks the group has.
        timeouts: the same on all ranks.

    Raises:
        LinkLostError: the store cannot be reached.
    """
    if isinstance(store, TCPStore):
        from regrow.inprocess._service_link import ServiceLink

        return ServiceLink(store.session, group, rank, size, timeouts)
    from regrow.inprocess._c10d_link import C10dLink

    return C10dLink(cast("Callable[[], Store]", connect), group, rank, size, timeouts)


def open_monitor(store: Any, link: Link, group: str, rank: int, config: Config) -> HardWatch:
    """Return what has this rank's time-outs kept, and its end told, from outside.

    Args:
        store: as in `open_link`.
        link: this rank's.
        group: as in `open_link`.
        rank: as in `open_link`.
        config: the wrapper's.
    """
    from regrow.inprocess._deadlines import overdue_after
    from regrow.inprocess._hard_watch import HardWatch, Terms
    from regrow.inprocess._service_link import ServiceLink

    soft, hard = config.soft_timeout.total_seconds(), config.hard_timeout.total_seconds()
    terms = Terms(
        rank,
        hard,
        config.termination_grace_time.total_seconds(),
        group,
        logfile=(config.monitor_process_logfile or "").format(rank=rank),
        pidfile=(config.monitor_process_pidfile or "").format(rank=rank),
        soft=soft,
        overdue=overdue_after(soft, hard, config.progress_watchdog_interval.total_seconds()),
    )
    if not isinstance(link, ServiceLink):
        return HardWatch(terms, group.rpartition("/")[0], link)
    endpoint, token = store.whereabouts()
    known = {"process": link.process, "endpoint": endpoint, "token": token.hex()}
    return HardWatch(terms._replace(**known), endpoint)


def group_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the group of the next call of a wrapped function.

    It is the same on all ranks if they have made as many calls before, and another one for the
    processes that a launcher starts when these have ended, which may find the same store.
    """
    run = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or "run"
    attempt = environ.get("REGROW_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    step = environ.get("SLURM_STEP_ID", "")
    return f"{run[:200]}/{step}/{attempt}/{next(_calls)}"
