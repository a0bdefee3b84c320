"""The rules of the rounds, run by the store server.

The server is connected to every node anyway, so it is the place where a join costs one message
each way whatever the number of nodes: it applies the event (`_round`), and tells those for whom
something has changed. Nobody asks twice. A node that follows the rounds has one question parked
here, which is answered when there is news for it.

**Whom to tell.** Only nodes that an event concerns are looked at (`_job`), so a join costs what it
changes. How many nodes wait is gathered for a moment before the members are told, so that a hundred
arrivals are told once.

**Who is alive.** A node lives as long as the session that joined it. When the session is over,
because its client said so, or closed its connection and did not come back within its grace, the
node is lost at once. A connection that was reset does not show that anybody has ended; its node,
and one whose host is silent, is given up by `_patience` when its beats stop coming, so that its
workers have no lease any more.
A beat says how many of them were answered, and counts when that has grown: who is heard but cannot
hear has no lease any more, and would keep the others waiting for it. The server calls this service
when it is due only after it has read what had arrived, and one look adds one keep-alive interval of
silence at most; so a server that was stopped expels nobody.

**Whose word counts.** All clients hold the job's token, and none is trusted to be free of
mistakes. A node is spoken for by the session that joined it, and by no other; what cannot be read
or makes no sense is answered with a `Problem` and changes nothing.

A job that has no node any more is forgotten after a while. What the nodes of a round keep in the
store goes under the job's life, a random name, so that a job of the same id finds nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import msgspec

from regrow.rendezvous import _questions as questions
from regrow.rendezvous._driver import answer, view
from regrow.rendezvous._job import FORGET, Job, concerned, is_empty
from regrow.rendezvous._news import (
    Close,
    Effect,
    Event,
    Join,
    LastCall,
    LastCallOver,
    Lost,
    Refused,
    subject,
)
from regrow.rendezvous._patience import look
from regrow.rendezvous._round import holds, step
from regrow.rendezvous._waiting import explain_timeout
from regrow.store import Answer
from regrow.store._service import within

JOBS: Final = 1024
"""The most jobs at once."""
LIVES: Final = 64
"""The most nodes of one session."""
TEXT: Final = 2000
"""The longest explanation, in characters."""
GATHER: Final = 0.1
"""Seconds for which news of waiting nodes is gathered."""


def create() -> RendezvousService:
    """Return the service for a server process."""
    return RendezvousService(lambda: os.urandom(6).hex())


class _Client:
    """What is remembered of one session."""

    __slots__ = ("following", "lives")

    def __init__(self) -> None:
        self.lives: dict[tuple[str, str], None] = {}
        """Its nodes, as job and id."""
        self.following: set[tuple[str, str]] = set()
        """Its parked questions."""


class RendezvousService:
    """The rounds of all jobs that meet in one store server; a `regrow.store.Service`.

    Args:
        new_life: returns a fresh random name for the life of a job.
    """

    def __init__(self, new_life: Callable[[], str]) -> None:
        self._new_life = new_life
        self._jobs: dict[str, Job] = {}
        self._clients: dict[Hashable, _Client] = {}
        self._deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """See `Service`; it may be too early, never too late."""
        return self._deadline

    # ------------------------------------------------------- what the server tells

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        try:
            question = questions.decode_question(within(body, questions.BODY_BYTES))
            if isinstance(question, questions.Beat):
                return [Answer(session, id, self._beat(session, question, now))]
            if isinstance(question, questions.Explain):
                return [Answer(session, id, self._explain(question))]
            if isinstance(question, questions.Follow):
                return self._follow(session, id, question, now)
            own, others = self._submit(session, question, now)
            return [Answer(session, id, own), *others]
        except (ValueError, msgspec.MsgspecError) as error:
            problem = questions.Problem(f"the rendezvous service refused: {error}")
            return [Answer(session, id, questions.encode(problem))]

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        client = self._clients.get(session)
        for run_id, node in list(client.following) if client else ():
            job = self._jobs[run_id]
            if job.followers[node][:2] == (session, id):
                self._unfollow(job, node)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        client = self._clients.get(session)
        for run_id, node in list(client.following) if client else ():
            self._unfollow(self._jobs[run_id], node)
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; what the client still wants to know, it asks again."""
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; the nodes of the session are lost, if their process has ended."""
        self.suspended(session, now)
        client = self._clients.pop(session, None)
        out: list[Answer] = []
        for run_id, node in client.lives if client else ():
            job = self._jobs[run_id]
            if not closed and (job.begun or not job.state.fixed):
                continue
            out += self._apply(job, Lost(node, why), now)[1]
            self._unbind(job, node)
        return out

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        out: list[Answer] = []
        for job in list(self._jobs.values()):
            if job.gather_at is not None and job.gather_at <= now:
                job.gather_at = None
                out += self._wake(job, list(job.state.ranks))
            if job.look_at is not None and job.look_at <= now:
                out += self._look(job, now)
            if job.empty_at is not None and job.empty_at + FORGET <= now:
                self._forget(job, now)
        self._deadline = min(
            (at for job in self._jobs.values() if (at := job.at) is not None), default=None
        )
        return out

    # ------------------------------------------------------------------ questions

    def _beat(self, session: Hashable, question: questions.Beat, now: float) -> bytes:
        job, id = self._jobs.get(question.job), question.id
        if job is None:
            return questions.encode(questions.Beaten("", False))
        held = False
        if job.lives.get(id) == session:
            if question.answered > job.beats[id]:
                job.beats[id], job.heard_at[id] = question.answered, now
            # A lease that begins now must be over before the silence since then is too long.
            in_time = now <= job.heard_at[id] + job.bounds.kill
            held = in_time and holds(job.state, id, question.token)
        return questions.encode(questions.Beaten(job.life, held))

    def _explain(self, question: questions.Explain) -> bytes:
        job = self._jobs.get(question.job)
        if job is None:
            raise ValueError(f"the server does not know the job {question.job!r}")
        text = explain_timeout(job.state, job.run_id, question.id, question.waited)
        return questions.encode(questions.Explained(_shortened(text)))

    def _follow(
        self, session: Hashable, id: int, question: questions.Follow, now: float
    ) -> list[Answer]:
        job = self._job(question.job, question.settings, now)
        node = question.id
        out: list[Answer] = []
        if node in job.followers:
            who, asked, _ = job.followers[node]
            self._unfollow(job, node)
            out.append(Answer(who, asked, questions.told(job.life, view(job.state, node))))
        job.followers[node] = session, id, question.seen
        self._clients.setdefault(session, _Client()).following.add((job.run_id, node))
        return out + self._wake(job, [node])

    def _submit(
        self, session: Hashable, question: questions.Submit, now: float
    ) -> tuple[bytes, list[Answer]]:
        event, settings = questions.read_event(question), question.settings
        if settings.min_nodes > settings.max_nodes:
            raise ValueError(f"no job has {settings.min_nodes} to {settings.max_nodes} nodes")
        job = self._job(question.job, settings, now)
        id = subject(event)
        owner = job.lives.get(id, session)
        if owner != session and not isinstance(event, Close):
            why = "it was joined over another connection, which is not over yet"
            refused = view(job.state, id)._replace(news=Refused(id, _token(event), why))
            return questions.told(job.life, refused), []
        if isinstance(event, Join):
            if not job.state.version:  # nobody has joined yet, and only followers have come
                job.set_up(settings)
            client = self._clients.setdefault(session, _Client())
            _check(job, settings)
            job.check_rank(event.node)
            if id not in job.lives and len(client.lives) >= LIVES:
                raise ValueError(f"one connection joins at most {LIVES} nodes")
        effects, out = self._apply(job, event, now, session)
        said = answer(job.state, id, effects)
        return questions.told(job.life, said), out

    def _job(self, run_id: str, settings: questions.Settings, now: float) -> Job:
        job = self._jobs.get(run_id)
        if job is None:
            if len(self._jobs) >= JOBS:
                raise ValueError(f"{JOBS} jobs meet here already, and that is the most")
            job = self._jobs[run_id] = Job(run_id, self._new_life(), settings, now)
            self._plan(job)
        return job

    # ------------------------------------------------------------------ the rules

    def _apply(
        self, job: Job, event: Event, now: float, session: Hashable = None
    ) -> tuple[tuple[Effect, ...], list[Answer]]:
        before = job.state
        job.state, effects = step(before, event)
        if job.state is before:
            return effects, []
        if any(isinstance(effect, LastCall) for effect in effects) or job.look_at is None:
            job.look_at = now
        if isinstance(event, Join):
            self._bind(job, subject(event), session, now)
        elif isinstance(event, LastCallOver):
            for id in [id for id in job.lives if not job.knows(id)]:
                self._unbind(job, id)
        elif not job.knows(subject(event)):
            self._unbind(job, subject(event))
        job.empty_at = (job.empty_at or now) if is_empty(job.state) else None
        if job.state.waiting != before.waiting and job.gather_at is None:
            job.gather_at = now + GATHER
        self._plan(job)
        whom = concerned(before, event, job.state, effects)
        return effects, self._wake(job, list(job.followers) if whom is None else whom)

    def _look(self, job: Job, now: float) -> list[Answer]:
        out: list[Answer] = []
        job.patience, due, job.look_at = look(job.patience, job.state, job.beats, job.bounds, now)
        for event in due:
            out += self._apply(job, event, now)[1]
        if due and job.look_at is None:
            job.look_at = now
        return out

    def _wake(self, job: Job, ids: Iterable[str]) -> list[Answer]:
        """Answer those of the nodes that follow, if there is something new for them."""
        out: list[Answer] = []
        for id in ids:
            follower = job.followers.get(id)
            if follower is None:
                continue
            session, asked, seen = follower
            now = view(job.state, id)
            if questions.mark(now) != seen:
                self._unfollow(job, id)
                out.append(Answer(session, asked, questions.told(job.life, now)))
        return out

    # ---------------------------------------------------------------- book-keeping

    def _plan(self, job: Job) -> None:
        at = job.at
        if at is not None:
            self._deadline = at if self._deadline is None else min(at, self._deadline)

    def _bind(self, job: Job, id: str, session: Hashable, now: float) -> None:
        if job.knows(id) and id not in job.lives:
            job.lives[id] = session
            job.beats[id], job.heard_at[id] = 0, now
            self._clients[session].lives[job.run_id, id] = None

    def _forget(self, job: Job, now: float) -> None:
        if job.followers:  # somebody may be about to join
            job.empty_at = now
            return
        for id in list(job.lives):
            self._unbind(job, id)
        del self._jobs[job.run_id]

    def _unbind(self, job: Job, id: str) -> None:
        session = job.lives.pop(id, None)
        job.beats.pop(id, None)
        job.heard_at.pop(id, None)
        client = self._clients.get(session)
        if client is not None:
            client.lives.pop((job.run_id, id), None)

    def _unfollow(self, job: Job, id: str) -> None:
        session = job.followers.pop(id)[0]
        client = self._clients.get(session)
        if client is not None:
            client.following.discard((job.run_id, id))


def _shortened(text: str) -> str:
    """Return a text without its middle if it is very long, as a list of all nodes may be."""
    return text if len(text) <= TEXT else f"{text[: TEXT // 2]} ... {text[-TEXT // 2 :]}"


def _token(event: Event) -> int:
    token: int = getattr(event, "token", 0)
    return token


def _check(job: Job, settings: questions.Settings) -> None:
    """Refuse a node that means another job."""
    for what, theirs, ours in (
        ("nodes", _span(settings), _span(job.settings)),
        ("--rdzv-backend", _backend(settings), _backend(job.settings)),
        ("keep_alive_interval", settings.keep_alive, job.settings.keep_alive),
        ("keep_alive_max_attempt", settings.misses, job.settings.misses),
    ):
        if theirs != ours:
            raise ValueError(
                f"the job {job.run_id!r} was set up by its first node with {what} {ours}, and "
                f"this node says {theirs}; give the same on all nodes, or another id to another job"
            )


def _span(settings: questions.Settings) -> str:
    return f"{settings.min_nodes}:{settings.max_nodes}"


def _backend(settings: questions.Settings) -> str:
    return "static" if settings.fixed else "c10d"
