"""Planted bugs of the failover: each is a small patch of its rules, or of a voter or a coordinator.

They are the mistakes that the literature knows: a vote that is given twice or forgotten, an answer
before a majority has the change, an old copy that wins, a lease that is renewed without a majority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any
from unittest import mock

from msgspec.structs import replace

from regrow.rendezvous.protocol import succession
from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.succession import Grant, Succession, Voters
from regrow.rendezvous.server import copies, elections, records, round_service
from regrow.rendezvous.server.copies import Copies
from regrow.rendezvous.server.elections import Elections, Won
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.server.round_service import RendezvousService
from regrow.rendezvous.server.successor import Successor
from regrow.store import Answer


def half_of_the_voters_is_enough() -> list[Any]:
    """A tie elects, so two halves elect two coordinators."""

    def quorum(voters: Iterable[Voters], ids: Set[str]) -> bool:
        return all(2 * sum(voter.id in ids for voter in one) >= len(one) - 1 for one in voters)

    return [mock.patch.object(succession, "is_quorum", quorum)]


def an_answer_is_not_held_back() -> list[Any]:
    """A node is told a change that no voter has yet."""

    def hold(self: Copies, answers: list[Answer]) -> list[Answer]:
        return answers

    return [mock.patch.object(Copies, "hold", hold)]


def the_oldest_copy_wins() -> list[Any]:
    """The candidate continues from the oldest record among the grants."""
    real = succession.elected

    def elected(grants: Mapping[str, Grant]) -> str | None:
        if real(grants) is None:
            return None
        return min(grants, key=lambda id: grants[id].position)

    return [mock.patch.object(elections, "elected", elected)]


def leases_are_renewed_without_a_majority() -> list[Any]:
    """A coordinator that is cut off renews the leases of the nodes on its side."""
    return [mock.patch.object(Copies, "may_renew", return_value=True)]


def a_seat_is_given_away_at_the_takeover() -> list[Any]:
    """The new coordinator does not wait for the leases that the old one has renewed."""
    return [mock.patch.object(round_service, "MARGIN", 2.0)]


def voters_change_at_once() -> list[Any]:
    """The new voters count at once, without a majority of the old ones."""

    def change(now: Succession, wanted: Voters, ready: Set[str], kept: bool) -> Succession:
        new = now.voters[-1] if now.voters else ()
        return now if {*wanted} == {*new} else replace(now, voters=(wanted,) if wanted else ())

    return [mock.patch.object(copies, "change_voters", change)]


def a_restarted_server_forgets_the_voters() -> list[Any]:
    """A server that continues from its journal answers without a majority."""

    def recover(found: Iterable[bytes]) -> dict[str, JobRecord]:
        jobs = records.recover(found)
        return {id: replace(job, succession=Succession()) for id, job in jobs.items()}

    return [mock.patch.object(round_service, "recover", recover)]


def failures_are_forgotten_at_the_takeover() -> list[Any]:
    """The new coordinator does not know how many restarts are left."""
    real = RendezvousService._take_over

    def take_over(self: Any, won: Won, now: float) -> list[Answer]:
        out = real(self, won, now)
        job = self.jobs[won.record.job]
        job.state = replace(job.state, failures=0, spent={}, charged=False)
        return out

    return [mock.patch.object(RendezvousService, "_take_over", take_over)]


def first_grants_are_never_withdrawn() -> list[Any]:
    """An agent that has found the job still elects a server that begins another one."""
    return [mock.patch.object(Elections, "withdraw")]


def an_agent_is_the_same_voter_after_its_start() -> list[Any]:
    """An agent that has forgotten what it has confirmed counts as if it still had it."""

    def with_agents(now: Succession, agents: Mapping[str, Voter]) -> Succession:
        return now

    def votes_as(self: Successor) -> str:
        return self._listed_as or self.me.id

    real = Successor.__init__

    def init(self: Successor, run_id: str, me: Voter, *args: Any, **named: Any) -> None:
        listed_as = named.get("listed_as")
        real(self, run_id, me._replace(id=listed_as) if listed_as else me, *args, **named)

    return [
        mock.patch.object(round_service, "with_agents", with_agents),
        mock.patch.object(Successor, "_votes_as", property(votes_as)),
        mock.patch.object(Successor, "__init__", init),
    ]
