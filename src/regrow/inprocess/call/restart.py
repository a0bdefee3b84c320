"""Rules of a restart: what follows the end of the function, its pause, cause, times and report.

**Fault or consequence.** The time at which the function ends decides. An exception before this rank
received a fault is a fault of this rank, and the rank reports it. Several ranks may fail at once.
Later exceptions are consequences: collectives fail because other ranks have left them, and no rank
aborts before all ranks have received the fault. A consequence is neither counted nor reported.

A rank whose peer died sees a connection error before the death is reported. So among the faults of
the last call, the root cause is a process that ended. If that process had failed before it ended,
its first fault is the root cause.

**Pauses.** A restart takes milliseconds. A function that raises at once would restart without end,
as fast as the store can distribute the faults. No user could read the log. No outside fault (a full
disk, a file that does not exist yet) would have time to pass. So `FREE` restarts in `WINDOW` do not
wait. Each further restart waits twice as long as the one before, up to `LONGEST`.

The times of the faults come from the store's clock. So all ranks compute the same pause without
communication.

**Cause.** A `RestartAbort` is raised from the fault that ended the last iteration. The rank at
fault keeps its exception over the restart; the other ranks know its text. An exception holds the
frames of the function. The objects of these frames must be freed before the next call, so the
frames are cleared. An exception that holds more than plain values (a tensor, a trainer) is not
kept.

**Frames.** A call keeps no object of the wrapper alive, even if the user keeps an exception. The
traceback of an exception holds the frames that it passed through. Each frame holds its caller, and
its local variables hold links, stores and plug-ins. Frames that have ended can be cleared; the
traceback prints as before. Frames of the user's code are not cleared, because a debugger may
inspect them.

**Heap.** Objects that the function leaves may form cycles (exceptions hold frames, frames hold
tensors). They must be freed before the next call. A collection over all objects of a process with
torch takes a quarter of a second. None of torch's own objects can be garbage. So `gc.freeze`
excludes the objects that exist when the call begins, until the call ends.

The function itself loads modules in its first iteration. DistributedDataParallel alone imports
`torch._dynamo`, which has more than 100,000 objects. So the objects left after the collection of
the first restart are frozen as well. Some of these may become garbage later, such as a stored
exception; they live until the call ends. Therefore regrow freezes once more only: a further freeze
would also keep such objects of another iteration.

**Report.** A restart is one line in the log of each rank, and one event of the job. A rank whose
function has raised an exception sends another event, with the traceback. So does a rank that
exceeded its soft time-out: the interrupt was raised where the function hung.
"""

from __future__ import annotations

import enum
import gc
import logging
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Final, cast

from regrow import _progress as board
from regrow.inprocess.attribution import Interruption
from regrow.inprocess.exception import (
    EvictedError,
    LinkError,
    RankFault,
    RankShouldRestart,
    RestartAbort,
)
from regrow.inprocess.group.group_messages import Fault, Faults, Joined
from regrow.inprocess.ranks.assignment import RankDiscarded
from regrow.inprocess.state import State
from regrow.utils import (
    Backoff,
    describe,
    get_cause,
    get_context,
    get_traceback,
    is_a,
    source_text,
    stack_of,
)
from regrow.utils.logging import library_logger

logger = library_logger(__name__)


class Next(enum.Enum):
    """What a rank does when the function has raised an exception."""

    REPORT = enum.auto()
    """This rank has a fault of its own: report it, and restart with all ranks."""
    RESTART = enum.auto()
    """Restart without a report: another rank failed, or a watchdog reported this one."""
    LEAVE = enum.auto()
    """This rank leaves its wrapper, and the other ranks restart without it."""


def after(error: BaseException, *, interrupted: bool, received: bool) -> Next:
    """Return what a rank does after the function has raised an exception.

    Args:
        error: the exception.
        interrupted: the interrupt was requested before the function ended.
        received: this rank had received a fault by then.
    """
    if not is_a(error, Exception | RankShouldRestart):  # the function may raise either
        return Next.LEAVE
    if received or (interrupted and is_a(error, RankShouldRestart)):
        return Next.RESTART
    return Next.REPORT


def may_be_replaced(error: BaseException) -> bool:
    """Return whether another process may continue a rank that leaves because of this error.

    An error of the link, the end of all restarts, a rank without a place and an exit on purpose
    stay as they are. A rank that was evicted is replaced: the other ranks wait for it.
    """
    if is_a(error, SystemExit):
        return not exits_with_0(error)
    if is_a(error, EvictedError):
        return True
    return not is_a(error, LinkError | RestartAbort | RankDiscarded | KeyboardInterrupt)


