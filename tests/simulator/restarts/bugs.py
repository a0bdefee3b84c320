"""Planted bugs that the simulation of restarts must find: each changes the rules or the service.

They are bugs that are easily made here. A test that finds no planted bug proves nothing, and the
simulation is a test like any other. A bug replaces the rules of a group (`step`), the replies to
ranks (`reply`), or the service that applies both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from msgspec.structs import replace

from regrow.inprocess.group import group, group_rules
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import Group, GroupPhase, bit
from regrow.inprocess.group.group_messages import Faults, NotReplaced
from regrow.inprocess.group.group_rules import Event, Lost, Tick
from regrow.inprocess.group.group_service import InprocessService
from regrow.store import Answer

Step = Callable[[Group, Event, float], Group]
Reply = Callable[[Group, messages.Asked, float], messages.GroupReply | None]


class Bug(NamedTuple):
    """A planted bug, and the seeds that show it."""

    seeds: range
    """One of these seeds finds it; they begin shortly before the first that does, to save time.

    The odd seeds replace processes.
    """
    step: Step = group_rules.step
    reply: Reply = group.reply
    service: type[InprocessService] = InprocessService


NO_BUG = Bug(range(0))


# ------------------------------------------------------------------------- the rules


def _step_waits_for_lost(state: Group, event: Event, now: float) -> Group:
    """The next barrier waits for a rank that has ended."""
    after = group_rules.step(state, event, now)
    return after._replace(living=after.living | state.living)


def _step_counts_repeated_report(state: Group, event: Event, now: float) -> Group:
    """A report that is repeated, because its reply was lost, counts as another fault."""
    if isinstance(event, messages.Report):
        state = state._replace(reported=frozenset())
    return group_rules.step(state, event, now)


def _step_counts_overdue_twice(state: Group, event: Event, now: float) -> Group:
    """A soft time-out that the monitor and the rank report counts twice."""
    if isinstance(event, messages.Report) and event.message == "seen from outside":
        event = replace(event, number=event.number + 1)
    return group_rules.step(state, event, now)


def _step_forgets_meeting(state: Group, event: Event, now: float) -> Group:
    """The service forgets the previous iteration, which ranks with a lost reply still need."""
    after = group_rules.step(state, event, now)
    return after._replace(before=None) if after.iteration > state.iteration else after


def _step_ends_when_done(state: Group, event: Event, now: float) -> Group:
    """The call is over when all ranks are done, before every rank knows that."""
    after = group_rules.step(state, event, now)
    return after._replace(phase=GroupPhase.OVER) if after.phase is GroupPhase.CONFIRMING else after


def _step_ends_twice(state: Group, event: Event, now: float) -> Group:
    """A rank that ended is counted twice, once by its monitor and once by its connection."""
    if isinstance(event, Lost) and not state.finished:
        state = state._replace(living=state.living | bit(event.rank) & state.here)
    return group_rules.step(state, event, now)


def _step_numbers_by_initial_rank(state: Group, event: Event, now: float) -> Group:
    """Empty places are numbered by initial ranks, not by the places of the last world."""
    after = group_rules.step(state, event, now)
    if after.before is not None and after.iteration > state.iteration:
        return after._replace(before=after.before._replace(terminated=after.before.lost))
    return after


def _step_counts_discarded(state: Group, event: Event, now: float) -> Group:
    """A rank without a place in the new world interrupts the ranks that have one."""
    if isinstance(event, messages.LeaveGroup):
        event = replace(event, discarded=False)
    return group_rules.step(state, event, now)


def _step_ignores_faults_while_entering(state: Group, event: Event, now: float) -> Group:
    """A fault between the meeting and the start of the function interrupts no rank."""
    after = group_rules.step(state, event, now)
    if state.phase is GroupPhase.ENTERING and after.phase is GroupPhase.LAST_CALL:
        after = after._replace(phase=state.phase, here=state.here, since=state.since, faults=())
        return group_rules.step(after, Tick(), now)
    return after


def _step_waits_for_nobody(state: Group, event: Event, now: float) -> Group:
    """The group does not wait for the replacement of a lost rank."""
    after = group_rules.step(state, event, now)
    return group_rules.step(after._replace(awaited=0), Tick(), now) if after.awaited else after


def _step_ignores_not_replaced(state: Group, event: Event, now: float) -> Group:
    """The group waits on when it learns that no process replaces a lost rank."""
    return state if isinstance(event, NotReplaced) else group_rules.step(state, event, now)


def _step_forgets_early_report(state: Group, event: Event, now: float) -> Group:
    """A report that no process replaces a rank has no effect before the loss of the rank."""
    if isinstance(event, NotReplaced) and not state.awaited & bit(event.rank):
        return state
    return group_rules.step(state, event, now)


def _step_ignores_reserve(state: Group, event: Event, now: float) -> Group:
    """The group waits for a replacement although a rank in reserve can take over."""
    if isinstance(event, messages.Enter):
        event = replace(event, active=True)
    return group_rules.step(state, event, now)


def _step_seats_in_order(state: Group, event: Event, now: float) -> Group:
    """Newcomers get the empty places in descending order, not the places that they had."""
    after = group_rules.step(state, event, now)
    met = after.before
    if met is None or after.iteration == state.iteration:
        return after
    places = sorted((each.place for each in met.joined), reverse=True)
    joined = tuple(each._replace(place=places.pop(0)) for each in met.joined)
    return after._replace(before=met._replace(joined=joined))


# ------------------------------------------------------------------------- the replies


def _reply_first_begins(
    state: Group, asked: messages.Asked, now: float
) -> messages.GroupReply | None:
    """Each rank may begin as soon as it enters, without the other ranks."""
    reply = group.reply(state, asked, now)
    entering = isinstance(asked, messages.Enter) and state.phase is GroupPhase.ENTERING
    return messages.Go(state.iteration) if reply is None and entering else reply


def _reply_done_continues(
    state: Group, asked: messages.Asked, now: float
) -> messages.GroupReply | None:
    """A rank that is done continues without waiting for the end of the call."""
    reply = group.reply(state, asked, now)
    done = isinstance(asked, messages.RankDone) and state.phase is GroupPhase.RUNNING
    return messages.Go(state.iteration) if reply is None and done else reply


def _reply_done_when_over(
    state: Group, asked: messages.Asked, now: float
) -> messages.GroupReply | None:
    reply = group.reply(state, asked, now)
    done = isinstance(asked, messages.RankDone) and isinstance(reply, messages.Over)
    return messages.Go(state.iteration) if done else reply


def _reply_always_left(
    state: Group, asked: messages.Asked, now: float
) -> messages.GroupReply | None:
    """A rank that leaves always receives that the others continue, even if they do not."""
    if isinstance(asked, messages.LeaveGroup):
        return messages.Left(Faults(state.iteration, state.faults, now))
    return group.reply(state, asked, now)


def _reply_parks_late_request(
    state: Group, asked: messages.Asked, now: float
) -> messages.GroupReply | None:
    """A request about an iteration that ended meanwhile is parked like any other."""
    late = isinstance(asked, messages.Ready) and asked.iteration < state.iteration
    return None if late else group.reply(state, asked, now)


# ------------------------------------------------------------------------- the service


class _BindsMonitor(InprocessService):
    """The session of a monitor that reports a rank as overdue becomes the session of that rank."""

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        answers = super().asked(session, id, body, now)
        asked = messages.decode_question(body)
        if isinstance(asked, messages.Report):
            follow = messages.Follow(asked.group, asked.rank, asked.process, asked.iteration)
            answers += super().asked(session, -1, messages.encode(follow), now)
        return answers


class _RemembersSessions(InprocessService):
    """Base of the services that confuse a session with its rank."""

    def __init__(self, step: Step = group_rules.step, reply: Reply = group.reply) -> None:
        super().__init__(step, reply)
        self.processes: dict[Hashable, messages.Asked] = {}

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        asked = messages.decode_question(body)
        if isinstance(asked, messages.Join | messages.Enter | messages.Follow):
            self.processes[session] = asked
        return super().asked(session, id, body, now)

    def end_rank(self, session: Hashable, now: float) -> list[Answer]:
        """Report the rank that this session has acted for as ended."""
        asked = self.processes.get(session)
        if asked is None:
            return []
        dead = messages.ReportDead(asked.group, asked.rank, asked.process, "TERMINATED", "a bug")
        return super().asked("the bug", -1, messages.encode(dead), now)


class _EndsWithOldSession(_RemembersSessions):
    """The end of its old session ends a rank that has reconnected over another session."""

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        return [*super().ended(session, why, closed, now), *self.end_rank(session, now)]


class _EndsWithConnection(_RemembersSessions):
    """A broken connection counts as the end of its rank, although the session may continue."""

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        return [*super().suspended(session, now), *self.end_rank(session, now)]


class _TakesOldMessages(InprocessService):
    """A message of a process that was replaced is taken for one of the latest process."""

    def __init__(self, step: Step = group_rules.step, reply: Reply = group.reply) -> None:
        super().__init__(step, reply)
        self._latest: dict[int, messages.Join] = {}

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        asked = messages.decode_question(body)
        if isinstance(asked, NotReplaced):
            return super().asked(session, id, body, now)
        latest = self._latest.get(asked.rank)
        if isinstance(asked, messages.Join):
            if latest is None or asked.incarnation >= latest.incarnation:
                self._latest[asked.rank] = asked
        elif latest is not None and asked.process != latest.process:
            body = messages.encode(replace(asked, process=latest.process))
        return super().asked(session, id, body, now)


class _ChangesAnswers(InprocessService):
    """Base of the services that send wrong answers to processes that join."""

    def change(self, answers: list[Answer]) -> list[Answer]:
        """Return the wrong answers."""
        raise NotImplementedError

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        return self.change(super().asked(session, id, body, now))

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        return self.change(super().ended(session, why, closed, now))

    def due(self, now: float) -> list[Answer]:
        return self.change(super().due(now))


class _AdmitsTwo(_ChangesAnswers):
    """A process that waits to join is admitted, although a later one has taken its place."""

    def __init__(self, step: Step = group_rules.step, reply: Reply = group.reply) -> None:
        super().__init__(step, reply)
        self._joins: dict[int, list[tuple[Hashable, int]]] = {}

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        asked = messages.decode_question(body)
        if isinstance(asked, messages.Join):
            self._joins.setdefault(asked.rank, []).append((session, id))
        return super().asked(session, id, body, now)

    def change(self, answers: list[Answer]) -> list[Answer]:
        more: list[Answer] = []
        for answer in answers:
            if isinstance(messages.decode_reply(answer.body), messages.Admitted):
                asked = answer.session, answer.id
                for joins in self._joins.values():
                    if asked in joins:
                        others = [Answer(*other, answer.body) for other in joins if other != asked]
                        more += others
                        joins.clear()
        return answers + more


class _SharesAnswers(_ChangesAnswers):
    """The answer for one newcomer is encoded once, and sent to all newcomers."""

    def change(self, answers: list[Answer]) -> list[Answer]:
        replies = [(answer, messages.decode_reply(answer.body)) for answer in answers]
        first = next((a.body for a, reply in replies if isinstance(reply, messages.Admitted)), b"")
        return [
            answer._replace(body=first) if isinstance(reply, messages.Admitted) else answer
            for answer, reply in replies
        ]


BUGS: dict[str, Bug] = {
    "lost awaited": Bug(range(100), step=_step_waits_for_lost),
    "report repeated": Bug(range(400), step=_step_counts_repeated_report),
    "overdue twice": Bug(range(400), step=_step_counts_overdue_twice),
    "monitor bound": Bug(range(55, 400), service=_BindsMonitor),
    "meeting forgotten": Bug(range(400), step=_step_forgets_meeting),
    "first begins": Bug(range(100), reply=_reply_first_begins),
    "done let go": Bug(range(100), reply=_reply_done_continues),
    "done is over": Bug(range(400), step=_step_ends_when_done, reply=_reply_done_when_over),
    "always left": Bug(range(400), reply=_reply_always_left),
    "old session": Bug(range(400), service=_EndsWithOldSession),
    "ended twice": Bug(range(160, 400), step=_step_ends_twice),
    "initial ranks": Bug(range(100), step=_step_numbers_by_initial_rank),
    "discarded is lost": Bug(range(100), step=_step_counts_discarded),
    "entering deaf": Bug(range(100), step=_step_ignores_faults_while_entering),
    "late unheard": Bug(range(400), reply=_reply_parks_late_request),
    "cut is lost": Bug(range(100), service=_EndsWithConnection),
    "old message taken": Bug(range(1, 400, 2), service=_TakesOldMessages),
    "two admitted": Bug(range(1, 400, 2), service=_AdmitsTwo),
    "place of another": Bug(range(1, 400, 2), step=_step_seats_in_order),
    "not awaited": Bug(range(1, 400, 2), step=_step_waits_for_nobody),
    "awaited in vain": Bug(range(1, 400, 2), step=_step_ignores_not_replaced),
    "early report forgotten": Bug(range(1, 400, 2), step=_step_forgets_early_report),
    "reserve ignored": Bug(range(1, 400, 2), step=_step_ignores_reserve),
    "answer of another": Bug(range(1, 400, 2), service=_SharesAnswers),
}
