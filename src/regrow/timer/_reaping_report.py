"""What a server that is nobody's in particular says of workers that it is about to reap.

An agent has better: it knows which ranks they are, and where their logs are.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence

from regrow.timer._capture import Target, capture
from regrow.timer._frames import where
from regrow.timer._reaping import Reaping
from regrow.utils import get_logger

logger = get_logger(__name__)


def report(reapings: Sequence[Reaping], now: float) -> None:
    """Ask the workers for their stacks, all at the same time, and log them.

    Args:
        now: the time, in seconds on the monotonic clock.
    """
    targets = [
        Target(each.pid, each.pidfd, doomed=each.signal == signals.SIGKILL)
        for each in reapings
        if each.pidfd >= 0
    ]
    dumps = capture(targets)
    for each in reapings:
        dump = dumps.get(each.pid)
        logger.warning(
            "timers of worker %d have expired, %s, the first of them %.3f s ago; it is %s, and"
            " %s\n%s",
            each.pid,
            each.scopes,
            now - each.deadline,
            where(dump) if dump else "not to be asked where",
            f"gets signal {each.signal}" if each.signal > 0 else "goes on, as they ask",
            dump.text if dump else "",
        )