def exits_with_0(error: BaseException) -> bool:
    """Return whether the process exits with 0 if no handler catches this exception."""
    if not is_a(error, SystemExit):
        return False
    code = cast("SystemExit", error).code
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


_ENDS: Final = {"TERMINATED", "UNRESPONSIVE", "HARD_TIMEOUT"}


def root_cause(faults: Faults) -> Fault | None:
    """Return the first fault of the first process that ended, else the first fault."""
    records = faults.records
    if not records:
        return None
    ended = next((fault for fault in records if fault.kind in _ENDS), records[0])
    return next(fault for fault in records if fault.rank == ended.rank)


def was_overdue(timeline: Timeline | None, rank: int | None) -> bool:
    """Return whether an initial rank was reported at its soft time-out."""
    records = () if timeline is None else timeline.faults.records
    return any((f.kind, f.rank) == (Interruption.SOFT_TIMEOUT.name, rank) for f in records)


@dataclass(slots=True)
class Timeline:
    """The times at which the phases of a restart ended; `seconds` counts from the first fault.

    The phases are detected, notified, aborted, finalized, checked, met and called. Each rank
    goes through the phases from "notified" on.
    """

    faults: Faults
    """The faults that ended the iteration."""
    received_at: float
    """When this rank received the faults, in seconds of the clock that `reached` uses."""
    lost: tuple[int, ...] = ()
    """The initial ranks that were lost."""
    joined: tuple[Joined, ...] = ()
    """The processes that replaced others."""
    reached_at: dict[str, float] = field(default_factory=dict)
    """For each phase after "notified", the time of its end."""

    def reached(self, phase: str, now: float) -> None:
        """Record the end of a phase."""
        self.reached_at[phase] = now

    @property
    def root(self) -> Fault | None:
        """The root cause of the restart; see `root_cause`."""
        return root_cause(self.faults)

    def seconds(self) -> dict[str, float]:
        """Return for each finished phase the seconds from the first fault to the end of the phase.

        "detected" is the time at which the first fault was recorded. If no better time is known, it
        is also the time of the fault.
        """
        records, now = self.faults.records, self.faults.now
        detected = self.received_at - (max(now - records[0].at, 0.0) if records else 0.0)
        lead = max((records[0].at - fault.at + fault.lag for fault in records), default=0.0)
        times = {"detected": detected, "notified": self.received_at, **self.reached_at}
        return {phase: at - detected + lead for phase, at in times.items()}


FREE: Final = 20
"""Number of restarts within `WINDOW` that do not wait."""
WINDOW: Final = 60.0
"""Length of the window in seconds."""
FIRST: Final = 0.01
"""Pause in seconds of the first restart beyond `FREE`."""
LONGEST: Final = 1.0
"""Longest pause of a restart in seconds."""


class Pauses:
    """Pauses between the restarts of one call of a wrapped function; reads no clock."""

    __slots__ = ("_backoff", "_failed_at")

    def __init__(self) -> None:
        self._failed_at: tuple[float, ...] = ()
        self._backoff = Backoff(FIRST, LONGEST)

    def after(self, faults: Faults) -> float:
        """Return how many seconds to wait before the next call of the function.

        Args:
            faults: the faults that ended the iteration.
        """
        at = faults.records[0].at if faults.records else faults.now
        recent = (*(before for before in self._failed_at if at - before < WINDOW), at)
        self._failed_at = recent[-FREE - 1 :]
        if len(recent) <= FREE:
            self._backoff.reset()
            return 0.0
        return self._backoff.next()


LINKS = 16
"""Exceptions of a chain that are checked. A longer chain is not kept."""


def kept(error: BaseException | None) -> BaseException | None:
    """Return an exception that can be kept, without the local variables of its frames.

    Returns:
        None if the exception, or one in its chain, holds more than numbers and texts.
    """
    chain = list(islice(chain_of(error), LINKS + 1))
    if len(chain) > LINKS or not all(map(_is_plain, chain)):
        return None
    for link in chain:
        traceback.clear_frames(get_traceback(link))
    return error


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and all its causes and contexts, each once."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and not any(link is each for each in seen):
            seen.append(link)
            yield link
            waiting += [get_cause(link), get_context(link)]


def cause_of(
    root: Fault | None,
    iteration: int,
    rank: int | None,
    own: BaseException | None,
    before: BaseException | None = None,
) -> BaseException | None:
    """Return the cause for a `RestartAbort` of this rank.

    A rank that gives up first ends the iteration of the others, which then give up, too. Its
    `RestartAbort` is no cause: all ranks give up for the fault before.

    Args:
        root: the root cause of the iteration that ended.
        iteration: the number of that iteration.
        rank: the initial rank of this process.
        own: the exception of the function on this rank, if it was kept.
        before: the cause of the restart before this one.
    """
    if root is None:
        return None
    gave_up = root.message.startswith(f"{RestartAbort.__name__}(")
    if before is not None and gave_up and root.kind == Interruption.BASE_EXCEPTION.name:
        return before
    if root.rank == rank and own is not None:
        return own
    where = f"initial rank {root.rank} in iteration {iteration}"
    return RankFault(f"{root.kind} on {where}: {root.message}")


