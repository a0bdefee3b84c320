"""Mistakes that the simulation of restarts has to find: each is a small patch of the rules.

They are mistakes that are easily made here: a test that no mistake can fail says nothing, and a
simulation is a test like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from regrow.inprocess import _iteration, _reply, _service
from regrow.inprocess import _messages as messages
from regrow.inprocess._group import Group, Phase, bit
from regrow.inprocess._service import InprocessService
from regrow.store import Answer


def _the_lost_are_waited_for() -> list[Any]:
    """A rank that has ended is missed at the next barrier."""

    def missing(group: Group) -> int:
        if group.phase is Phase.JOINING:
            return _iteration._everyone(group) & ~group.here
        return group.world & ~group.here

    return [mock.patch.object(_iteration, "_missing", missing)]


def _a_report_counts_each_time() -> list[Any]:
    """A report that comes again, because its answer was lost, is another fault."""
    real = _iteration._report

    def report(group: Group, event: messages.Report, now: float) -> Group:
        return real(group._replace(reported=frozenset()), event, now)

    return [mock.patch.object(_iteration, "_report", report)]


def _a_soft_time_out_counts_for_each_who_sees_it() -> list[Any]:
    """What its watcher reports of a rank is not known to be what it reports itself."""
    real = _iteration._report

    def report(group: Group, event: messages.Report, now: float) -> Group:
        outside = event.message == "seen from outside"
        return real(group, msgspec.structs.replace(event, number=event.number + outside), now)

    return [mock.patch.object(_iteration, "_report", report)]


def _a_watcher_is_taken_for_the_rank() -> list[Any]:
    """Who tells of a rank that it is overdue speaks for it from then on."""
    real = InprocessService._ask

    def ask(service: InprocessService, session: Hashable, id: int, asked: Any, now: float) -> Any:
        told = real(service, session, id, asked, now)
        if isinstance(asked, messages.Report) and asked.group in service._groups:
            service._bind(service._groups[asked.group], asked.rank, session)
        return told

    return [mock.patch.object(InprocessService, "_ask", ask)]


def _who_met_is_forgotten() -> list[Any]:
    """The iteration before is not remembered for those whose answer was lost."""
    real = _iteration._meet

    def meet(group: Group, now: float) -> Group:
        return real(group, now)._replace(before=None)

    return [mock.patch.object(_iteration, "_meet", meet)]


def _the_first_to_enter_begins() -> list[Any]:
    """Whoever enters is let go at once."""
    real = _reply._reply_now

    def reply(group: Group, asked: Any, now: float) -> messages.Told | None:
        if isinstance(asked, messages.Enter) and group.phase is Phase.ENTERING:
            return messages.Go(group.iteration)
        return real(group, asked, now)

    return [mock.patch.object(_reply, "_reply_now", reply)]


def _who_is_done_is_let_go() -> list[Any]:
    """The end of the call is not waited for."""
    real = _reply._reply_now

    def reply(group: Group, asked: Any, now: float) -> messages.Told | None:
        if isinstance(asked, messages.Done) and group.phase is Phase.RUNNING:
            return messages.Over()
        return real(group, asked, now)

    return [mock.patch.object(_reply, "_reply_now", reply)]


def _an_old_session_ends_its_rank() -> list[Any]:
    """A process that is back over another session is lost with the first one all the same."""

    def unbind(service: InprocessService, entry: Any, rank: int) -> None:
        entry.sessions.pop(rank, None)

    real = InprocessService.ended

    def ended(
        service: InprocessService, session: Hashable, why: str, closed: bool, now: float
    ) -> list[Answer]:
        for name, rank in service._bound.get(session, ()):
            service._groups[name].sessions.setdefault(rank, session)
        return real(service, session, why, closed, now)

    return [
        mock.patch.object(InprocessService, "_unbind", unbind),
        mock.patch.object(InprocessService, "ended", ended),
    ]


def _who_has_ended_ends_again() -> list[Any]:
    """Its watcher and its connection each have a rank counted out."""
    real = _iteration._take_in

    def take_in(group: Group, event: Any, now: float) -> Group:
        if isinstance(event, _iteration.Lost | messages.Accuse) and not group.finished:
            group = group._replace(living=group.living | bit(event.rank) & group.here)
        return real(group, event, now)

    return [mock.patch.object(_iteration, "_take_in", take_in)]


def _the_lost_are_told_by_their_initial_ranks() -> list[Any]:
    """The empty places are numbered as at the beginning, not as in the last world."""
    real = _iteration._meet

    def meet(group: Group, now: float) -> Group:
        after = real(group, now)
        assert after.before is not None
        return after._replace(before=after.before._replace(terminated=after.before.lost))

    return [mock.patch.object(_iteration, "_meet", meet)]


def _a_discarded_rank_is_a_fault() -> list[Any]:
    """Who has no place in the new world interrupts those who have one."""
    real = _iteration._leave

    def leave(group: Group, event: messages.Leave, now: float) -> Group:
        return real(group, msgspec.structs.replace(event, discarded=False), now)

    return [mock.patch.object(_iteration, "_leave", leave)]


def _a_fault_while_entering_is_forgotten() -> list[Any]:
    """What happens between meeting and beginning interrupts nobody."""
    real = _iteration._advance

    def advance(group: Group, now: float) -> Group:
        if group.phase is Phase.ENTERING and group.faults and not _iteration._missing(group):
            return group._replace(phase=Phase.RUNNING, here=0, since=None, faults=())
        if group.phase is Phase.ENTERING and group.faults:
            return group
        return real(group, now)

    return [mock.patch.object(_iteration, "_advance", advance)]


def _who_comes_too_late_is_not_told() -> list[Any]:
    """A question about an iteration that ended meanwhile waits like any other."""
    real = _reply.reply

    def reply(group: Group, asked: Any, now: float) -> messages.Told | None:
        told = real(group, asked, now)
        late = getattr(asked, "iteration", group.iteration) < group.iteration
        return None if late and isinstance(asked, messages.Ready) else told

    return [mock.patch.object(_service, "reply", reply)]


def _a_cut_takes_the_rank_along() -> list[Any]:
    """A connection that breaks is taken for the end, although the session may go on."""
    real = InprocessService.suspended

    def suspended(service: InprocessService, session: Hashable, now: float) -> list[Answer]:
        bound = list(service._bound.get(session, ()))
        out = real(service, session, now)
        for name, rank in bound:
            lost = _iteration.Lost(rank, "TERMINATED", "its connection broke")
            out += service._apply(service._groups[name], lost, now)
        return out

    return [mock.patch.object(InprocessService, "suspended", suspended)]


class Bug(NamedTuple):
    """A mistake, and where it shows."""

    patches: Callable[[], list[Any]]
    seeds: range
    """One of these finds it; they begin shortly before the first that does, to save the search."""


BUGS: dict[str, Bug] = {
    "lost awaited": Bug(_the_lost_are_waited_for, range(100)),
    "report repeated": Bug(_a_report_counts_each_time, range(400)),
    "overdue twice": Bug(_a_soft_time_out_counts_for_each_who_sees_it, range(400)),
    "watcher bound": Bug(_a_watcher_is_taken_for_the_rank, range(25, 400)),
    "meeting forgotten": Bug(_who_met_is_forgotten, range(400)),
    "first begins": Bug(_the_first_to_enter_begins, range(100)),
    "done let go": Bug(_who_is_done_is_let_go, range(100)),
    "old session": Bug(_an_old_session_ends_its_rank, range(400)),
    "ended twice": Bug(_who_has_ended_ends_again, range(160, 400)),
    "initial ranks": Bug(_the_lost_are_told_by_their_initial_ranks, range(100)),
    "discarded is lost": Bug(_a_discarded_rank_is_a_fault, range(100)),
    "entering deaf": Bug(_a_fault_while_entering_is_forgotten, range(100)),
    "late unheard": Bug(_who_comes_too_late_is_not_told, range(400)),
    "cut is lost": Bug(_a_cut_takes_the_rank_along, range(100)),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a mistake for a while."""
    with ExitStack() as stack:
        for patch in BUGS[name].patches():
            stack.enter_context(patch)
        yield
