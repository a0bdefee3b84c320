"""Seconds that a job lost by its restarts.

A restart loses the time from the failure to the begin of the next step. If the next failure comes
earlier, the loss ends there, so no second counts twice. Steps that were made again are lost in
addition. If a host lost the rendezvous and found no other host, the loss ends with its agent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from regrow.events.story_types import Failure, InProcessRestart, Losses, PlannedRestart

Restart = Failure | PlannedRestart


def losses(
    restarts: Iterable[Restart],
    in_place: Sequence[InProcessRestart],
    *,
    reports_steps: bool,
    redone_s: float | None = None,
    ends_s: float | None = None,
) -> Losses | None:
    """Return the seconds lost by restarts; None if there was none, or their times are unknown.

    Args:
        restarts: failures and restarts without a failure.
        in_place: the in-process restarts.
        reports_steps: whether the script reports its steps.
        redone_s: seconds in which steps were done again, also after in-process restarts; None if
            that is not recorded. Then the pace of the stopped attempts tells, for the restarts of
            all workers.
        ends_s: when a job that failed ended. Its last failure lost the time until then.
    """
    known = [
        (each.at_s - _silent(each), _silent(each) + length, each)
        for each in restarts
        if each.at_s is not None and (length := _length(each, ends_s)) is not None
    ]
    timed = sorted(known, key=lambda restart: restart[0])
    in_process = sum(each.phases[-1][1] for each in in_place if each.phases)
    if not any(_went_on(each) for _, _, each in timed) and not in_process:
        return None
    detecting, pausing = sum(each.silent_s for each in in_place), 0.0
    stopping = searching = 0.0
    starting = sum(each.loading_s or 0.0 for each in in_place)
    for (at, length, each), after in zip_longest(timed, timed[1:]):
        end = after[0] if after is not None else None
        left = length if end is None else min(length, end - at)
        detected = each.detected_after_s if isinstance(each, Failure) else None
        detecting += (first := min(_silent(each) + (detected or 0.0), left))
        pausing += (pause := min(each.backoff_s or 0.0, left - first))
        rest = left - first - pause
        if isinstance(each, Failure) and each.searched_s is not None:
            searching += rest
        elif each.restarted_attempt is None:
            stopping += rest
        else:
            # A host that is cut off may end its workers when the others have started again.
            ended = min(each.stopped_after_s or 0.0, each.restarted_after_s or math.inf)
            stopped = ended - (detected or 0.0)
            stopping += (stop := min(max(stopped, 0.0), rest))
            starting += rest - stop
    known_steps = reports_steps or not timed
    redoing = None
    if known_steps:
        redoing = sum(each.work_lost_s or 0.0 for _, _, each in timed)
        redoing = redoing if redone_s is None else redone_s
    total = detecting + pausing + stopping + starting + (redoing or 0.0) + in_process + searching
    return Losses(
        total_s=total,
        detecting_s=detecting,
        pausing_s=pausing,
        stopping_s=stopping,
        starting_s=starting,
        redoing_s=redoing,
        in_process_s=in_process,
        searching_s=searching,
    )


def _went_on(restart: Restart) -> bool:
    """Return whether a restart followed, or a search for the other hosts."""
    searched = isinstance(restart, Failure) and restart.searched_s is not None
    return restart.restarted_attempt is not None or searched


def _silent(restart: Restart) -> float:
    return restart.silent_s if isinstance(restart, Failure) else 0.0


def _length(restart: Restart, ends_s: float | None) -> float | None:
    """Return the seconds until training continued, or until the workers ran; None if unknown.

    If the agent searched for the other hosts and found none, or if the job failed: the seconds
    until it ended.
    """
    if restart.restarted_attempt is None and ends_s is not None and restart.at_s is not None:
        return max(ends_s - restart.at_s, 0.0)
    if isinstance(restart, Failure) and restart.searched_s is not None:
        return restart.searched_s
    return restart.restarted_after_s if restart.startup_s is None else restart.startup_s
