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

**Who is who.** A worker is known by the incarnation it drew when it started. It may come by another
session than before; another incarnation is another process. While the group forms, the newer one of
two takes the place, since a launcher may have started it again, and the older one, if it still
waits, is told so. Once the group has beaten together, a new one ends it.

**The end of a group** is the same for all: what ended it is told to who waits or follows, and kept
for those who are not there to be told. The name is then free for a new group, so that workers that
are started again meet each other there, and never what is left of the old ones. When the server
itself is started again, the workers come as they are, and form the group anew: they have joined
already, and so it is no beginning (see `merge`).

A plain sum of vectors can be had here, too, by the same rules of waiting (`_sums`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

import msgspec

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._exchange import Progress
from regrow.heartbeat._failure import Kind, Ranks
from regrow.heartbeat._gathering import Gathering, Waiting, check
from regrow.heartbeat._merge import NO_STEP, Agreed, Broken, Failed, Left, Memory, merge
from regrow.heartbeat._sums import Sums
from regrow.store import Answer, StoreServiceError

GROUPS: Final = 1024
"""The most groups at once."""
KEPT: Final = 16384
"""For how many workers of groups that ended it is remembered what ended them."""


def create() -> HeartbeatService:
    """Return the service for a server process."""
    return HeartbeatService()


class _Member:
    """One worker of a group."""

    __slots__ = ("at", "beat", "follower", "session")

    def __init__(self, session: Hashable, beat: questions.Beat, at: float) -> None:
        self.session: Hashable | None = session
        """That it came by last; None if that is over."""
        self.beat = beat
        """The last one."""
        self.at = at
        """When that came."""
        self.follower: tuple[Hashable, int] | None = None
        """Its question for what ends the group."""


class _Group:
    """The workers that beat together, or are about to."""

    __slots__ = ("gathering", "last", "members", "memory", "name")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.gathering = Gathering(size)
        self.members: dict[int, _Member] = {}
        self.memory: Memory = ()
        self.last: Agreed | None = None
        """What the last full set meant."""


class HeartbeatService:
    """The beats of all groups that meet in one store server; a `regrow.store.Service`."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
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
            if len(body) > questions.BODY_BYTES:
                raise ValueError(
                    f"the question has {len(body)} bytes, and {questions.BODY_BYTES} are allowed"
                )
            question = questions.decode_question(body)
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
            if group is not None:
                out += self._lose(group, session, why, closed)
        return out

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        out: list[Answer] = []
        for group in list(self._groups.values()):
            if group.gathering.due() <= now:
                out += self._overdue(group)
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
        outcome = _said_at_once(group, question)
        if outcome is not None:
            answer = Answer(session, id, questions.over(outcome))
            return [answer, *(self._end(group, outcome) if group else ())]
        group = group or self._new_group(name, question.size)
        out = self._seat(session, group, question)
        gathering = group.gathering
        age = gathering.missed(rank, question.incarnation, question.seen, self._now)
        if age is not None and group.last is not None:
            late = questions.together(group.last._replace(age=age), gathering.number)
            return [*out, Answer(session, id, late)]
        until = self._now + question.wait
        if gathering.come(rank, Waiting(session, id, question.incarnation, self._now, until)):
            out += self._complete(group)
        return out

    def _new_group(self, name: str, size: int) -> _Group:
        if len(self._groups) >= GROUPS:
            raise ValueError(f"{GROUPS} groups beat here already, and that is the most")
        group = self._groups[name] = _Group(name, size)
        return group

    def _seat(self, session: Hashable, group: _Group, question: questions.Beat) -> list[Answer]:
        """Note what a worker says of itself; an older process in its place is told."""
        rank, out = question.rank, list[Answer]()
        member = group.members.get(rank)
        if member is None or member.beat.incarnation != question.incarnation:
            if member is not None:
                twice = questions.over(Broken("twice", Ranks.of([rank])))
                older = group.gathering.leave(rank, self._now)
                out = [Answer(older.session, older.id, twice)] if older is not None else []
            group.members[rank] = _Member(session, question, self._now)
        else:
            member.session, member.beat, member.at = session, question, self._now
        self._places.setdefault(session, set()).add((group.name, rank))
        return out

    def _complete(self, group: _Group) -> list[Answer]:
        """Tell all what the full set means."""
        beats = [group.members[rank].beat.said() for rank in range(group.gathering.size)]
        group.memory, outcome = merge(group.memory, beats)
        if not isinstance(outcome, Agreed):
            assert not isinstance(outcome, Failed)
            return self._end(group, outcome)
        group.last = outcome
        body = questions.together(outcome, group.gathering.number + 1)
        return group.gathering.complete(body, self._now)

    def _overdue(self, group: _Group) -> list[Answer]:
        """Tell those who have waited long enough; if one of them gives up now, tell all."""
        ranks, missing = group.gathering.overdue(self._now)
        if not any(group.members[rank].beat.final for rank in ranks):
            body = questions.encode(questions.Missing(missing))
            return group.gathering.send_off(ranks, body, self._now)
        if not missing.total:
            never = "all came, but never at the same time"
            return self._end(group, Broken("no exchange", missing, never))
        began = any(each.beat.joined for each in group.members.values())
        kind: Kind = "missing" if began else "never started"
        return self._end(group, Broken(kind, missing))

    def _follow(self, session: Hashable, id: int, question: questions.Follow) -> list[Answer]:
        ended = self._ended.get((question.group, question.incarnation))
        if ended is not None:
            return [Answer(session, id, ended)]
        member = self._member(question.group, question.rank)
        out: list[Answer] = []
        hushed = questions.encode(questions.Hushed())
        known = member is not None and member.beat.incarnation == question.incarnation
        if member is not None and known:
            if member.follower is not None:
                out = [Answer(*member.follower, hushed)]
            member.follower = (session, id) if question.on else None
        if not known or not question.on:
            out.append(Answer(session, id, hushed))
        return out

    def _table(self, name: str) -> bytes:
        group = self._groups.get(name)
        rows = [
            Progress(
                rank,
                None if each.beat.step == NO_STEP else each.beat.step,
                each.beat.phase or None,
                self._now - each.at,
            )
            for rank, each in sorted(group.members.items() if group else ())
        ]
        return questions.encode(questions.Table(rows))

    # ---------------------------------------------------------------- book-keeping

    def _member(self, name: str, rank: int) -> _Member | None:
        group = self._groups.get(name)
        return group.members.get(rank) if group else None

    def _let_go(self, session: Hashable, id: int | None = None) -> None:
        """Forget what a session waits for; with an id, only that question."""
        for name, rank in self._places.get(session, ()):
            group, member = self._groups.get(name), self._member(name, rank)
            if group is None or member is None:
                continue
            group.gathering.let_go(rank, session, id, self._now)
            follower = member.follower
            if follower is not None and follower[0] == session and id in (None, follower[1]):
                member.follower = None

    def _lose(self, group: _Group, session: Hashable, why: str, closed: bool) -> list[Answer]:
        """A session is over that workers of a group came by."""
        lost = [rank for rank, each in group.members.items() if each.session == session]
        if lost and closed and group.last is not None:
            return self._end(group, Broken("lost", Ranks.of(lost), why))
        for rank in lost:
            if group.last is None:  # it had not joined, and may be started again
                del group.members[rank]
            else:
                group.members[rank].session = None
        if all(each.session is None for each in group.members.values()):
            del self._groups[group.name]
        return []

    def _end(self, group: _Group, outcome: Left | Broken) -> list[Answer]:
        """Tell all what ended the group, now or when they ask."""
        body = questions.over(outcome)
        out = group.gathering.dismiss(body)
        for member in group.members.values():
            self._ended[group.name, member.beat.incarnation] = body
            if member.follower is not None:
                out.append(Answer(*member.follower, body))
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        del self._groups[group.name]
        return out


def _said_at_once(group: _Group | None, question: questions.Beat) -> Left | Broken | None:
    """What a beat means for the whole group whoever else comes, if it does."""
    rank = Ranks.of([question.rank])
    if question.leaving:
        return Left(rank)
    if group is None:
        return None
    size = group.gathering.size
    if question.size != size:
        first = min(group.members)
        detail = f"it says {question.size}, and rank {first} says {size}"
        return Broken("wrong world size", rank, detail)
    member = group.members.get(question.rank)
    if group.last and member and member.beat.incarnation != question.incarnation:
        return Broken("restarted", rank)
    return None
