"""How a rank's part in a call ends: by its own word to the others, and by a plug-in's."""

from __future__ import annotations

import time

from regrow import _progress as board
from regrow.inprocess._assignment import RankDiscarded
from regrow.inprocess._generations import call
from regrow.inprocess._link import CountedOutError, Link, LinkError, LinkLostError
from regrow.inprocess._logging import describe
from regrow.inprocess._restart import root_cause
from regrow.inprocess.attribution import Interruption
from regrow.inprocess.completion import Completion
from regrow.inprocess.state import State
from regrow.inprocess.terminate import Terminate
from regrow.utils import get_logger

logger = get_logger(__name__)


def leave(link: Link, state: State, iteration: int, error: BaseException) -> bool:
    """Tell the others that this rank is out, and why; the root cause is noted on the error.

    Args:
        link: this rank's.
        state: this rank's.
        iteration: as the link counts.
        error: why.

    Returns:
        Whether the others go on without it. Then its agent may know it, too.
    """
    left_at = time.monotonic()
    logger.error("rank %s leaves in iteration %d: %s", state.rank, iteration, describe(error))
    if isinstance(error, LinkLostError):  # there is nobody to tell
        return False
    if not isinstance(error, CountedOutError):  # of which the others know
        try:
            faults = link.terminated(
                iteration,
                Interruption.BASE_EXCEPTION.name,
                describe(error),
                discarded=isinstance(error, RankDiscarded),
                lag=time.monotonic() - left_at,
            )
        except LinkError as gone:
            logger.warning("the others cannot be told: %s", gone)
            return False
        root = root_cause(faults)
        if root is not None and root.rank != state.initial_rank:
            error.add_note(
                f"iteration {faults.iteration} ended by {root.kind} on initial rank "
                f"{root.rank}: {root.message}"
            )
    board.stand(board.LEFT_RESTARTER)
    return True


def complete(plugin: Completion | None, state: State) -> None:
    """Call `completion`, if there is one; what it raises is logged: the work is done."""
    if plugin is None:
        return
    try:
        call(plugin, state.freeze())
    except Exception:
        logger.exception("completion failed on rank %s", state.rank)


def terminate(plugin: Terminate | None, state: State, error: BaseException) -> None:
    """Call `terminate`, if there is one, for a rank that `error` has ended.

    Raises:
        Exception: what the plug-in raised, with `error` for its cause.
    """
    if plugin is None:
        return
    try:
        call(plugin, state.freeze())
    except Exception as failed:
        logger.error("terminate failed on rank %s: %s", state.rank, describe(failed))
        raise failed from error
