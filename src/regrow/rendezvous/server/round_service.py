"""Rendezvous service of the store server: it applies the rules of the rounds.

The server is connected to every node anyway. So a join costs one message in each direction, for any
number of nodes: the server applies the event (`rules.py`) and answers the nodes that have a new
status. No node polls. A node that follows the rounds has one question parked here, and the service
answers it when the node's snapshot changes.

**Concerned nodes.** Comparing the snapshots of all nodes after every event would make N joins cost
N squared. A join changes the status of one node while a round forms. So the service checks only the
node that sent the event, and the nodes that moved in the queue. It checks all nodes when the round
becomes complete, when it ends, when its end gets a verdict, and when the job is closed. The number
of waiting nodes changes with every arrival and concerns the members only. The service batches that
notification: a hundred arrivals are one.

**Which nodes are alive.** A node lives as long as the session that joined it. The node is lost at
once when its client ends the session, or closes its connection and does not return within its
grace. A reset connection does not show that a process has ended. For a reset connection and for a
silent host, the failure detector decides. It reports a node as lost when its heartbeats have
stopped for so long that the lease of its workers has expired.

A heartbeat carries the number of answered heartbeats, and counts only if that number has grown. A
node that sends but receives nothing has no lease left, and would otherwise keep the others waiting.
The server calls this service for a deadline only after it has read all messages that have arrived.
One check adds at most one keep-alive interval of silence. So a server that was stopped evicts no
node.

**Which session may send for a node.** All clients hold the job's token, but any client may have
bugs. Only the session that joined a node may send its events. The service answers a malformed or
invalid question with a `RefusedReply`, and changes nothing.

**Journal.** The server can be killed (out of memory, `kill -9`) while the agent beside it lives.
That agent starts another server, which must not contradict what the members have learned:

- The number of the round never decreases, because it is the members' fencing token.
- A round keeps its members and ranks.
- Failures stay charged.
- A closed job stays closed.

No member knows all of these facts, and the member that knows most may be cut off at that time. So
the service writes each event into a journal before it answers. The next server repeats the same
steps, which is possible because the rules of a round are a pure function (`rules.step`). So members
never learn anything that is not in the journal.

The records are msgpack, and `recover` is a pure function of the records. Sessions and heartbeats
are not recorded: each living member returns with a new session, and the failure detector reports
the other nodes lost.
The first session that sends a heartbeat or an event of a node becomes the session of that node.

**Another server may take over** (`succession.py`). Then voters keep a copy of the record of each
job, which has the same records as the journal. An answer to a node is held back until a majority of
the voters has the changes from which it follows (`copies.py`). A server that was started to take
over creates no job. It waits for grants, and runs the rounds of a job when a majority has granted
it the epoch (`_granted`). A server that learns of a newer epoch than its own stops running
the rounds, and answers where they are run.

A job without nodes is deleted after a while. The keys of a round are stored under the job's life, a
random name. So a later job with the same id does not find them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from regrow.rendezvous.node.driver import Snapshot, answer, snapshot
from regrow.rendezvous.node.node_rules import explain_timeout
from regrow.rendezvous.protocol.messages import (
    Event,
    JoinRound,
    LastCallOver,
    NodeLost,
    NodeRefused,
    subject,
)
from regrow.rendezvous.protocol.rules import Refusal, step
from regrow.rendezvous.protocol.state import holds, nodes
from regrow.rendezvous.protocol.succession import (
    MARGIN,
    PROMISE,
    Succession,
    has_ended,
    has_waited,
    is_voter,
    with_agent,
    with_agents,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.copies import MOVED, RemovedVoterError
from regrow.rendezvous.server.elections import Elections
from regrow.rendezvous.server.records import (
    EventRecord,
    ForgottenRecord,
    SuccessionRecord,
    event_record,
    recover,
)
from regrow.rendezvous.server.served_job import ServedJob, concerned, shown_waiting
from regrow.rendezvous.settings import FORGET_JOB, GATHER, JOBS, LIVES, TEXT
from regrow.store import Answer, within

if TYPE_CHECKING:
    from regrow.rendezvous.server.elections import Won
    from regrow.store import Journal


_UNKNOWN: Final = messages.ElsewhereReply(0, "")
_ANOTHER_LIFE: Final = Snapshot(
    0, NodeRefused("", "the server does not know this life of the job"), 0, None
)


def create() -> RendezvousService:
    """Return the service for a server process."""
    return RendezvousService(_new_life)


def create_successor() -> RendezvousService:
    """Return the service for a server process that may take over from another one."""
    return RendezvousService(_new_life, creates=False)


def _new_life() -> str:
    return os.urandom(6).hex()


# --- the service


@dataclass(slots=True)
class _Client:
    """The nodes of one session."""

    lives: dict[tuple[str, str], None] = field(default_factory=dict)
    """Nodes that the session joined, as job id and node id."""
    following: set[tuple[str, str]] = field(default_factory=set)
    """Nodes of its parked questions, as job id and node id."""


class RendezvousService:
    """The rounds of all jobs that meet in one store server; a `regrow.store.Service`.

    Args:
        new_life: returns a new random name for the life of a job.
        creates: whether a node may create a job here; otherwise the server only takes over jobs.
    """

    def __init__(self, new_life: Callable[[], str], *, creates: bool = True) -> None:
        self._new_life = new_life
        self._creates = creates
        self._elections = Elections()
        self._moved: dict[str, tuple[float, messages.ElsewhereReply]] = {}
        """Where the jobs are served that this server does not know, by job id, and since when."""
        self._changed: dict[str, ServedJob] = {}
        """Jobs whose voters may have to be informed."""
        self.jobs: dict[str, ServedJob] = {}
        """By job id."""
        self._clients: defaultdict[Hashable, _Client] = defaultdict(_Client)
        self._journal: Journal | None = None

    def remember(self, journal: Journal, now: float, log: Callable[[str], None]) -> None:
        """Continue from the journal of an earlier server, and write every change into it.

        Args:
            journal: the journal; it is read at once, and kept for writing.
            now: the current time, in seconds.
            log: receives a line if the journal cannot be used.
        """
        try:
            recovered = recover(journal.records)
        except ValueError as error:
            log(f"rendezvous: the jobs of the previous server are lost: {error}")
            recovered = {}
        for run_id, job in recovered.items():
            served = self.jobs[run_id] = ServedJob(run_id, job.life, job.settings, now, job)
            if job.succession.epoch:  # the server before that one may renew leases for a moment
                served.inherit((MARGIN - PROMISE) * served.bounds.lease, now)
        self._journal, self._log = journal, log
        self._snapshot()

    @property
    def deadline(self) -> float | None:
        """See `Service`."""
        return min((at for job in self.jobs.values() if (at := job.at) is not None), default=None)

    @property
    def needed(self) -> bool:
        """See `Service`; without its agent, this server wins no election."""
        return self._creates or bool(self.jobs)

    # ------------------------------------------------------- calls of the server

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        """See `Service`."""
        try:
            question = messages.decode_question(body)
            if not isinstance(question, messages.GrantRequest):
                within(body, messages.BODY_BYTES)
            return self._to_voters(self._answer(session, id, question, now), now)
        except (ValueError, msgspec.MsgspecError) as error:
            problem = messages.RefusedReply(
                f"the rendezvous service refused: {error}", isinstance(error, RemovedVoterError)
            )
            return [Answer(session, id, messages.encode(problem))]

    def _answer(
        self, session: Hashable, id: int, question: messages.Question, now: float
    ) -> list[Answer]:
        if isinstance(
            question, messages.CopyRequest | messages.GrantRequest | messages.MovedRequest
        ):
            messages.check_servers(question)
        match question:
            case messages.CopyRequest():
                return self._copy(session, id, question, now)
            case messages.GrantRequest():
                return self._granted(session, id, question, now)
            case messages.ResignRequest() | messages.MovedRequest():
                return self._note(session, id, question, now)
            case messages.TurnRequest():
                self._turned(session)
                return [Answer(session, id, messages.encode(messages.DoneReply(0)))]
        if elsewhere := self._elsewhere(question.job, now):
            return [Answer(session, id, messages.encode(elsewhere))]
        job = self.jobs.get(question.job)
        known = getattr(question, "life", "")
        if known and (job is None or job.life != known):
            reply = messages.encode_snapshot(job.life if job else "", _ANOTHER_LIFE)
            return [Answer(session, id, reply)]
        match question:
            case messages.BeatRequest():
                return self._beat(session, id, question, now)
            case messages.ExplainRequest():
                text = [Answer(session, id, self._explain(question))]
                return text if job is None else job.copies.hold(text)
            case messages.FollowRequest():
                return self._follow(session, id, question, now)
        return self._submit(session, id, question, now)

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        client = self._clients.get(session)
        for run_id, node in list(client.following) if client else ():
            job = self.jobs[run_id]
            if job.followers[node][:2] == (session, id):
                self._unfollow(job, node)
        self._elections.withdraw(session, id)
        for job in self.jobs.values():
            job.copies.unpark(session, id)

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`."""
        client = self._clients.get(session)
        for run_id, node in list(client.following) if client else ():
            self._unfollow(self.jobs[run_id], node)
        self._elections.withdraw(session)
        for job in self.jobs.values():
            job.copies.unpark(session)
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        """See `Service`; the client repeats its questions."""
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        """See `Service`; if the client's process has ended, the nodes of the session are lost."""
        self.suspended(session, now)
        client = self._clients.pop(session, None)
        out: list[Answer] = []
        for run_id, node in client.lives if client else ():
            job = self.jobs[run_id]
            if job.copies.moved is not None:
                self._unbind(job, node)
                continue
            had_round = job.state.complete or job.state.number > 1
            if not closed and (had_round or not job.state.fixed):
                continue  # the node may have workers, or another node may take its place
            out += self._apply(job, NodeLost(node, why), now)[1]
            self._unbind(job, node)
        return self._to_voters(out, now)

    def due(self, now: float) -> list[Answer]:
        """See `Service`."""
        out: list[Answer] = []
        for job in list(self.jobs.values()):
            if job.copies.at is not None and job.copies.at <= now:
                self._changed[job.run_id] = job
            if job.gather_at is not None and job.gather_at <= now:
                job.gather_at = None
                out += self._wake(job, list(job.state.ranks))
            if job.check_at is not None and job.check_at <= now:
                out += self._check_due(job, now)
            if job.empty_at is not None and job.empty_at + FORGET_JOB <= now:
                self._forget(job, now)
        return self._to_voters(out, now)

    # ------------------------------------------------------------------ succession

    def _elsewhere(self, run_id: str, now: float) -> messages.ElsewhereReply | None:
        """Return where a job is served, if this server does not serve it."""
        job = self.jobs.get(run_id)
        if job is not None:
            copies = job.copies
            copies.forget_endpoint(now)
            if (copies.moved and copies.moved.endpoint) or not copies.is_lost(now):
                return copies.moved
            if job.lives:
                return messages.ElsewhereReply(copies.epoch, "", lost=True)
            self._delete(job)  # no node of it is left here, so the job may begin again
        elsewhere = self._reported(run_id, now)
        return None if elsewhere is None and self._creates else elsewhere or _UNKNOWN

    def _reported(self, run_id: str, now: float) -> messages.ElsewhereReply | None:
        """Return where an agent has reported that a job is served which this server lacks."""
        at, elsewhere = self._moved.get(run_id, (now, None))
        if elsewhere is not None and now > at + MOVED:
            elsewhere = messages.ElsewhereReply(elsewhere.epoch, "")
            if now > at + FORGET_JOB:
                del self._moved[run_id]
                elsewhere = None
        return elsewhere

    def _to_voters(self, out: list[Answer], now: float) -> list[Answer]:
        """Add the answers to voters, and those to nodes that need not be held back any more."""
        for run_id, job in [*self._changed.items()]:
            copies = job.copies
            while (step := copies.next_step(job.state, now)) is not None and copies.moved is None:
                copies.succession = step
                self._write(job, SuccessionRecord(run_id, step))
            out += [*copies.confirmed(), *copies.answers(now)]
        self._changed.clear()
        return out

    def _copy(
        self, session: Hashable, id: int, question: messages.CopyRequest, now: float
    ) -> list[Answer]:
        job = self.jobs.get(question.job)
        out: list[Answer] = []
        if job is not None and question.life in ("", job.life):
            copies, voter = job.copies, question.voter.id
            newer = question.promised > copies.epoch
            votes = is_voter(copies.succession, voter)
            if newer and not votes and question.epoch <= copies.epoch:
                raise RemovedVoterError(
                    f"{voter} is no voter any more, and has granted a newer epoch"
                )
            if newer:
                out += self._move(job, question.promised, "", now)
        else:
            job = None
        if job is None or job.copies.moved is not None:
            elsewhere = job.copies.moved if job else self._reported(question.job, now)
            return [*out, Answer(session, id, messages.encode(elsewhere or _UNKNOWN))]
        succession = job.copies.succession
        if question.hosts and not question.listed and succession.coordinator is None:
            succession = Succession(coordinator=question.voter)
        elif job.copies.kept():
            succession = with_agent(succession, question.listed, question.voter)
        if succession != job.copies.succession:
            job.copies.succession = succession
            self._write(job, SuccessionRecord(job.run_id, succession))
        self._changed[job.run_id] = job
        return out + job.copies.asked(session, id, question, now)

    def _granted(
        self, session: Hashable, id: int, question: messages.GrantRequest, now: float
    ) -> list[Answer]:
        run_id, epoch = question.job, question.epoch
        job = self.jobs.get(run_id)
        out: list[Answer] = []
        if not question.life and (reply := self._serving(run_id, now)) is not None:
            return [Answer(session, id, messages.encode(reply))]
        if job is not None:
            copies = job.copies
            votes = is_voter(copies.succession, question.voter)
            known = question.life == job.life
            serves = copies.moved is None and (copies.succession.voters or known)
            old = question.copy_epoch <= copies.epoch
            if serves and (copies.epoch >= epoch or (old and not votes)):
                # A voter that was removed meanwhile learns it from its next request.
                return [Answer(session, id, messages.encode(messages.DoneReply(copies.epoch)))]
            if copies.epoch > epoch:
                reply = messages.ElsewhereReply(copies.epoch, "")
                return [Answer(session, id, messages.encode(reply))]
            if votes:
                out += self._move(job, epoch, "", now)
        won, answers = self._elections.granted(session, id, question)
        return out + answers + (self._take_over(won, now) if won is not None else [])

    def _serving(
        self, run_id: str, now: float
    ) -> messages.DoneReply | messages.ElsewhereReply | None:
        """Return the answer to an agent that wants the job to begin, if it has begun already."""
        job = self.jobs.get(run_id)
        if job is None:
            elsewhere = self._reported(run_id, now)
            return elsewhere if elsewhere is not None and elsewhere.endpoint else None
        return job.copies.moved or messages.DoneReply(job.copies.epoch)

    def _turned(self, session: Hashable) -> None:
        """Keep the nodes of a client that asks another server from now on; their beats decide."""
        client = self._clients.get(session)
        for run_id, node in [*client.lives] if client else ():
            self.jobs[run_id].lives.pop(node, None)
        if client is not None:
            client.lives.clear()

    def _take_over(self, won: Won, now: float) -> list[Answer]:
        """Run the rounds of a job, from the newest copy of its record."""
        run_id, old = won.record.job, won.record.succession
        out: list[Answer] = []
        before = self.jobs.get(run_id)
        if before is not None:
            out += self._move(before, won.epoch, "", now)
            self._delete(before)
        after = replace(old, epoch=won.epoch, coordinator=won.candidate)
        after = with_agents(after, won.elects)
        record = replace(won.record, succession=after)
        life = record.life or self._new_life()
        job = self.jobs[run_id] = ServedJob(run_id, life, record.settings, now, record)
        self._moved.pop(run_id, None)
        self._begin(job)
        first = old.coordinator
        ended = has_ended(won.grants, old)
        # How long ago the old server renewed its last lease, as a part of a lease: so long, or it
        # has renewed none since it ended, or it may renew some until the promises end.
        ago = MARGIN if has_waited(won.grants, old) else 0.0 if ended else MARGIN - PROMISE
        job.inherit(ago * job.bounds.lease, now)
        if first is not None and ended:
            why = f"its agent has ended: no process listens at port {first.port} of {first.host}"
            for id in job.ids_of(first.id):
                out += self._apply(job, NodeLost(id, why), now)[1]
        return out

    def _move(self, job: ServedJob, epoch: int, endpoint: str, now: float) -> list[Answer]:
        """Stop running the rounds of a job, because another server has a newer epoch."""
        out = [*job.copies.move(epoch, endpoint, now)]
        if job.copies.moved is not None:
            body = messages.encode(job.copies.moved)
            for id, (session, asked, _) in [*job.followers.items()]:
                self._unfollow(job, id)
                out.append(Answer(session, asked, body))
            job.check_at = job.gather_at = job.empty_at = None
        return out

    def _note(
        self,
        session: Hashable,
        id: int,
        question: messages.ResignRequest | messages.MovedRequest,
        now: float,
    ) -> list[Answer]:
        job, out = self.jobs.get(question.job), []
        if isinstance(question, messages.MovedRequest):
            if job is not None:
                out += self._move(job, question.epoch, question.endpoint, now)
            elif question.epoch >= self._moved.get(question.job, (0.0, _UNKNOWN))[1].epoch and (
                question.job in self._moved or len(self._moved) < JOBS
            ):
                elsewhere = messages.ElsewhereReply(question.epoch, question.endpoint)
                self._moved[question.job] = now, elsewhere
        elif job is not None and is_voter(job.copies.succession, question.voter):
            if question.epoch > job.copies.epoch:
                out += self._move(job, question.epoch, "", now)
            elif job.copies.moved is None:
                job.copies.resign(question.voter)
                self._changed[job.run_id] = job
        return [*out, Answer(session, id, messages.encode(messages.DoneReply(0)))]

    # ------------------------------------------------------------------ questions

    def _beat(
        self, session: Hashable, asked: int, question: messages.BeatRequest, now: float
    ) -> list[Answer]:
        job, id = self.jobs.get(question.job), question.id
        if job is None:
            return [Answer(session, asked, messages.encode(messages.BeatReply("", False)))]
        copies = job.copies
        newer = question.epoch > copies.epoch and job.knows(id)
        out = self._move(job, question.epoch, "", now) if newer else []
        if copies.moved is not None or not copies.may_renew(now):
            waits = copies.moved or messages.ElsewhereReply(copies.epoch, "", waits=True)
            return [*out, Answer(session, asked, messages.encode(waits))]
        held = False
        self._claim(job, id, session, now)
        if job.lives.get(id) == session:
            if question.answered > job.beats[id]:
                job.beats[id], job.heard_at[id] = question.answered, now
            # A lease that begins now must expire before the failure detector reports the node lost.
            in_time = now <= job.heard_at[id] + job.bounds.kill
            held = in_time and holds(job.state, id, question.token)
            if held:
                job.renewed[id] = question.token
        node = job.state.members.get(id)
        keeps = node is not None and copies.should_copy(node.voter)
        reply = messages.BeatReply(
            job.life, held, copies.epoch, copies.servers, copies.may_lose(now), keeps
        )
        return [Answer(session, asked, messages.encode(reply))]

    def _explain(self, question: messages.ExplainRequest) -> bytes:
        job = self.jobs.get(question.job)
        if job is None:
            raise ValueError(f"the server does not know the job {question.job!r}")
        text, departed = explain_timeout(job.state, job.run_id, question.id, question.waited)
        return messages.encode(messages.ExplainReply(_shortened(text), departed))

    def _follow(
        self, session: Hashable, id: int, question: messages.FollowRequest, now: float
    ) -> list[Answer]:
        job = self._job(question.job, question.settings, now)
        node = question.id
        out: list[Answer] = []
        if node in job.followers:
            earlier, asked, _ = job.followers[node]
            self._unfollow(job, node)
            reply = messages.encode_snapshot(job.life, snapshot(job.state, node))
            out += job.copies.hold([Answer(earlier, asked, reply)])
        job.followers[node] = session, id, question.seen
        self._clients[session].following.add((job.run_id, node))
        return out + self._wake(job, [node])

    def _submit(
        self, session: Hashable, asked: int, question: messages.SubmitRequest, now: float
    ) -> list[Answer]:
        event, settings = messages.read_event(question), question.settings
        if question.job not in self.jobs and not isinstance(event, JoinRound):
            # Only a join or a follower creates a job; any other event belongs to an earlier job.
            why = f"the server does not know the job {question.job!r}"
            refused = Snapshot(0, NodeRefused(subject(event), why), 0, None)
            return [Answer(session, asked, messages.encode_snapshot("", refused))]
        if settings.min_nodes > settings.max_nodes:
            raise ValueError(
                f"the minimum number of nodes ({settings.min_nodes}) is greater than the maximum "
                f"({settings.max_nodes})"
            )
        job = self._job(question.job, settings, now)
        id = subject(event)
        self._claim(job, id, session, now)
        owner = job.lives.get(id, session)
        if owner != session:
            why = "another connection, which is still open, joined it"
            refused = snapshot(job.state, id)._replace(status=NodeRefused(id, why))
            body = messages.encode_snapshot(job.life, refused)
            return job.copies.hold([Answer(session, asked, body)])
        if isinstance(event, JoinRound):
            if not (job.state.version or job.copies.epoch):  # only followers have come so far
                followers = job.followers
                job = self.jobs[question.job] = ServedJob(question.job, job.life, settings, now)
                job.followers = followers
                self._begin(job)
            client = self._clients[session]
            job.check(settings)
            job.check_rank(event.node)
            if id not in job.lives and len(client.lives) >= LIVES:
                raise ValueError(f"one connection joins at most {LIVES} nodes")
        refusal, out = self._apply(job, event, now, session)
        body = messages.encode_snapshot(job.life, answer(job.state, id, refusal))
        return job.copies.hold([Answer(session, asked, body)]) + out

    def _job(self, run_id: str, settings: messages.JobSettings, now: float) -> ServedJob:
        job = self.jobs.get(run_id)
        if job is None:
            if len(self.jobs) >= JOBS:
                raise ValueError(f"this server has {JOBS} jobs already, which is its limit")
            job = self.jobs[run_id] = ServedJob(run_id, self._new_life(), settings, now)
            self._begin(job)
        return job

    def _claim(self, job: ServedJob, id: str, session: Hashable, now: float) -> None:
        """Bind a node of an earlier server to the session that sends for it now."""
        if job.knows(id) and id not in job.lives:
            self._bind(job, id, session, now)

    # ------------------------------------------------------------------ the rules

    def _apply(
        self, job: ServedJob, event: Event, now: float, session: Hashable = None
    ) -> tuple[Refusal | None, list[Answer]]:
        before = job.state
        job.state, refusal = step(before, event)
        if job.state is before:
            return refusal, []
        self._write(job, event_record(job.run_id, event))
        if job.state.last_call != before.last_call or job.check_at is None:
            job.check_at = now
        if isinstance(event, JoinRound):
            self._bind(job, subject(event), session, now)
        elif isinstance(event, LastCallOver):
            for id in [id for id in job.lives if not job.knows(id)]:
                self._unbind(job, id)
        elif not job.knows(subject(event)):
            self._unbind(job, subject(event))
        job.empty_at = None if nodes(job.state) else job.empty_at or now
        if shown_waiting(job.state) != shown_waiting(before) and job.gather_at is None:
            job.gather_at = now + GATHER
        ids = concerned(before, event, job.state)
        return refusal, self._wake(job, list(job.followers) if ids is None else ids)

    def _check_due(self, job: ServedJob, now: float) -> list[Answer]:
        out: list[Answer] = []
        job.detector, due, job.check_at = job.detector.check(
            job.state, job.beats, job.bounds, now, unleased=job.unleased(self._clients)
        )
        for event in due:
            out += self._apply(job, event, now)[1]
        if due and job.check_at is None:
            job.check_at = now
        return out

    def _wake(self, job: ServedJob, ids: Iterable[str]) -> list[Answer]:
        """Answer the parked questions of the given nodes if their snapshots have changed."""
        out: list[Answer] = []
        for id in ids:
            follower = job.followers.get(id)
            if follower is None:
                continue
            session, asked, seen = follower
            now = snapshot(job.state, id)
            if messages.mark(now) != seen:
                self._unfollow(job, id)
                out.append(Answer(session, asked, messages.encode_snapshot(job.life, now)))
        return job.copies.hold(out)

    # ---------------------------------------------------------------- book-keeping

    def _bind(self, job: ServedJob, id: str, session: Hashable, now: float) -> None:
        if job.knows(id) and id not in job.lives:
            job.lives[id] = session
            job.beats.setdefault(id, 0)
            job.heard_at.setdefault(id, now)
            self._clients[session].lives[job.run_id, id] = None

    def _forget(self, job: ServedJob, now: float) -> None:
        if job.followers:  # a follower may be about to join
            job.empty_at = now
            return
        self._delete(job)

    def _delete(self, job: ServedJob) -> None:
        for id in list(job.lives):
            self._unbind(job, id)
        for id in list(job.followers):
            self._unfollow(job, id)
        self._changed.pop(job.run_id, None)
        del self.jobs[job.run_id]
        self._append(messages.encode(ForgottenRecord(job.run_id)))

    def _unbind(self, job: ServedJob, id: str) -> None:
        session = job.lives.pop(id, None)
        job.beats.pop(id, None)
        job.heard_at.pop(id, None)
        job.renewed.pop(id, None)
        client = self._clients.get(session)
        if client is not None:
            client.lives.pop((job.run_id, id), None)

    def _begin(self, job: ServedJob) -> None:
        """Write the whole record of a job."""
        job.copies.begin()
        self._append(messages.encode(job.record()))

    def _write(self, job: ServedJob, record: EventRecord | SuccessionRecord) -> None:
        """Write a record, before the change has any effect."""
        data = messages.encode(record)
        job.copies.add(data)
        self._changed[job.run_id] = job
        self._append(data)

    def _append(self, record: bytes) -> None:
        if self._journal is None:
            return
        try:
            if self._journal.append(record):
                self._snapshot()
        except OSError as error:
            self._stop_writing(error)

    def _snapshot(self) -> None:
        assert self._journal is not None
        try:
            self._journal.begin(messages.encode(job.record()) for job in self.jobs.values())
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        assert self._journal is not None
        self._log(f"rendezvous: the next server on this host cannot continue the jobs: {error}")
        journal, self._journal = self._journal, None
        with suppress(OSError):
            journal.discard()

    def _unfollow(self, job: ServedJob, id: str) -> None:
        session = job.followers.pop(id)[0]
        client = self._clients.get(session)
        if client is not None:
            client.following.discard((job.run_id, id))


def _shortened(text: str) -> str:
    """Return the text without its middle if it is very long, such as a list of all nodes."""
    return text if len(text) <= TEXT else f"{text[: TEXT // 2]} ... {text[-TEXT // 2 :]}"
