"""The service "heartbeat" of a store server: which worker of a group is missing, and when.

The server is connected to every worker anyway. So a beat costs one message each way, for any number
of workers. Each worker asks once. When the last worker has asked, all workers get one answer. The
length of the answer does not grow with the number of workers (`merge`). If some workers do not
arrive, each worker gets the missing ranks when its own time ends.

Between beats, each worker has one more question parked here. The server answers it when something
ends the group. So all workers learn that a process has ended as soon as its session ends: the
kernel closes the connection, and the session gets a grace period to reconnect. A reset connection,
or a silent host, proves nothing about the worker. In that case only the worker's beats count.

**Identity.** A worker is identified by its incarnation, the number that it drew when it started. It
may use another session than before; another incarnation is another process. Two processes may claim
one rank:

- While the group forms, the newer process takes the place, because a launcher may have restarted
  the worker. The older process gets this fact as its answer, if it still waits.
- After a complete beat, a new process ends the group. The report is a restarted worker or, if the
  process shows a token of its own, a worker of another run.

**The end of a group** is the same for all workers. The service answers the workers that wait or
follow, and keeps the answer for workers that ask later. The first worker that gives up ends the
group for its reason. All workers give up within moments, and the others would otherwise report the
end of the first worker as the cause. The name is then free for a new group, so restarted workers
never meet the rest of the old group.

When the server itself restarts, the workers form the group again with their current state. They
have joined already, so this is not a first exchange (see `merge`).

**Full sets.** A worker is present only while its question is parked. A worker that gave up, or lost
its connection, does not count for workers that arrive later. So a set is full only at a moment at
which all workers wait. The time bound of the heartbeat depends on this.

Missing ranks follow another rule. The waits of the workers end one after the other. A worker that
gave up a moment ago is not missing for the next worker. A rank is missing for a waiting worker if
the two never waited at the same time.

The group keeps the last full set for workers that lost the answer with their connection. Such a
worker asks again with the number of the last set that it has seen, and gets the same answer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from regrow.heartbeat import messages
from regrow.heartbeat.failure import NEVER_TOGETHER, Kind, Ranks
from regrow.heartbeat.merge import Agreed, Beat, Broken, Memory, WorkersLeft, merge, out_of_step
from regrow.heartbeat.terms import check_rank
from regrow.store import Answer, StoreServiceError, within

GROUPS: Final = 1024
"""Maximum number of groups at the same time."""
KEPT: Final = 16384
"""Number of workers of ended groups for which the service keeps the end."""
TOGETHER: Final = 0.05
"""Seconds within which waits end together, so that the missing ranks are computed once for all."""


Result = tuple[list[Answer], WorkersLeft | Broken | None]
"""The answers that are due, and the end of the group, if the group has ended."""


class Waiter(NamedTuple):
    """A worker's beat that is not answered yet."""

    session: Hashable
    id: int
    asked: float
    until: float
    """Server time at which the worker gets the missing ranks as its answer."""


@dataclass(slots=True)
class GroupMember:
    """One worker of a group."""

    session: Hashable | None
    """The member's last session; None: that session has ended."""
    beat: Beat
    """The member's last beat."""
    at: float
    """Server time at which that beat arrived."""
    follower: tuple[Hashable, int] | None = None
    """The member's parked question for the end of the group."""


