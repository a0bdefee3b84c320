"""The beats of all workers, counted by the store's server.

The server is connected to every worker anyway, so it is the place where a beat costs one message
each way whatever the number of workers: each asks once, and when the last one has, all are told at
once what the full set means (`_merge`), in an answer whose length does not grow with their number.
If they do not all come, each is told who is missing when its own time is over.

Between beats each worker has one more question parked here, for all its life, which is answered
when something ends the group. So a worker whose process ends is known to all as soon as its session
is over: the kernel closes the connection, the session gets its grace to come back, and that is it.
A connection that was reset, or a host that fell silent, proves nothing of the worker; what counts
then is whether it comes to the beats.

**The end of a group** is the same for all: what ended it is told to who waits or follows, and kept
for those who are not there to be told. The name is then free for a new group, so that workers that
are started again meet each other there, and never what is left of the old ones. Who is in a group,
and what ends it, is the group's matter (`_group`).

A plain sum of vectors can be had here, too, by the same rules of waiting (`_sums`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

import msgspec

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._gathering import check
from regrow.heartbeat._group import Group
from regrow.heartbeat._merge import Broken, Left
from regrow.heartbeat._sums import Sums
from regrow.store import Answer, StoreServiceError
from regrow.store._service import within

GROUPS: Final = 1024
"""The most groups at once."""
KEPT: Final = 16384
"""For how many workers of groups that ended it is remembered what ended them."""


def create() -> HeartbeatService:
    """Return the service for a server process."""
    return HeartbeatService()


class HeartbeatService:
    """The beats of all groups that meet in one store server; a `regrow.store.Service`."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._sums = Sums()
        self._places: dict[Hashable, set[tuple[str, int]]] = {}
        """The groups and ranks that each session has spoken for."""
        self._ended: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """What ended the group of a worker, by name and incarnation; the latest last."""
        self._now = 0.0
        self._deadline = math.inf

    @property
    def deadline(self) -> float | None:
        """See `Service`; it may be too early, never too late."""
        return None if self._deadline == math.inf else self._deadline

    # ------------------------------------------------------- what the server tells

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        try:
            question = questions.decode_question(within(body, questions.BODY_BYTES))
            match question:
                case questions.Beat():
                    out = self._beat(session, id, question)
                case questions.Follow():
                    return self._follow(session, id, question)
                case questions.Look():
                    return [Answer(session, id, self._table(question.group))]
                case questions.Reduce():
                    out = self._sums.asked(session, id, question, now)
        except (ValueError, msgspec.MsgspecError) as error:
            raise StoreServiceError(f"the heartbeat service refused: {error}") from None
        self._deadline = min(self._deadline, now + question.wait)
        return out

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        self._let_go(session, id)
        self._sums.let_go(session, id, self._now)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        self._let_go(session)
        self._sums.let_go(session, None, now)
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; what the client waits for, it asks again."""
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; a worker of which nobody heard a goodbye is lost."""
        self.suspended(session, now)
        self._sums.ended(session)
        out: list[Answer] = []
        for name in dict.fromkeys(name for name, _ in self._places.pop(session, ())):
            group = self._groups.get(name)
            lost = group.lose(session, why, closed) if group is not None else None
            if group is not None and lost is not None:
                out += self._end(group, lost)
            elif group is not None and group.is_deserted:
                del self._groups[name]
        return out

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        out: list[Answer] = []
        for group in list(self._groups.values()):
            if group.gathering.due() <= now:
                told, outcome = group.overdue(now)
                out += told if outcome is None else self._end(group, outcome)
        for gathering in self._sums.gatherings:
            if gathering.due() <= now:
                ranks, missing = gathering.overdue(now)
                out += gathering.send_off(ranks, questions.encode(questions.Missing(missing)), now)
        gatherings = [*(group.gathering for group in self._groups.values()), *self._sums.gatherings]
        self._deadline = min((each.due() for each in gatherings), default=math.inf)
        return out

    # ------------------------------------------------------------------ questions

    def _beat(self, session: Hashable, id: int, question: questions.Beat) -> list[Answer]:
        name, rank = question.group, question.rank
        check(rank, question.size)
        ended = self._ended.get((name, question.incarnation))
        if ended is not None:
            return [Answer(session, id, ended)]
        group = self._groups.get(name)
        outcome = group.judge(question) if group is not None else None
        if group is not None and outcome is not None:
            return [Answer(session, id, questions.over(outcome)), *self._end(group, outcome)]
        if question.leaving:  # it has met nobody
            answer = Answer(session, id, questions.over(Left(Ranks.of([rank]))))
            return [answer, *(group.withdraw(question, self._now) if group is not None else [])]
        group = group or self._new_group(name, question.size)
        self._places.setdefault(session, set()).add((name, rank))
        out, outcome = group.beat(session, id, question, self._now)
        return out if outcome is None else [*out, *self._end(group, outcome)]

    def _new_group(self, name: str, size: int) -> Group:
        if len(self._groups) >= GROUPS:
            raise ValueError(f"{GROUPS} groups beat here already, and that is the most")
        group = self._groups[name] = Group(name, size)
        return group

    def _follow(self, session: Hashable, id: int, question: questions.Follow) -> list[Answer]:
        ended = self._ended.get((question.group, question.incarnation))
        if ended is not None:
            return [Answer(session, id, ended)]
        group = self._groups.get(question.group)
        if group is None:
            return [Answer(session, id, questions.encode(questions.Hushed()))]
        return group.follow(session, id, question)

    def _table(self, name: str) -> bytes:
        group = self._groups.get(name)
        return questions.encode(questions.Table(group.table(self._now) if group else []))

    # ---------------------------------------------------------------- book-keeping

    def _let_go(self, session: Hashable, id: int | None = None) -> None:
        """Forget what a session waits for; with an id, only that question."""
        for name, rank in self._places.get(session, ()):
            group = self._groups.get(name)
            if group is not None:
                group.let_go(rank, session, id, self._now)

    def _end(self, group: Group, outcome: Left | Broken) -> list[Answer]:
        """Tell all what ended the group, now or when they ask."""
        body = questions.over(outcome)
        for member in group.members.values():
            self._ended[group.name, member.beat.incarnation] = body
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        del self._groups[group.name]
        return group.dismiss(body)
