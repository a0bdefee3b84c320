"""A restart as it is told: a line of the log on each rank, and one event of the job."""

from __future__ import annotations

import logging
from typing import Final

from regrow import _progress as board
from regrow.inprocess._restart import Timeline
from regrow.inprocess.state import State
from regrow.utils import get_logger

SHOWN: Final = 16
"""How many lost ranks an event names."""
TEXT: Final = 300
"""How many characters of a fault's message an event has."""

logger = get_logger(__name__)


def tell(timeline: Timeline, state: State) -> None:
    """Tell of a restart that is through; the new rank 0 tells the agent.

    Args:
        timeline: of the restart, with all its phases.
        state: this rank's in the iteration that begins.
    """
    root = timeline.root
    seconds = {phase: round(s, 6) for phase, s in timeline.seconds().items()}
    logger.log(
        logging.WARNING if state.rank == 0 else logging.INFO,  # one line a restart
        "rank %s of %d restarts the function (iteration %d) after %s; ms from the fault: %s",
        state.rank,
        state.world_size,
        state.iteration,
        "an unknown fault"
        if root is None
        else f"{root.kind} on initial rank {root.rank}: {root.message}",
        ", ".join(f"{phase} {1000 * s:.1f}" for phase, s in seconds.items()),
    )
    if state.rank == 0:
        board.tell(
            "regrow.inprocess.restarted",
            iteration=state.iteration,
            world_size=state.world_size,
            active_world_size=state.active_world_size,
            kind=root.kind if root else None,
            rank=root.rank if root else None,
            message=root.message[:TEXT] if root else "",
            lost=list(timeline.lost[:SHOWN]),
            lost_count=len(timeline.lost),
            faults=len(timeline.faults.records),
            seconds=seconds,
        )