class HeartbeatGroup:
    """A group of workers with a common heartbeat; times are those of the server.

    Args:
        name: name of the group.
        size: number of workers.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.members: dict[int, GroupMember] = {}
        """The members, by rank."""
        self._waiting: dict[int, Waiter] = {}
        """The parked beat of each rank."""
        self._gone: dict[int, float] = {}
        """Server time at which the last wait of each rank ended, since the last full set."""
        self._memory: Memory = ()
        self._number = 0
        """The number of full sets so far."""
        self._last: Agreed | None = None
        """The meaning of the last full set; None: the group is still forming."""
        self._last_at = 0.0

    @property
    def is_deserted(self) -> bool:
        """Whether no member has a session."""
        return all(each.session is None for each in self.members.values())

    @property
    def deadline(self) -> float:
        """Server time at which the first wait ends."""
        return min((each.until for each in self._waiting.values()), default=math.inf)

    def end_of(self, question: messages.BeatQuestion) -> WorkersLeft | Broken | None:
        """Return the end of the group that this beat alone causes; None: it causes no end."""
        beat, size = question.beat, self.size
        rank = Ranks.of([beat.rank])
        if question.size != size:
            return Broken("wrong world size", rank, f"{question.size} instead of {size}")
        member = self.members.get(beat.rank)
        known = member is not None and member.beat.incarnation == beat.incarnation
        if beat.leaving:
            return WorkersLeft(rank) if known and self._last is not None else None
        if member is not None and not known and self._last is not None:
            if beat.joined and beat.token != self._last.token:
                return out_of_step(rank.named, self._last.token)
            return Broken("restarted", rank)
        return None

    def beat(
        self, session: Hashable, id: int, question: messages.BeatQuestion, now: float
    ) -> Result:
        """Add a beat; return the answers that are due, and the group's end if it has ended."""
        rank = question.beat.rank
        out = self._update(session, question.beat, now)
        # Every member was in the last full set: a new process of a rank ends the group.
        if self._last is not None and question.seen == self._number - 1:
            agreed = self._last._replace(age=now - self._last_at)
            late = messages.encode(messages.InStep(self._number, agreed))
            return [*out, Answer(session, id, late)], None
        self._waiting[rank] = Waiter(session, id, now, now + question.wait)
        if len(self._waiting) < self.size:
            return out, None
        beats = [self.members[each].beat for each in range(self.size)]
        self._memory, outcome = merge(self._memory, beats)
        if not isinstance(outcome, Agreed):
            return out, outcome
        self._number, self._last, self._last_at = self._number + 1, outcome, now
        body = messages.encode(messages.InStep(self._number, outcome))
        out += self._answer(range(self.size), body, now)
        self._gone.clear()
        return out, None

    def _update(self, session: Hashable, beat: Beat, now: float) -> list[Answer]:
        """Update a member; the call of an older process with the same rank ends with "twice"."""
        rank = beat.rank
        member = self.members.get(rank)
        if member is not None and member.beat.incarnation == beat.incarnation:
            member.session, member.beat, member.at = session, beat, now
            return []
        self.members[rank] = GroupMember(session, beat, now)
        twice = messages.encode(Broken("twice", Ranks.of([rank])))
        return self._answer([rank], twice, now)

    def remove(self, beat: Beat, now: float) -> list[Answer]:
        """Remove a worker that leaves before all have met; the others wait for a new worker."""
        member = self.members.get(beat.rank)
        if member is None or member.beat.incarnation != beat.incarnation:
            return []
        del self.members[beat.rank]
        left = messages.encode(WorkersLeft(Ranks.of([beat.rank])))
        return self._answer([beat.rank], left, now)

    def overdue(self, now: float) -> Result:
        """Answer the workers whose wait has ended; after the last try of one, end the group.

        Args:
            now: at or after `deadline`.
        """
        ranks = [rank for rank, each in self._waiting.items() if each.until <= now + TOGETHER]
        since = min(self._waiting[rank].asked for rank in ranks)
        missing = Ranks.of(
            rank
            for rank in range(self.size)
            if rank not in self._waiting and self._gone.get(rank, -math.inf) < since
        )
        if not any(self.members[rank].beat.final for rank in ranks):
            return self._answer(ranks, messages.encode(messages.Missing(missing)), now), None
        if not missing.total:
            return [], Broken("no exchange", missing, NEVER_TOGETHER)
        began = any(each.beat.joined for each in self.members.values())
        kind: Kind = "missing" if began else "never started"
        return [], Broken(kind, missing)

    def follow(self, session: Hashable, id: int, question: messages.FollowGroup) -> list[Answer]:
        """Park a member's question for the end of the group, or refuse it."""
        member = self.members.get(question.rank)
        if member is None or member.beat.incarnation != question.incarnation:
            return [Answer(session, id, messages.encode(messages.UnknownGroup()))]
        member.follower = (session, id)
        return []

    def forget(self, rank: int, session: Hashable, id: int | None, now: float) -> None:
        """Remove the questions of a session for a rank; with an id, only that question."""
        waiting = self._waiting.get(rank)
        if waiting is not None and waiting.session == session and id in (None, waiting.id):
            del self._waiting[rank]
            self._gone[rank] = now
        member = self.members.get(rank)
        if member is None or member.follower is None:
            return
        owner, question = member.follower
        if owner == session and id in (None, question):
            member.follower = None

    def session_ended(self, session: Hashable, why: str, closed: bool) -> Broken | None:
        """Handle the end of a session; return the end of the group, if the session's end causes it.

        Args:
            session: may belong to some members, or to none.
            why: how the session ended.
            closed: whether the members' side closed it, as the kernel does when a process ends.
        """
        lost = [rank for rank, each in self.members.items() if each.session == session]
        if self._last is None:  # these workers had not joined yet, and may be restarted
            for rank in lost:
                del self.members[rank]
            return None
        for rank in lost:
            self.members[rank].session = None
        return Broken("lost", Ranks.of(lost), why) if lost and closed else None

    def answer_all(self, body: bytes) -> list[Answer]:
        """Answer all workers that wait or follow."""
        parked = [(each.session, each.id) for each in self._waiting.values()]
        parked += [each.follower for each in self.members.values() if each.follower is not None]
        return [Answer(*each, body) for each in parked]

    def _answer(self, ranks: Iterable[int], body: bytes, now: float) -> list[Answer]:
        """Answer some workers, if they wait."""
        answers = []
        for rank in ranks:
            waiting = self._waiting.pop(rank, None)
            if waiting is not None:
                self._gone[rank] = now
                answers.append(Answer(waiting.session, waiting.id, body))
        return answers


