"""The elections at a server that may take over: it collects the grants of the voters.

A grant carries the voter's copy of the record. When the grants of one epoch are those of a
majority, the server takes over with the newest copy (`protocol/succession.py`). Until then the
voters wait for the answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.succession import Grant, Position, elected
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import JobRecord, recover
from regrow.rendezvous.settings import GRANTS, JOBS
from regrow.store import Answer


class Won(NamedTuple):
    """An election that this server has won."""

    epoch: int
    candidate: Voter
    """The voter whose agent hosts this server."""
    record: JobRecord
    """The newest copy of the record."""
    grants: Mapping[str, Grant]
    """By voter."""
    elects: Mapping[str, Voter]
    """In the first election: by endpoint, the voter that has granted."""


@dataclass(slots=True)
class Election:
    """The grants of one epoch of a job that have arrived."""

    epoch: int
    grants: dict[str, Grant] = field(default_factory=dict)
    """By voter."""
    records: dict[str, JobRecord] = field(default_factory=dict)
    """By voter: its copy of the record."""
    asked: dict[str, tuple[Hashable, int]] = field(default_factory=dict)
    """By voter: its parked question, as session and id."""
    elects: dict[str, Voter] = field(default_factory=dict)
    """In the first election: by endpoint, the voter that has granted."""

    def answer_all(self, reply: messages.Answer) -> list[Answer]:
        """Answer the voters that wait."""
        body = messages.encode(reply)
        asked, self.asked = self.asked, {}
        return [Answer(session, id, body) for session, id in asked.values()]


class Elections:
    """The elections of all jobs at one server."""

    def __init__(self) -> None:
        self._elections: dict[str, Election] = {}

    def withdraw(self, session: Hashable, id: int | None = None) -> None:
        """Remove first grants whose agents wait no longer: they may have found the job meanwhile.

        Args:
            session: the session of the agent.
            id: the question that ended; None: all of the session.
        """
        for election in self._elections.values():
            for voter, (its, asked) in [*election.asked.items()]:
                if voter in election.elects and its == session and id in (None, asked):
                    for of in (election.asked, election.grants, election.records, election.elects):
                        del of[voter]

    def granted(
        self, session: Hashable, id: int, question: messages.GrantRequest
    ) -> tuple[Won | None, list[Answer]]:
        """Add a grant.

        Returns:
            The election, if this server has won it; and the answers that are due.

        Raises:
            ValueError: the grant is refused, and changes nothing.
        """
        run_id, voter, out = question.job, question.voter, list[Answer]()
        record = recover(bytes(record) for record in question.records).get(run_id)
        if record is None or (record.seq, record.succession) != (
            question.seq,
            question.succession,
        ):
            raise ValueError(
                f"the copy of the voter {voter} does not have the {question.seq} changes that its "
                f"grant names"
            )
        election = self._elections.get(run_id)
        if election is not None and election.epoch > question.epoch:
            elsewhere = messages.ElsewhereReply(election.epoch, "")
            return None, [Answer(session, id, messages.encode(elsewhere))]
        if election is None or election.epoch < question.epoch:
            if election is not None:
                out += election.answer_all(messages.ElsewhereReply(question.epoch, ""))
            elif len(self._elections) >= JOBS:
                raise ValueError(f"this server has {JOBS} elections already, which is its limit")
            election = self._elections[run_id] = Election(question.epoch)
        if len(election.grants) >= GRANTS and voter not in election.grants:
            raise ValueError(f"an election has at most {GRANTS} grants")
        position = Position(question.copy_epoch, question.seq)
        election.grants[voter] = Grant(
            position, question.succession, question.ended, question.waited
        )
        election.records[voter] = record
        election.asked[voter] = session, id
        if question.elects is not None:
            election.elects[voter] = question.elects
        newest = elected(election.grants)
        if newest is None:
            return None, out
        del self._elections[run_id]
        out += election.answer_all(messages.DoneReply(election.epoch))
        record = election.records[newest]
        won = Won(election.epoch, question.candidate, record, election.grants, election.elects)
        return won, out
