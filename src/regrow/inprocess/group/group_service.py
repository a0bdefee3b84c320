"""Service of the store server that runs the groups: when a rank counts as lost, and the replies.

The server has a connection to every rank. So a fault costs one message, and a barrier one message
in each direction per rank, for any number of ranks. The service applies the rules (`group_rules`)
and sends the replies (`group`). Ranks do not poll. A question without an answer yet waits here.
When a phase of the group ends, the service answers all questions that wait for it at once, and
encodes the answer once.

**Liveness.** A rank is alive while its process has a session. The connection can end in two ways:

- The rank's side closes it: the process does, or the kernel when the process ends. A reset by a
  process on this host counts as a close. If the rank does not return within the grace of its
  session, it is TERMINATED.
- The rank falls silent and the kernel gives up the connection, or the connection is reset on its
  way through a network. If the rank does not return within the grace of its session, it is
  UNRESPONSIVE.

A process that returns over another session is accepted if it has not been evicted meanwhile.

**Authority.** All clients hold the job's token, and the server assumes that each client may have
bugs. Only the process that joined a rank acts for that rank; it sends its name with every question,
and a session acts for one rank only. A client that knows the name of a rank's process may report
the rank as ended (`ReportDead`) or as overdue. The server answers a malformed or impossible message
with a `GroupRefusal` and changes nothing.

A group is deleted `FORGET` seconds after the last session of its processes ended. It is also
deleted when it is finished and another group of the same name begins. The server keeps its
name and its last iteration: a process that replaces another one runs the script from its start, so
it asks about calls that the other ranks have completed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import Group, GroupPhase, bit, ranks_of, reply
from regrow.inprocess.group.group_messages import GroupRefusal, Reason
from regrow.inprocess.group.group_rules import Event, Lost, Tick, step
from regrow.store import Answer, within

GROUPS: Final = 1024
"""Largest number of groups at once."""
FORGET: Final = 60.0
"""Seconds for which a group without a connection is kept, for a process that reconnects late."""

DELETED: Final = 16_384
"""Number of deleted groups of which the name and the last iteration are kept."""


@dataclass(slots=True, eq=False)
class _GroupRecord:
    """A group and the processes of its ranks."""

    name: str
    state: Group
    ranks: dict[int, _RankRecord] = field(default_factory=dict)
    sessions: int = 0
    """Number of ranks with a session."""
    forget_at: float | None = None
    """When the group may be deleted; None while a rank has a session."""


@dataclass(slots=True, eq=False)
class _RankRecord:
    """The process that joined as a rank."""

    group: _GroupRecord
    rank: int
    process: str
    """Name of the process."""
    incarnation: int = 0
    """Number of processes that had the rank before."""
    session: Hashable | None = None
    """Its latest session; None if the session is over."""
    parked: dict[int, messages.Asked] = field(default_factory=dict)
    """Waiting questions of that session, by their id."""


class InprocessService:
    """All groups that meet in one store server; a `regrow.store.Service`.

    Args:
        step: rules of a group.
        reply: answers to ranks; see `regrow.inprocess.group.group`.
    """

    def __init__(
        self,
        step: Callable[[Group, Event, float], Group] = step,
        reply: Callable[[Group, messages.Asked, float], messages.GroupReply | None] = reply,
    ) -> None:
        self._step = step
        self._reply = reply
        self._groups: dict[str, _GroupRecord] = {}
        self._deleted: dict[str, int | None] = {}
        """The last iteration of each deleted group, the oldest first; None if its call is over."""
        self._bound: dict[Hashable, _RankRecord] = {}
        """The rank of each session."""
        self._suspended: dict[Hashable, float] = {}
        """Sessions without a connection, with the time of the loss."""
        self.deadline: float | None = None
        """See `Service`."""

    # ------------------------------------------------- events from the server

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        try:
            question = messages.decode_question(within(body, messages.BODY_BYTES))
            if isinstance(question, messages.NotReplaced):
                out = [
                    answer
                    for group in list(self._groups.values())
                    for answer in self._apply(group, question, now)
                ]
                return [Answer(session, id, messages.encode(messages.Noted())), *out]
            return self._ask(session, id, question, now)
        except _RefusedError as error:
            refusal = GroupRefusal(error.reason, str(error))
        except (ValueError, msgspec.MsgspecError) as error:
            refusal = GroupRefusal("impossible", f"the in-process service refused: {error}")
        return [Answer(session, id, messages.encode(refusal))]

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        if session in self._bound:
            self._bound[session].parked.pop(id, None)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        self._suspended.setdefault(session, now)
        if session in self._bound:
            self._bound[session].parked.clear()
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; the client repeats its open questions."""
        self._suspended.pop(session, None)
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; the rank of the session is lost."""
        lag = now - self._suspended.pop(session, now)
        record = self._bound.get(session)
        if record is None:
            return []
        self._unbind(record)
        kind, text = "TERMINATED", f"its process is gone: {why}"
        if not closed:
            kind, text = "UNRESPONSIVE", f"its process sends nothing: {why}"
        out = self._apply(record.group, Lost(record.rank, kind, text, lag), now)
        if not record.group.sessions:
            record.group.forget_at = now + FORGET
            self._plan()
        return out

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        out: list[Answer] = []
        for group in list(self._groups.values()):
            at = group.state.deadline
            if at is not None and at <= now:
                out += self._apply(group, Tick(), now)
            if group.forget_at is not None and group.forget_at <= now:
                self._delete(group)
        self._plan()
        return out

    # ------------------------------------------------------------------ questions

    def _ask(
        self, session: Hashable, id: int, question: messages.Asked, now: float
    ) -> list[Answer]:
        """Return all answers that are due after a question.

        Raises:
            _RefusedError: the rank cannot continue.
            ValueError: the question is impossible.
        """
        out: list[Answer] = []
        # A monitor reports over its own session, which must not become the session of the rank.
        by_monitor = isinstance(question, messages.ReportDead) or (
            isinstance(question, messages.Report) and question.number == messages.OVERDUE
        )
        if isinstance(question, messages.Join):
            if question.incarnation and self._deleted.get(question.group, 0) is None:
                return [Answer(session, id, messages.encode(messages.Over()))]
            out += self._join(question, now)
        group = self._groups.get(question.group)
        record = None if group is None else group.ranks.get(question.rank)
        if record is None or record.process != question.process:
            raise _RefusedError(
                "unknown",
                f"the store has no entry for this process (initial rank {question.rank} of the "
                f"group {question.group!r}), because the store was restarted or has removed the "
                f"group. Start the job again",
            )
        event: Event = question
        if isinstance(question, messages.ReportDead):
            lag = now - self._suspended.get(record.session, now)
            event = Lost(question.rank, question.kind, question.message, lag)
        if not by_monitor:
            self._bind(record, session)
        out += self._apply(record.group, event, now)
        answer = self._reply(record.group.state, question, now)
        if answer is None:
            record.parked[id] = question
            return out
        return [Answer(session, id, messages.encode(answer)), *out]

    def _join(self, question: messages.Join, now: float) -> list[Answer]:
        """Register the process for its rank; return the answers that are due after that.

        Raises:
            _RefusedError: another process has the rank.
            ValueError: the group differs from the group of the other ranks.
        """
        name, rank = question.group, question.rank
        group = self._groups.get(name)
        record = None if group is None else group.ranks.get(rank)
        known = record is not None and record.process == question.process
        newer = record is not None and question.incarnation > record.incarnation
        if record is not None and question.incarnation < record.incarnation:
            raise _RefusedError(
                "mismatch",
                f"another process has taken the place of this one as initial rank {rank} of the "
                f"group {name!r}",
            )
        is_over = group is not None and group.state.phase is GroupPhase.OVER
        if group is None or (group.state.finished and not known and not (newer and is_over)):
            group, record = self._begin(question), None
        state = group.state
        if (question.size, question.timeouts) != (state.size, state.timeouts):
            raise ValueError(
                f"initial rank {rank} joins the group {name!r} with {question.size} ranks and "
                f"{question.timeouts}, but the first rank joined with {state.size} ranks and "
                f"{state.timeouts}: give all ranks the same values"
            )
        if rank >= state.size:
            raise ValueError(
                f"initial rank {rank} does not exist in the group {name!r} of {state.size} ranks: "
                f"give all ranks the same world size, and ranks from 0 to {state.size - 1}"
            )
        if record is None:
            group.ranks[rank] = _RankRecord(group, rank, question.process, question.incarnation)
        if record is None or known:
            return []
        living = state.living & bit(rank)
        if newer:
            text = "its agent replaces its process"
            out = self._apply(group, Lost(rank, "TERMINATED", text), now)
            if group.state.finished and not is_over:  # it was the last rank that could continue
                group = self._begin(question)
                group.ranks[rank] = _RankRecord(group, rank, question.process, question.incarnation)
                return out
            self._unbind(record)
            record.process, record.incarnation = question.process, question.incarnation
            return out
        if state.phase is not GroupPhase.JOINING:
            why = "runs in another process" if living else "was removed as lost"
            raise _RefusedError(
                "mismatch",
                f"initial rank {rank} of the group {name!r} {why}, and the other ranks have "
                f"already started: this process cannot join. Start the job again",
            )
        if living and record.session not in self._suspended:
            raise _RefusedError(
                "mismatch",
                f"another process has joined as initial rank {rank} already: ranks must be unique",
            )
        out = self._apply(group, Lost(rank, "TERMINATED", "another process replaces it"), now)
        record.process = question.process
        return out

    def _begin(self, question: messages.Join) -> _GroupRecord:
        """Create a group, in place of an earlier one of this name.

        If a process that replaces another one begins it, all ranks of the earlier group have ended.
        The new group then continues the numbers of the iterations, because keys of earlier
        iterations may be left.
        """
        if not question.group:
            raise ValueError("a group needs a name")
        old = self._groups.get(question.group)
        if old is not None:
            for record in old.ranks.values():
                self._unbind(record)
        elif len(self._groups) >= GROUPS:
            raise ValueError(f"this store has {GROUPS} groups already, which is the maximum")
        last = self._deleted.pop(question.group, None)
        if old is not None:
            last = old.state.iteration
        first = last + 1 if last is not None and question.incarnation else 0
        state = Group(question.size, question.timeouts, iteration=first)
        group = _GroupRecord(question.group, state)
        self._groups[question.group] = group
        return group

    def _delete(self, group: _GroupRecord) -> None:
        del self._groups[group.name]
        is_over = group.state.phase is GroupPhase.OVER
        self._deleted[group.name] = None if is_over else group.state.iteration
        if len(self._deleted) > DELETED:
            del self._deleted[next(iter(self._deleted))]

    # ------------------------------------------------------------------ the rules

    def _apply(self, group: _GroupRecord, event: Event, now: float) -> list[Answer]:
        """Apply an event to the group, and answer the parked questions that have an answer now."""
        before = group.state
        group.state = state = self._step(before, event, now)
        if state is before:
            return []
        if state.deadline != before.deadline:
            self._plan()
        ranks: Iterable[int] = ranks_of(before.living & ~state.living)
        if _stage(state) != _stage(before):
            ranks = group.ranks
        out: list[Answer] = []
        bodies: dict[tuple[type, int, int], bytes | None] = {}
        for rank in ranks:
            record, living = group.ranks[rank], state.living & bit(rank)
            for id, question in list(record.parked.items()):
                # Living ranks get the same answer, so it is encoded once. It depends on the rank
                # only if a new process joins.
                own = not living or isinstance(question, messages.Join)
                like = type(question), getattr(question, "iteration", 0), rank if own else -1
                if like not in bodies:
                    answer = self._reply(state, question, now)
                    bodies[like] = None if answer is None else messages.encode(answer)
                body = bodies[like]
                if body is not None:
                    del record.parked[id]
                    out.append(Answer(record.session, id, body))
        return out

    # ---------------------------------------------------------------- book-keeping

    def _plan(self) -> None:
        deadlines = (
            group.forget_at if group.state.deadline is None else group.state.deadline
            for group in self._groups.values()
        )
        self.deadline = min((at for at in deadlines if at is not None), default=None)

    def _bind(self, record: _RankRecord, session: Hashable) -> None:
        bound = self._bound.get(session, record)
        if bound is not record:
            raise ValueError(
                f"this session belongs to initial rank {bound.rank} of group {bound.group.name!r}"
            )
        if record.session != session:
            self._unbind(record)
            record.session, record.group.forget_at = session, None
            record.group.sessions += 1
            self._bound[session] = record

    def _unbind(self, record: _RankRecord) -> None:
        record.parked.clear()
        if record.session is not None:
            del self._bound[record.session]
            record.session = None
            record.group.sessions -= 1


def _stage(group: Group) -> tuple[object, ...]:
    """Return the part of the state on which the answers to living ranks depend."""
    return group.phase, group.iteration, group.completed, group.failure


class _RefusedError(Exception):
    """The rank that asks cannot continue."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