def _is_plain(error: BaseException) -> bool:
    try:
        held = [*error.args, *vars(error).values()]
    except Exception:  # noqa: BLE001 - a user's class may refuse this
        return False
    return not any(map(gc.is_tracked, held))


SHOWN: Final = 16
"""Number of lost ranks that an event names, and of replaced ones."""
DESCRIBED: Final = 8
"""Number of processes that an event describes, of those that replaced others."""
TEXT: Final = 300
"""Longest message of a fault in an event, in characters."""


def describe_origin() -> str:
    """Describe, for a process that replaces another one, the end of that one and its own start."""
    from regrow.workers.guardian.procfs import STARTED_FROM

    source = source_text(os.environ.get(STARTED_FROM, "exec"))
    ended = os.environ.get(board.REPLACES_ENV, "its process has ended")
    return f"{ended}; pid {os.getpid()} started {source}"


def report_restart(timeline: Timeline, state: State) -> None:
    """Book and log a finished restart; the new rank 0 also sends an event to the agent.

    Args:
        timeline: the times of the restart, with all phases.
        state: the state of this rank in the new iteration.
    """
    root = timeline.root
    seconds = {phase: round(s, 6) for phase, s in timeline.seconds().items()}
    board.restarted(seconds)
    logger.log(
        logging.WARNING if state.rank == 0 else logging.INFO,  # one warning per restart
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
        board.send_event(
            "regrow.inprocess.restarted",
            iteration=state.iteration,
            world_size=state.world_size,
            active_world_size=state.active_world_size,
            kind=root.kind if root else None,
            rank=root.rank if root else None,
            message=root.message[:TEXT] if root else "",
            lost=list(timeline.lost[:SHOWN]),
            lost_count=len(timeline.lost),
            replaced=[each.rank for each in timeline.joined[:SHOWN]],
            origins=[each.origin for each in timeline.joined[:DESCRIBED]],
            faults=len(timeline.faults.records),
            seconds=seconds,
        )


RAISED: Final = "regrow.inprocess.raised"


def report_exception(
    iteration: int, rank: int | None, error: BaseException, before: str | None
) -> str | None:
    """Send the agent an event with the exception that ended the function on this rank.

    A function that fails again and again would fill the log with copies of one traceback. So the
    traceback of an event is None if it equals the traceback of this rank's previous event.

    Args:
        iteration: the number of the call that ended.
        rank: the initial rank of this process.
        error: the exception.
        before: the traceback of the previous event, as returned by the previous call; None if this
            is the first one.

    Returns:
        The traceback of this exception; `before` if there is no agent.
    """
    if not board.has_agent():
        return before
    lines, message = stack_of(error), describe(error)[:TEXT]
    fields = {"iteration": iteration, "rank": rank, "pid": os.getpid(), "message": message}
    fields["last_step"] = board.latest()
    text = "\n".join(lines)
    while lines and len(board.event_line(RAISED, {**fields, "traceback": text})) > board.LONGEST:
        lines = lines[1:]  # the cause is at the end
        text = "\n".join(lines)
    board.send_event(RAISED, **fields, traceback=None if text == before else text)
    return text


_PACKAGE = f"{__name__.partition('.')[0]}."


def release(error: BaseException) -> None:
    """Clear this package's frames in an exception and in its causes and contexts.

    Frames that still run are not cleared.
    """
    for link in chain_of(error):
        part = get_traceback(link)
        frame = None if part is None else part.tb_frame.f_back
        while part is not None:
            _clear(part.tb_frame)
            part = part.tb_next
        while frame is not None:
            _clear(frame)
            frame = frame.f_back


def _clear(frame: FrameType) -> None:
    if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        try:
            frame.clear()
        except RuntimeError:  # the frame still runs
            return


class Heap:
    """Excludes long-lived objects from garbage collection, unless the program does so itself."""

    def __init__(self) -> None:
        self._is_ours = gc.get_freeze_count() == 0
        self._has_restarted = False
        if self._is_ours:
            gc.freeze()

    def restarted(self) -> None:
        """Freeze the objects left after the first collection; later calls have no effect."""
        if self._is_ours and not self._has_restarted:
            self._has_restarted = True
            gc.freeze()

    def close(self) -> None:
        """Include all objects in garbage collection again."""
        if self._is_ours:
            gc.unfreeze()
