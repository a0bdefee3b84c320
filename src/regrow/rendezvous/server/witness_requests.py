"""The keepers of a job's witness, as the server that runs the rounds sees them.

A keeper is an agent that asks in the name of the witness (`protocol/witness.py`). This object
decides which keeper is answered, and when. It knows which of them have confirmed, so whether the
witness can be a voter.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.succession import Succession, Voters, is_voter, is_witness
from regrow.rendezvous.protocol.witness import (
    CHECK_S,
    RENEW,
    needed_at,
    new_witness,
)
from regrow.rendezvous.server import server_messages as messages


class Parked(NamedTuple):
    """A parked request of a keeper."""

    session: Hashable
    id: int
    request: messages.CopyRequest


class Due(NamedTuple):
    """The next answer to the witness."""

    at: float
    keeper: str
    checks: bool
    """Whether the keeper only checks the directory."""


class WitnessRequests:
    """The witness of one job, and the requests of its keepers.

    Args:
        life: the life of the job.
        promise: how long a voter stands by its promise, in seconds.
        in_time: seconds within which a keeper must confirm; later ones do not keep leases alive.
    """

    def __init__(self, life: str, promise: float, in_time: float) -> None:
        self._life, self._promise, self._in_time = life, promise, in_time
        self.voter: Voter | None = None
        """The witness, which may not be a voter yet; None if the job needs none."""
        self._voted = False  # whether it has been a voter
        self.wanted_by: frozenset[str] = frozenset()
        """Ids of the agents that are to be voters with it, and so its keepers."""
        self.keepers: frozenset[str] = frozenset()
        """Ids of the agents that have written to the ballot in this epoch."""
        self._before: frozenset[str] = frozenset()  # voters that have it already: were checked then
        self.is_late = False
        """Whether the latest answer was not confirmed in time."""
        self._parked: dict[str, Parked] = {}  # by keeper; the latest request is the last one
        self._sent: tuple[int, float, str] = 0, -inf, ""  # number, time and keeper of an answer
        self._confirmed = True

    def candidate(self, succession: Succession, seq: int) -> Voter:
        """Return the witness that is a voter, or the one that may become one.

        Args:
            succession: the current succession.
            seq: the number of changes in the record.
        """
        voting = [voter for voters in succession.voters for voter in voters if is_witness(voter)]
        if voting:
            self._keep(voting[-1])
            self._voted = True
        elif self._voted or self.voter is None:
            self._keep(new_witness(self._life, succession.epoch, seq))
            self._voted = False
        assert self.voter is not None
        return self.voter

    def _keep(self, voter: Voter) -> None:
        if voter != self.voter:
            self.voter, self.keepers, self.is_late = voter, frozenset(), False
            self._sent, self._confirmed = (0, -inf, ""), True

    def want(self, wanted: Voters, succession: Succession) -> bool:
        """Return whether the witness can be one of the wanted voters.

        Args:
            wanted: the voters that the job should have, with the witness if it can be one.
            succession: the current succession.
        """
        assert self.voter is not None
        with_it = [voters for voters in succession.voters if self.voter in voters]
        self.wanted_by = frozenset()
        if self.voter in wanted:
            self.wanted_by = frozenset(voter.id for voter in wanted if not is_witness(voter))
        elif not with_it:
            self.voter, self._voted, self._before = None, False, frozenset()
            return False
        self._before = frozenset(voter.id for voters in with_it for voter in voters)
        return not self.is_late and self.wanted_by <= self._trusted()

    def asked(self, parked: Parked, now: float) -> float | None:
        """Park a request.

        Returns:
            When the answer was sent that it confirms; None if it confirms none.
        """
        request = parked.request
        self._parked.pop(request.keeper, None)
        self._parked[request.keeper] = parked
        number, sent, to = self._sent
        confirms = request.answer == number
        if not number or request.keeper != to or not (confirms or request.checked == number):
            return None
        if not self._confirmed:
            self._confirmed = True
            self.is_late = now > sent + self._in_time
            if not self.is_late:
                self.keepers |= {to}
        return sent if confirms else None

    def unpark(self, session: Hashable, id: int | None = None) -> None:
        """Drop the parked requests of a session, or one of them."""
        for keeper, parked in [*self._parked.items()]:
            if parked.session == session and id in (None, parked.id):
                del self._parked[keeper]

    def take(self, keeper: str) -> Parked:
        """Remove and return the parked request of a keeper."""
        return self._parked.pop(keeper)

    def take_all(self) -> list[Parked]:
        """Remove and return all parked requests."""
        parked, self._parked = [*self._parked.values()], {}
        return parked

    @property
    def late_at(self) -> float:
        """When the witness becomes late."""
        return inf if self._confirmed or self.is_late else self._sent[1] + self._promise

    def check(self, now: float) -> None:
        """Note that the witness is late, if it is."""
        if now >= self.late_at:
            self.is_late, self.keepers = True, frozenset()

    @property
    def latest(self) -> tuple[str, int] | None:
        """Id of the witness, and the number of the latest answer to it, for the other voters."""
        return None if self.voter is None else (self.voter.id, self._sent[0])

    def sent(self, number: int, now: float, keeper: str) -> None:
        """Note that an answer was sent to a keeper."""
        self._sent, self._confirmed = (number, now, keeper), False

    def next(self, succession: Succession, others: float, *, lacks: bool) -> Due | None:
        """Return the next answer to the witness; None if there is none.

        Args:
            succession: the current succession.
            others: see `needed_at`.
            lacks: whether the witness lacks changes.
        """
        if self.voter is None or not self._parked:
            return None
        _, sent, _ = self._sent
        soon = sent if self._confirmed else sent + RENEW * self._promise
        votes = is_voter(succession, self.voter.id)
        new = [keeper for keeper in self._parked if keeper in self.wanted_by - self._trusted()]
        to = new[0] if new else next(reversed(self._parked))
        if not votes and (creator := succession.coordinator) and creator.id not in self.keepers:
            if creator.id not in new:
                return None  # no other keeper creates the ballot
            to = creator.id
        if (new or (lacks and not votes)) and not self.is_late:
            return Due(soon, to, checks=False)
        at = sent + CHECK_S
        if votes:
            waits = self._confirmed and lacks
            needed = needed_at(others, sent, self._promise, waits=waits)
            return Due(min(needed, at), to, checks=at < needed and not lacks)
        return Due(at, to, checks=not (lacks or new))

    def _trusted(self) -> frozenset[str]:
        return self.keepers | self._before
