"""Planted bugs of the failover: each is a small patch of its rules, or of a voter or a coordinator.

They are the mistakes that the literature knows: a vote that is given twice or forgotten, an answer
before a majority has the change, an old copy that wins, a lease that is renewed without a majority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import Any
from unittest import mock

from msgspec.structs import replace

from regrow.rendezvous.protocol import succession
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import Grant, Position, Succession, Voters, is_quorum
from regrow.rendezvous.server import copies, round_service, successor
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.copies import Copies
from regrow.rendezvous.server.round_service import JobRecord
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


def a_voter_forgets_its_grant() -> list[Any]:
    """A voter that has granted an epoch follows an older coordinator again."""
    real = Successor._take

    def take(self: Successor, reply: messages.CopyReply) -> bool:
        self._promised = min(self._promised, reply.epoch)
        return real(self, reply)

    return [mock.patch.object(Successor, "_take", take)]


def the_oldest_copy_wins() -> list[Any]:
    """The candidate continues from the oldest record among the grants."""
    real = succession.elected

    def elected(grants: Mapping[str, Grant]) -> str | None:
        if real(grants) is None:
            return None
        return min(grants, key=lambda id: grants[id].position)

    return [mock.patch.object(round_service, "elected", elected)]


def a_copy_of_an_old_epoch_counts() -> list[Any]:
    """A coordinator takes the copy of an older epoch for one of its own."""
    real = Copies.asked

    def asked(self: Copies, session: Any, id: int, request: Any, now: float) -> list[Answer]:
        seq = min(request.seq, self.seq) if request.epoch >= 0 else 0
        return real(self, session, id, replace(request, epoch=self.epoch, seq=seq), now)

    return [mock.patch.object(Copies, "asked", asked)]


def a_promise_is_not_kept() -> list[Any]:
    """A voter grants the next epoch after a moment of silence."""
    real = Successor.__init__

    def init(self: Successor, run_id: str, me: Any, promise: float, *a: Any, **k: Any) -> None:
        real(self, run_id, me, promise / 10, *a, **k)

    return [mock.patch.object(Successor, "__init__", init)]


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
    """The record that a server writes down does not contain the voters."""
    real = round_service.ServedJob.record

    def record(self: round_service.ServedJob) -> JobRecord:
        return replace(real(self), succession=Succession())

    return [mock.patch.object(round_service.ServedJob, "record", record)]


def _taken_over_as(change: Any) -> list[Any]:
    real = round_service.RendezvousService._take_over

    def take_over(self: Any, run_id: str, *arguments: Any) -> list[Answer]:
        out = real(self, run_id, *arguments)
        job = self.jobs[run_id]
        job.state = change(job.state)
        return out

    return [mock.patch.object(round_service.RendezvousService, "_take_over", take_over)]


def failures_are_forgotten_at_the_takeover() -> list[Any]:
    """The new coordinator does not know how many restarts are left."""
    return _taken_over_as(lambda state: replace(state, failures=0, spent={}, charged=False))


def the_end_is_forgotten_at_the_takeover() -> list[Any]:
    """The new coordinator does not know that the job was closed."""
    return _taken_over_as(lambda state: replace(state, closed=None, gone=frozenset()))


def a_voter_of_another_epoch_counts_in_an_election() -> list[Any]:
    """The grants of all epochs are counted together."""
    real = round_service._Election
    shared: dict[int, Any] = {}

    def election(epoch: int) -> Any:
        last = shared.get(0)
        made = real(epoch)
        if last is not None and last.epoch < epoch:
            made.grants.update(last.grants)
            made.records.update(last.records)
        shared[0] = made
        return made

    return [mock.patch.object(round_service, "_Election", election)]


__all__ = ["Position", "Round", "is_quorum", "partial", "successor"]