def create() -> HeartbeatService:
    """Create the service, for a server process."""
    return HeartbeatService()


class HeartbeatService:
    """The heartbeats of all groups that meet in one store server; a `regrow.store.Service`."""

    def __init__(self) -> None:
        self._groups: dict[str, HeartbeatGroup] = {}
        self._places: dict[Hashable, set[tuple[str, int]]] = {}
        """The groups and ranks of each session."""
        self._ended: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """The answer with the end of the group, by group name and incarnation; the latest last."""
        self._now = 0.0
        self._deadline = math.inf

    @property
    def deadline(self) -> float | None:
        """See `Service`; the value may be too early, but never too late."""
        return None if self._deadline == math.inf else self._deadline

    # ------------------------------------------------------- calls of the server

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        try:
            question = messages.decode_question(within(body, messages.BODY_BYTES))
            match question:
                case messages.BeatQuestion():
                    out = self._beat(session, id, question)
                case messages.FollowGroup():
                    return self._follow(session, id, question)
                case messages.GetProgress(name):
                    return [Answer(session, id, self._table(name))]
        except (ValueError, msgspec.MsgspecError) as error:
            raise StoreServiceError(f"the heartbeat service refused: {error}") from None
        self._deadline = min(self._deadline, now + question.wait)
        return out

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        self._forget(session, id)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        self._now = now
        self._forget(session)
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; the client repeats its questions."""
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; a worker that has not left is lost."""
        self.suspended(session, now)
        out: list[Answer] = []
        for name in dict.fromkeys(name for name, _ in self._places.pop(session, ())):
            group = self._groups.get(name)
            lost = group.session_ended(session, why, closed) if group is not None else None
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
            if group.deadline <= now:
                answers, outcome = group.overdue(now)
                out += answers if outcome is None else self._end(group, outcome)
        self._deadline = min((each.deadline for each in self._groups.values()), default=math.inf)
        return out

    # ------------------------------------------------------------------ questions

    def _beat(self, session: Hashable, id: int, question: messages.BeatQuestion) -> list[Answer]:
        name, beat = question.group, question.beat
        check_rank(beat.rank, question.size)
        ended = self._ended.get((name, beat.incarnation))
        if ended is not None:
            return [Answer(session, id, ended)]
        group = self._groups.get(name)
        outcome = group.end_of(question) if group is not None else None
        if group is not None and outcome is not None:
            return [Answer(session, id, messages.encode(outcome)), *self._end(group, outcome)]
        if beat.leaving:  # the worker has not met the others yet
            answer = Answer(session, id, messages.encode(WorkersLeft(Ranks.of([beat.rank]))))
            return [answer, *(group.remove(beat, self._now) if group is not None else [])]
        if group is None:
            if len(self._groups) >= GROUPS:
                raise ValueError(f"this server already has {GROUPS} groups; use another server")
            group = self._groups[name] = HeartbeatGroup(name, question.size)
        self._places.setdefault(session, set()).add((name, beat.rank))
        out, outcome = group.beat(session, id, question, self._now)
        return out if outcome is None else [*out, *self._end(group, outcome)]

    def _follow(self, session: Hashable, id: int, question: messages.FollowGroup) -> list[Answer]:
        ended = self._ended.get((question.group, question.incarnation))
        if ended is not None:
            return [Answer(session, id, ended)]
        group = self._groups.get(question.group)
        if group is None:
            return [Answer(session, id, messages.encode(messages.UnknownGroup()))]
        return group.follow(session, id, question)

    def _table(self, name: str) -> bytes:
        """The progress of each member of a group that has sent a beat, by rank."""
        group = self._groups.get(name)
        members = sorted(group.members.items()) if group is not None else []
        rows = [member.beat.progress(self._now - member.at) for _, member in members]
        return messages.encode(messages.Table(rows))

    # ---------------------------------------------------------------- book-keeping

    def _forget(self, session: Hashable, id: int | None = None) -> None:
        """Remove the questions of a session; with an id, only that question."""
        for name, rank in self._places.get(session, ()):
            group = self._groups.get(name)
            if group is not None:
                group.forget(rank, session, id, self._now)

    def _end(self, group: HeartbeatGroup, outcome: WorkersLeft | Broken) -> list[Answer]:
        """Answer all workers with the end of the group, now or when they ask."""
        body = messages.encode(outcome)
        for member in group.members.values():
            self._ended[group.name, member.beat.incarnation] = body
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        del self._groups[group.name]
        return group.answer_all(body)
