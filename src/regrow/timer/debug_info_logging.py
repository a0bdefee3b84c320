"""torch's path `timer.debug_info_logging`: logs expired timers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regrow.utils import get_logger

__all__ = ["log_debug_info_for_expired_timers"]

logger = get_logger(__name__)


def log_debug_info_for_expired_timers(
    run_id: str, expired_timers: Mapping[int, Sequence[str]]
) -> None:
    """Log the expired timers, if there are any.

    Args:
        run_id: the job.
        expired_timers: by pid, the requests as JSON.
    """
    if expired_timers:
        logger.info("Timers expired for run:[%s] [%s].", run_id, expired_timers)
