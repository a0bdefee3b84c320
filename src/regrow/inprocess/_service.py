"""The groups of a job, run by the store server.

The server is connected to every rank anyway, so it is the place where a fault is one message, and a
barrier one message each way for every rank, whatever their number: it applies the rules
(`_iteration`), and tells those who wait (`_reply`). Nobody asks twice. A question that cannot be
answered yet is parked here; when a phase of the group is over, all who wait for it are told at
once, with an answer that is encoded once.

**Who is living.** A rank lives as long as the session of the process that joined it. When its side
closes the connection, as the kernel does for a process that ends, or on this host resets it, and
does not come back within the grace that the session asked for, the rank is TERMINATED. One that
fell silent is UNRESPONSIVE once the kernel has given up its connection, and the session's grace is
over; so is one whose connection was reset on its way through a network. A process that is there
after all, over another session, is believed if nobody has counted it out meanwhile.

**Whose word counts.** All clients hold the job's token, and none is trusted to be free of mistakes.
A rank is spoken for by the process that joined it, which names itself with every question; any
client may accuse it, or say that it is overdue. What cannot be read or makes no sense is answered
with a `Problem` and changes nothing.

A group is forgotten a while after the last session of its processes was over, or when all is over
in it and another of the same name begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

import msgspec

from regrow.inprocess import _messages as messages
from regrow.inprocess._group import Group, Phase, bit, ranks_of
from regrow.inprocess._iteration import Event, Lost, Tick, step
from regrow.inprocess._reply import reply
from regrow.store import Answer
from regrow.store._service import within

GROUPS: Final = 1024
"""The most groups at once."""
FORGET: Final = 60.0
"""Seconds for which a group is kept that nobody is connected to, for who comes back late."""

_Parked = dict[tuple[Hashable, int], messages.Asked]


def create() -> InprocessService:
    """Return the service for a server process."""
    return InprocessService()


class _Entry:
    """A group, and how its processes are reached."""

    __slots__ = ("forget_at", "name", "parked", "processes", "sessions", "state")

    def __init__(self, name: str, state: Group) -> None:
        self.name = name
        self.state = state
        self.processes: dict[int, str] = {}
        """The name of the process of each rank."""
        self.sessions: dict[int, Hashable] = {}
        """Over which session it spoke last."""
        self.parked: dict[int, _Parked] = {}
        """Questions that wait, by the rank that asked."""
        self.forget_at: float | None = None
        """When it may be forgotten; None while somebody is connected."""

    @property
    def deadline(self) -> float | None:
        """When something is due."""
        at = self.state.deadline
        return self.forget_at if at is None else at


class InprocessService:
    """All groups that meet in one store server; a `regrow.store.Service`."""

    def __init__(self) -> None:
        self._groups: dict[str, _Entry] = {}
        self._bound: dict[Hashable, set[tuple[str, int]]] = {}
        """The groups and ranks of each session."""
        self._suspended: dict[Hashable, float] = {}
        """Sessions without a connection, and since when."""
        self._deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """See `Service`."""
        return self._deadline

    # ------------------------------------------------------- what the server tells

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        try:
            question = messages.decode_question(within(body, messages.BODY_BYTES))
            told = self._ask(session, id, question, now)
        except (ValueError, msgspec.MsgspecError) as error:
            told = messages.Problem(f"the in-process service refused: {error}")
        if not isinstance(told, list):
            return [Answer(session, id, messages.encode(told))]
        return told

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        for name, rank in self._bound.get(session, ()):
            self._groups[name].parked.get(rank, {}).pop((session, id), None)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        self._suspended.setdefault(session, now)
        for name, rank in self._bound.get(session, ()):
            parked = self._groups[name].parked.get(rank, {})
            for asked in [asked for asked in parked if asked[0] == session]:
                del parked[asked]
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; what the client still wants to know, it asks again."""
        self._suspended.pop(session, None)
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; the ranks of the session are lost."""
        self.suspended(session, now)
        lag = now - self._suspended.pop(session)
        out: list[Answer] = []
        kind, said = "TERMINATED", f"its process is gone: {why}"
        if not closed:
            kind, said = "UNRESPONSIVE", f"nothing is heard of its process: {why}"
        for name, rank in self._bound.pop(session, ()):
            entry = self._groups[name]
            del entry.sessions[rank]
            out += self._apply(entry, Lost(rank, kind, said, lag), now)
            if not entry.sessions:
                entry.forget_at = now + FORGET
                self._plan()
        return out

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        out: list[Answer] = []
        for entry in list(self._groups.values()):
            at = entry.state.deadline
            if at is not None and at <= now:
                out += self._apply(entry, Tick(), now)
            if entry.forget_at is not None and entry.forget_at <= now:
                del self._groups[entry.name]
        self._plan()
        return out

    # ------------------------------------------------------------------ questions

    def _ask(
        self, session: Hashable, id: int, question: messages.Asked, now: float
    ) -> messages.Told | list[Answer]:
        """Return the answer to the question, or all answers that are due now."""
        out: list[Answer] = []
        if isinstance(question, messages.Join):
            joined = self._join(session, question, now)
            if not isinstance(joined, list):
                return joined
            out += joined
        elif isinstance(question, messages.Accuse):
            return self._accuse(session, id, question, now)
        entry = self._groups.get(question.group)
        if entry is None:
            return messages.Unknown(f"there is no group {question.group!r} in this store")
        # A soft time-out may be told by another one than the rank: it says nothing of its session.
        outside = isinstance(question, messages.Report) and question.number == messages.OVERDUE
        process = entry.processes.get(question.rank)
        if process is None or question.process not in (process, "" if outside else process):
            return messages.Unknown(
                f"this process is not rank {question.rank} of the group {question.group!r}"
            )
        if not outside:
            self._bind(entry, question.rank, session)
        out += self._apply(entry, question, now)
        told = reply(entry.state, question, now)
        if told is None:
            entry.parked.setdefault(question.rank, {})[session, id] = question
            return out
        return [Answer(session, id, messages.encode(told)), *out]

    def _join(
        self, session: Hashable, question: messages.Join, now: float
    ) -> messages.Told | list[Answer]:
        """Have the process speak for its rank, or say why not."""
        name, rank = question.group, question.rank
        if not name:
            raise ValueError("a group needs a name")
        entry = self._groups.get(name)
        known = entry is not None and entry.processes.get(rank) == question.process
        if entry is None or (entry.state.finished and not known):
            entry = self._begin(question)
        state = entry.state
        if (question.size, question.timeouts) != (state.size, state.timeouts):
            raise ValueError(
                f"the group {name!r} was set up by the first rank with {state.size} ranks and "
                f"{state.timeouts}, and rank {rank} says {question.size} ranks and "
                f"{question.timeouts}; give all ranks the same"
            )
        if rank >= state.size:
            raise ValueError(f"there is no rank {rank} among {state.size} ranks")
        if known or rank not in entry.processes:
            entry.processes[rank] = question.process
            return []
        living = state.living & bit(rank)
        if state.phase is not Phase.JOINING:
            there = "runs in another process" if living else "was counted out"
            return messages.Failed(
                False, f"rank {rank} of the group {name!r} {there}, and the others have begun"
            )
        if living and entry.sessions.get(rank) not in self._suspended:
            return messages.Failed(
                False, f"rank {rank} has joined already, from another process: ranks must be unique"
            )
        gone = Lost(rank, "TERMINATED", "another process has taken its place")
        out = self._apply(entry, gone, now)
        entry.processes[rank] = question.process
        return out

    def _accuse(
        self, session: Hashable, id: int, question: messages.Accuse, now: float
    ) -> list[Answer]:
        out: list[Answer] = []
        news = False
        for entry in list(self._groups.values()):
            process = entry.processes.get(question.rank)
            meant = question.group in ("", entry.name) and question.process in ("", process)
            if meant and process is not None:
                gone = self._suspended.get(entry.sessions.get(question.rank), now)
                lost = Lost(question.rank, question.kind, question.message, now - gone)
                out += self._apply(entry, lost, now)
                told = reply(entry.state, question, now)
                news = news or (isinstance(told, messages.Noted) and told.news)
        return [Answer(session, id, messages.encode(messages.Noted(news))), *out]

    def _begin(self, question: messages.Join) -> _Entry:
        old = self._groups.get(question.group)
        if old is not None:
            for rank in list(old.sessions):
                self._unbind(old, rank)
        elif len(self._groups) >= GROUPS:
            raise ValueError(f"{GROUPS} groups meet here already, and that is the most")
        entry = _Entry(question.group, Group(question.size, question.timeouts))
        self._groups[question.group] = entry
        return entry

    # ------------------------------------------------------------------ the rules

    def _apply(self, entry: _Entry, event: Event, now: float) -> list[Answer]:
        """Take in an event, and answer those for whom it changes something."""
        before = entry.state
        entry.state = state = step(before, event, now)
        if state is before:
            return []
        if state.deadline != before.deadline:
            self._plan()
        turned = (
            state.phase is not before.phase
            or state.iteration != before.iteration
            or state.completed != before.completed
            or state.failure is not before.failure
        )
        if turned:
            return self._wake(entry, list(entry.parked), now)
        return self._wake(entry, ranks_of(before.living & ~state.living), now)

    def _wake(self, entry: _Entry, ranks: Iterable[int], now: float) -> list[Answer]:
        """Answer what can be answered now of what these ranks have asked."""
        out: list[Answer] = []
        same: dict[tuple[type, int], bytes | None] = {}
        for rank in ranks:
            parked = entry.parked.get(rank, {})
            living = entry.state.living & bit(rank)
            for asked, question in list(parked.items()):
                like = type(question), getattr(question, "iteration", 0)
                if living and like in same:
                    body = same[like]
                else:
                    told = reply(entry.state, question, now)
                    body = None if told is None else messages.encode(told)
                    if living:
                        same[like] = body
                if body is not None:
                    del parked[asked]
                    out.append(Answer(*asked, body))
        return out

    # ---------------------------------------------------------------- book-keeping

    def _plan(self) -> None:
        deadlines = (entry.deadline for entry in self._groups.values())
        self._deadline = min((at for at in deadlines if at is not None), default=None)

    def _bind(self, entry: _Entry, rank: int, session: Hashable) -> None:
        if entry.sessions.get(rank) != session:
            self._unbind(entry, rank)
            entry.parked.pop(rank, None)  # of a session that it has given up
            entry.sessions[rank] = session
            entry.forget_at = None
            self._bound.setdefault(session, set()).add((entry.name, rank))

    def _unbind(self, entry: _Entry, rank: int) -> None:
        session = entry.sessions.pop(rank, None)
        bound = self._bound.get(session)
        if bound is not None:
            bound.discard((entry.name, rank))
            if not bound:
                del self._bound[session]
