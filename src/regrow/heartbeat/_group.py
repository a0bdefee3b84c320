"""The workers that beat together in the store's server, and what ends that.

**Who is who.** A worker is known by the incarnation it drew when it started. It may come by another
session than before; another incarnation is another process. While the group forms, the newer one of
two takes the place, since a launcher may have started it again, and the older one, if it still
waits, is told so. Once the group has beaten together, a new one ends it: as one that was started
again, or, if it shows a token of its own, as what is left of another run.

**Who gives up first** ends it for all, for the reason that it has. All come to the same end of
their patience within moments; but then one is the first, and the others would hear of its end, and
take that for the cause.

When the server itself is started again, the workers come as they are, and form the group anew: they
have joined already, and so it is no beginning (see `merge`).
"""

from __future__ import annotations

from collections.abc import Hashable

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._exchange import Progress
from regrow.heartbeat._failure import Kind, Ranks
from regrow.heartbeat._gathering import Gathering, Waiting
from regrow.heartbeat._merge import NO_STEP, Agreed, Broken, Left, Memory, merge, out_of_step
from regrow.store import Answer

Told = tuple[list[Answer], Left | Broken | None]
"""What is to be answered, and what ends the group, if anything does."""


class Member:
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


class Group:
    """Workers that beat together, or are about to; times are the server's.

    Args:
        name: of the group.
        size: how many they are.
    """

    __slots__ = ("_last", "_memory", "gathering", "members", "name")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.gathering = Gathering(size)
        self.members: dict[int, Member] = {}
        """By rank."""
        self._memory: Memory = ()
        self._last: Agreed | None = None
        """What the last full set meant; None while the group forms."""

    @property
    def is_deserted(self) -> bool:
        """Whether nobody is left who could come."""
        return all(each.session is None for each in self.members.values())

    def judge(self, question: questions.Beat) -> Left | Broken | None:
        """Return what a beat means for all, whoever else comes; None if that depends on them."""
        rank, size = Ranks.of([question.rank]), self.gathering.size
        if question.size != size:
            detail = f"it says {question.size}, and rank {min(self.members)} says {size}"
            return Broken("wrong world size", rank, detail)
        member = self.members.get(question.rank)
        known = member is not None and member.beat.incarnation == question.incarnation
        if question.leaving:
            return Left(rank) if known and self._last is not None else None
        if member is not None and not known and self._last is not None:
            if question.joined and question.token != self._last.token:
                return out_of_step(rank.named, self._last.token)
            return Broken("restarted", rank)
        return None

    def beat(self, session: Hashable, id: int, question: questions.Beat, now: float) -> Told:
        """Take in a beat."""
        rank, gathering = question.rank, self.gathering
        out = self._seat(session, question, now)
        age = gathering.missed(rank, question.incarnation, question.seen, now)
        if age is not None and self._last is not None:
            late = questions.together(self._last._replace(age=age), gathering.number)
            return [*out, Answer(session, id, late)], None
        waiting = Waiting(session, id, question.incarnation, now, now + question.wait)
        if not gathering.come(rank, waiting):
            return out, None
        beats = [self.members[each].beat.said() for each in range(gathering.size)]
        self._memory, outcome = merge(self._memory, beats)
        if not isinstance(outcome, Agreed):
            return out, outcome
        self._last = outcome
        body = questions.together(outcome, gathering.number + 1)
        return [*out, *gathering.complete(body, now)], None

    def _seat(self, session: Hashable, question: questions.Beat, now: float) -> list[Answer]:
        """Note what a worker says of itself; an older process in its place is told."""
        rank = question.rank
        member = self.members.get(rank)
        if member is not None and member.beat.incarnation == question.incarnation:
            member.session, member.beat, member.at = session, question, now
            return []
        self.members[rank] = Member(session, question, now)
        twice = questions.over(Broken("twice", Ranks.of([rank])))
        return self.gathering.send_off([rank], twice, now)

    def withdraw(self, question: questions.Beat, now: float) -> list[Answer]:
        """Let a worker go that leaves before all have met; the others wait for another one."""
        member = self.members.get(question.rank)
        if member is None or member.beat.incarnation != question.incarnation:
            return []
        del self.members[question.rank]
        left = questions.over(Left(Ranks.of([question.rank])))
        return self.gathering.send_off([question.rank], left, now)

    def overdue(self, now: float) -> Told:
        """Tell those who have waited long enough, unless one of them gives up."""
        ranks, missing = self.gathering.overdue(now)
        if not any(self.members[rank].beat.final for rank in ranks):
            body = questions.encode(questions.Missing(missing))
            return self.gathering.send_off(ranks, body, now), None
        if not missing.total:
            return [], Broken("no exchange", missing, "all came, but never at the same time")
        began = any(each.beat.joined for each in self.members.values())
        kind: Kind = "missing" if began else "never started"
        return [], Broken(kind, missing)

    def follow(self, session: Hashable, id: int, question: questions.Follow) -> list[Answer]:
        """Let a member wait for what ends the group, or no longer."""
        hushed = questions.encode(questions.Hushed())
        member = self.members.get(question.rank)
        if member is None or member.beat.incarnation != question.incarnation:
            return [Answer(session, id, hushed)]
        older, member.follower = member.follower, (session, id) if question.on else None
        over = [older] if older is not None else []
        return [Answer(*each, hushed) for each in (over if question.on else [*over, (session, id)])]

    def table(self, now: float) -> list[Progress]:
        """Return how far everyone is who has beaten, by rank."""
        return [
            Progress(
                rank,
                None if each.beat.step == NO_STEP else each.beat.step,
                each.beat.phase or None,
                now - each.at,
            )
            for rank, each in sorted(self.members.items())
        ]

    def let_go(self, rank: int, session: Hashable, id: int | None, now: float) -> None:
        """Forget what a session waits for in the place of a rank; with an id, that question."""
        self.gathering.let_go(rank, session, id, now)
        member = self.members.get(rank)
        if member is None or member.follower is None:
            return
        who, question = member.follower
        if who == session and id in (None, question):
            member.follower = None

    def lose(self, session: Hashable, why: str, closed: bool) -> Broken | None:
        """A session is over; return what that means for the others, if anything.

        Args:
            session: by which some of the members may have come.
            why: what became of it.
            closed: whether the members' side closed it, as the kernel does when a process ends.
        """
        lost = [rank for rank, each in self.members.items() if each.session == session]
        if self._last is None:  # they had not joined, and may be started again
            for rank in lost:
                del self.members[rank]
            return None
        for rank in lost:
            self.members[rank].session = None
        return Broken("lost", Ranks.of(lost), why) if lost and closed else None

    def dismiss(self, body: bytes) -> list[Answer]:
        """Tell all who wait or follow."""
        followers = [each.follower for each in self.members.values() if each.follower is not None]
        return [*self.gathering.dismiss(body), *(Answer(*each, body) for each in followers)]
