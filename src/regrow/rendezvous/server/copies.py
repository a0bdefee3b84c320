"""The copies of one job's record, as the server that runs the rounds sees them.

The voters ask for changes of the record (`CopyRequest`), and confirm the changes before with each
request. This object knows what each voter has confirmed and until when it stands by its promise.
It holds back the answers to the nodes until a majority of the voters has the changes from which
they follow. The rules are in `protocol/succession.py`.

After each change of the members, the voters change step by step. Each step is a change of the
record itself.

A job on two hosts may have a witness as its third voter (`witness_requests.py`). Its keepers ask in
its name, and are answered only when the witness is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from math import inf
from typing import Final

from msgspec import Raw

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import (
    MARGIN,
    PROMISE,
    Succession,
    Voters,
    change_voters,
    is_voter,
    is_witness,
    quorum_value,
    reporter,
    wanted_voters,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.witness_requests import Due, Parked, WitnessRequests
from regrow.rendezvous.settings import FORGET_JOB
from regrow.store import Answer

MOVED: Final = 10.0
"""Seconds after which a server forgets where the rounds are run; the other one reports each second.
"""
LOG: Final = 1024
"""Most records that are kept for voters that lack a few; other voters get the whole record."""


class RemovedVoterError(ValueError):
    """A voter that was removed from the voters has to continue under another id."""


class Copies:
    """The copies of one job's record.

    Args:
        life: the life of the job.
        succession: who runs the rounds, and who may take over.
        seq: the number of changes in the record.
        lease: the length of a lease, in seconds.
        successors: most voters besides the coordinator's.
        witness: whether the agents have a directory for a witness.
        now: the time, in seconds.
        whole: returns the record of the whole job.
    """

    def __init__(
        self,
        life: str,
        succession: Succession,
        seq: int,
        lease: float,
        successors: int,
        witness: bool,
        now: float,
        whole: Callable[[], bytes],
    ) -> None:
        self._life = life
        self.succession = succession
        self.seq = seq
        self.moved: messages.ElsewhereReply | None = None
        """Set when another server has taken over."""
        self.resigned: set[str] = set()
        """Ids of the voters that have resigned."""
        self._moved_at = 0.0
        self.wanted: Voters = ()
        self._reporter: Voter | None = None
        self._promise, self._margin = PROMISE * lease, MARGIN * lease
        self._successors = successors
        self._began = now
        self._whole = whole
        self._log: list[bytes] = []  # the latest records
        self._has: dict[str, float] = {}  # by voter: the number of changes that it has confirmed
        self._promised_at: dict[str, float] = {}  # by voter: when its latest answer was sent
        self._sent: dict[str, tuple[int, float]] = {}  # by voter: number and time of that answer
        self._parked: dict[str, tuple[Hashable, int, messages.CopyRequest, float]] = {}
        in_time = self._promise - self._margin
        self._witness = WitnessRequests(life, self._promise, in_time) if witness else None
        self._held: list[tuple[int, list[Answer]]] = []
        self._chosen_for: object = None

    @property
    def epoch(self) -> int:
        """The epoch of this server."""
        return self.succession.epoch

    @property
    def at(self) -> float | None:
        """The time of the next call of `due`."""
        times = [until for *_, until in self._parked.values()]
        if self._witness is not None:
            due = self._next_witness()
            times += [self._witness.late_at] if due is None else [self._witness.late_at, due.at]
        return min((at for at in times if at < inf), default=None)

    @property
    def servers(self) -> tuple[Voter, ...]:
        """The agents that may serve the rounds, first the present one; empty if there is one.

        The nodes learn the wanted voters too, before these vote.
        """
        voters = self.succession.voters[-1] if self.succession.voters else self.wanted
        first = self.succession.coordinator
        if not voters or first is None:
            return ()
        others = (voter for voter in voters if voter.id != first.id and not is_witness(voter))
        return (first, *others)

    def may_lose(self, now: float) -> int:
        """Return how many of the voters may be lost at one time: those beyond a majority.

        Only voters that are there count: those that have confirmed an answer within a lease, and
        the witness, because a witness that is late does not stay a voter.
        """
        since = now - self._promise / PROMISE
        here = {id for id, at in self._promised_at.items() if at > since} - self.resigned
        spare = (
            sum(is_witness(voter) or voter.id in here for voter in one) - len(one) // 2 - 1
            for one in self.succession.voters
        )
        return max(min(spare, default=0), 0)

    def should_copy(self, voter: Voter | None) -> bool:
        """Return whether an agent should keep a copy."""
        keepers = self._witness.wanted_by if self._witness is not None else ()
        return voter is not None and (
            voter in (*self.wanted, self._reporter)
            or voter.id in keepers
            or is_voter(self.succession, voter.id)
        )

    def begin(self) -> None:
        """Count a change that replaces the whole record."""
        self.seq += 1
        self._log.clear()

    def add(self, record: bytes) -> None:
        """Count a change of the record."""
        self.seq += 1
        self._log.append(record)
        if len(self._log) > 2 * LOG:
            del self._log[:LOG]

    def kept(self) -> bool:
        """Return whether a majority of the voters has every change."""
        return self.kept_changes() >= self.seq

    def kept_changes(self) -> float:
        """Return how many changes a majority of the voters has."""
        voters = self.succession.voters
        return quorum_value(voters, self._has) if voters else self.seq

    def may_renew(self, now: float) -> bool:
        """Return whether this server may renew leases, because a majority stands by its promise."""
        voters = self.succession.voters
        if not voters:
            return True
        return now < quorum_value(voters, self._promised_at) + self._promise - self._margin

    def is_lost(self, now: float) -> bool:
        """Return whether nothing was heard of a majority for so long that it may never come back.

        If another server has taken over, whether nothing was heard of it for so long.
        """
        if self.moved is not None:
            return now > self._moved_at + FORGET_JOB
        voters = self.succession.voters
        heard = quorum_value(voters, self._promised_at) if voters else now
        return now > max(heard, self._began) + FORGET_JOB

    def hold(self, answers: list[Answer]) -> list[Answer]:
        """Hold back answers until a majority has all changes; return them if it has them now."""
        if not answers or self.kept():
            return answers
        self._held.append((self.seq, answers))
        return []

    def confirmed(self) -> list[Answer]:
        """Return the answers that need not be held back any more."""
        kept, out = self.kept_changes(), []
        while self._held and self._held[0][0] <= kept:
            out += self._held.pop(0)[1]
        return out

    def next_step(self, state: Round, now: float) -> Succession | None:
        """Return the succession after the next step towards the wanted voters, if there is one."""
        chosen_for: tuple[object, ...] = (
            *(state.number, state.complete, state.closed is None),
            self.succession,
        )
        if self._witness is not None:
            self._witness.check(now)
            chosen_for = *chosen_for, self._witness.is_late, self._witness.keepers
        if chosen_for != self._chosen_for:
            self._chosen_for = chosen_for
            self.wanted = self._wanted(state)
            if state.complete:
                self._reporter = reporter(state, self.succession)
        ready = {id for id, has in self._has.items() if has >= self.seq}
        after = change_voters(self.succession, self.wanted, ready, self.kept())
        return None if after == self.succession else after

    def _wanted(self, state: Round) -> Voters:
        witness = self._witness
        if witness is not None:
            third = witness.candidate(self.succession, self.seq)
            wanted = wanted_voters(state, self.succession, self._successors, third)
            if witness.want(wanted, self.succession):
                return wanted
        return wanted_voters(state, self.succession, self._successors)

    # --- requests of the voters

    def asked(
        self, session: Hashable, id: int, request: messages.CopyRequest, now: float
    ) -> list[Answer]:
        """Handle a request for changes.

        Raises:
            ValueError: the voter has changes that this server does not have.
        """
        voter = request.voter.id
        if request.epoch == self.epoch and request.seq > self.seq:
            raise ValueError(
                f"a copy of the record has {request.seq} changes, and the server has {self.seq}"
            )
        if request.keeper:
            self._asked_by_keeper(Parked(session, id, request), now)
            return []
        if voter in self.resigned:
            raise RemovedVoterError(f"the voter {voter} has resigned")
        out = [self._reply(voter, now)] if voter in self._parked else []
        if request.epoch == self.epoch:
            self._has[voter] = request.seq
            number, sent = self._sent.get(voter, (0, 0.0))
            if number and request.answer == number:
                self._promised_at[voter] = sent
        else:
            self._has.pop(voter, None)
            self._promised_at.pop(voter, None)
        self._parked[voter] = session, id, request, now + self._promise / 6
        return out

    def _asked_by_keeper(self, parked: Parked, now: float) -> None:
        witness, request = self._witness, parked.request
        voter = request.voter.id
        if witness is None or witness.voter is None or witness.voter.id != voter:
            raise RemovedVoterError(f"{voter} is no witness of the job any more")
        sent = witness.asked(parked, now)
        # Another keeper may have written since this one has read, and a ballot loses nothing.
        if request.epoch == self.epoch:
            self._has[voter] = max(self._has.get(voter, 0), request.seq)
            if sent is not None:
                self._promised_at[voter] = sent

    def _next_witness(self) -> Due | None:
        witness = self._witness
        if witness is None or witness.voter is None or self.moved is not None:
            return None
        id, voters = witness.voter.id, self.succession.voters
        promised = {voter: at for voter, at in self._promised_at.items() if voter != id}
        others = quorum_value(voters, promised) if voters else inf
        return witness.next(self.succession, others, lacks=self._has.get(id, -1) < self.seq)

    def answers(self, now: float) -> list[Answer]:
        """Answer the voters that lack changes, and those that have waited for long enough."""
        out = [
            self._reply(voter, now)
            for voter, (_, _, request, until) in [*self._parked.items()]
            if until <= now or request.epoch != self.epoch or request.seq < self.seq
        ]
        due = self._next_witness()
        if self._witness is not None and due is not None and due.at <= now:
            parked = self._witness.take(due.keeper)
            out.append(self._answer(*parked, now, checks=due.checks))
        return out

    def _reply(self, voter: str, now: float) -> Answer:
        session, id, request, _ = self._parked.pop(voter)
        return self._answer(session, id, request, now)

    def _answer(
        self,
        session: Hashable,
        id: int,
        request: messages.CopyRequest,
        now: float,
        *,
        checks: bool = False,
    ) -> Answer:
        if self.moved is not None:
            return Answer(session, id, messages.encode(self.moved))
        voter, witness, creates = request.voter.id, self._witness, False
        lacks = self.seq - request.seq
        part = request.epoch == self.epoch and lacks <= len(self._log)
        records = self._log[len(self._log) - lacks :] if part else [self._whole()]
        # The clock of the host makes the number unique, also after a restart of this server.
        number = max(self._sent.get(voter, (0, 0.0))[0] + 1, int(now * 1e6))
        self._sent[voter] = number, now
        if witness is not None and request.keeper:
            witness.sent(number, now, request.keeper)
            first = self.succession.coordinator
            votes = is_voter(self.succession, voter)
            creates = not votes and first is not None and first.id == request.keeper
        reply = messages.CopyReply(
            self._life,
            self.epoch,
            self.seq,
            number,
            not part,
            tuple(map(Raw, records)),
            self.succession,
            self.should_copy(request.voter) or request.hosts,
            witness.latest if witness is not None else None,
            creates,
            checks,
        )
        return Answer(session, id, messages.encode(reply))

    def resign(self, voter: str) -> None:
        """Count a voter that has resigned as if it confirmed everything."""
        self.resigned.add(voter)
        self._has[voter] = self._promised_at[voter] = inf

    def unpark(self, session: Hashable, id: int | None = None) -> None:
        """Drop the parked requests of a session, or one of them."""
        for voter, (its, asked, *_) in [*self._parked.items()]:
            if its == session and id in (None, asked):
                del self._parked[voter]
        if self._witness is not None:
            self._witness.unpark(session, id)

    def move(self, epoch: int, endpoint: str, now: float) -> Iterator[Answer]:
        """Stop running the rounds, because another server has a newer epoch."""
        if epoch > self.epoch and (self.moved is None or epoch >= self.moved.epoch):
            self.moved = messages.ElsewhereReply(epoch, endpoint)
            self._moved_at = now
            body = messages.encode(self.moved)
            for _, answers in self._held:
                for answer in answers:
                    yield answer._replace(body=body)
            self._held.clear()
            for voter in [*self._parked]:
                yield self._reply(voter, now)
            for parked in self._witness.take_all() if self._witness is not None else ():
                yield self._answer(*parked, now)

    def forget_endpoint(self, now: float) -> None:
        """Forget where the rounds are run if that server has not reported for some time."""
        if self.moved is not None and now > self._moved_at + MOVED:
            self.moved = messages.ElsewhereReply(self.moved.epoch, "")
