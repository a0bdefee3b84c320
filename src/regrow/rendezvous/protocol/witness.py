"""The witness: the third voter of a job on two hosts, whose state is in a shared directory.

With two hosts, a majority outlives no loss. A directory that both hosts see gives the third vote.
The state of this voter, its *ballot*, is a value that is replaced by compare-and-set. So it does
what the rules of a voter demand (`succession.py`), whichever agent writes it: it forgets nothing,
and grants each epoch once. This module contains the rules only.

**Keepers.** The agents of the two hosts are its keepers. Each asks the coordinator in the name of
the witness, as voters do. When a keeper receives changes of the record, it writes them into the
ballot, and only then confirms them. So one keeper is enough: with the loss of an agent, of a host
or of the way to the directory, the other keeper goes on.

**The coordinator asks for the witness only when it has to** (`needed_at`): when the other voters
have not confirmed for a part of the promise. As long as both hosts are well, the ballot does not
change, and a directory that hangs delays no node. Every `CHECK_S` seconds a keeper checks that the
directory works. If it does not, the witness is removed from the voters, because with it the job
would outlive less than without.

**The candidate grants for it.** An agent that takes over writes its epoch into the ballot, in
place of the promise to the old coordinator. It has to know that this promise is over. Each answer
of the coordinator to a voter names the latest answer to the witness. If the ballot shows no later
one, then the witness has promised nothing since the coordinator's last answer to the candidate, and
both promises end at the same time. Otherwise the coordinator may live, and the candidate waits
until the ballot has not changed for the length of the promise. If the coordinator renews its
promise meanwhile, the ballot changes, and the candidate's compare-and-set fails.

**Both hosts must see the same directory.** Two directories with the same path would be two
witnesses, one for each host. So the keeper beside the coordinator creates the ballot, and no other
one does. The witness becomes a voter when each host's keeper has confirmed an answer: it has found
the ballot, and written to it. An id is used for one ballot only, so a ballot that was deleted never
votes again. A job never begins with a witness. It begins with both hosts (`first_voters`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.succession import Position

CHECK_S = 5.0
"""Seconds between two checks of a witness that is not needed."""
RENEW = 1 / 6
"""Pause between two answers to a witness that is needed, as a part of the promise; as for voters.
"""
MISSED = 1 / 3
"""The witness is needed when no majority has confirmed for this part of the promise without it."""

_Name = Annotated[str, Meta(max_length=1000)]
_Number = Annotated[int, Meta(ge=0, le=2**53)]


class Ballot(Struct, array_like=True, frozen=True):
    """The state of a witness."""

    life: _Name
    """The life of the job."""
    promised: _Number
    """The newest epoch that was granted, or that is followed."""
    granted_to: _Name
    """The id of the voter to which it was granted; empty if it is followed."""
    epoch: Annotated[int, Meta(ge=-1, le=2**53)]
    """The epoch of the copy."""
    seq: _Number
    """The number of changes in the copy."""
    answer: _Number
    """The number of the latest answer that the witness has received in the epoch of the copy."""
    record: bytes
    """The copy of the job's record."""

    @property
    def position(self) -> Position:
        """The position of the copy."""
        return Position(self.epoch, self.seq)


def new_witness(life: str, epoch: int, seq: int) -> Voter:
    """Return a witness under an id that no other one has had.

    Args:
        life: the life of the job.
        epoch: the epoch of the coordinator that adds it.
        seq: the number of changes in the record; it grows when a witness is added or removed.
    """
    return Voter(f"witness/{life}/{epoch}.{seq}", "", 0)


def may_follow(ballot: Ballot | None, epoch: int) -> bool:
    """Return whether a witness may confirm changes of an epoch."""
    return ballot is None or epoch >= ballot.promised


def granting(ballot: Ballot, epoch: int, to: str) -> Ballot | None:
    """Return the ballot after the grant of an epoch; None if the witness may not grant it.

    Args:
        ballot: the ballot; it may contain this grant already.
        epoch: the epoch.
        to: the id of the candidate.
    """
    if epoch < ballot.promised or (epoch == ballot.promised and ballot.granted_to != to):
        return None
    return replace(ballot, promised=epoch, granted_to=to)


def has_promised_since(ballot: Ballot, epoch: int, answer: int) -> bool:
    """Return whether the witness has received a later answer of a coordinator, or of a later one.

    Args:
        ballot: the ballot.
        epoch: the epoch of a coordinator.
        answer: the number of the answer, as this coordinator numbers its answers to the witness.
    """
    return (ballot.epoch, ballot.answer) > (epoch, answer)


def needed_at(others: float, sent: float, promise: float, *, waits: bool) -> float:
    """Return when the coordinator needs the next confirmation of a witness that is a voter.

    Args:
        others: when the latest answer was sent that a majority without the witness has confirmed;
            minus infinity if there is no such majority.
        sent: when the latest answer was sent to the witness.
        promise: the length of the promise, in seconds.
        waits: whether it has confirmed that answer, and lacks changes.
    """
    return max(others + MISSED * promise, sent if waits else sent + RENEW * promise)
