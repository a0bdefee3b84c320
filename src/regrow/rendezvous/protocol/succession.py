"""The rules by which another host takes over the rounds when the host of the server is lost.

The server that runs the rounds is the *coordinator*. Several agents, the *voters*, keep a copy of
its record of the job. One of them is the agent that hosts the coordinator; the others are on other
hosts. The record counts its changes (`seq`). A voter asks the coordinator for the changes that it
does not have yet, and each request confirms the changes before. This module contains the rules
only: no clock, no connection, no thread.

**Quorum.** Any two majorities of the voters have a voter in common. So all of the following needs a
majority:

- A change is *kept* when a majority has it. A node receives no answer that depends on a change that
  is not kept. So each later coordinator knows all that a node knows: round number, members,
  ranks, charged failures and the end of the job.
- The coordinator may renew leases only while a majority stands by its *promise* (below).
- A voter takes over when a majority has granted it an *epoch*. A grant carries the record of its
  voter, and the newest record among a majority contains every change that was kept.

**Epoch.** The number of a turn to run the rounds. It also grows when the candidate of a turn is not
elected. A voter grants each epoch once, to the one candidate
that the record determines (`candidate`). From then on it neither confirms changes of an older epoch
nor stands by a promise to an older coordinator. A record of a newer epoch is newer than any record
of an older one, because it contains what a majority knew when the epoch began.

**Promise.** A voter that has received an answer of its coordinator starts no election for `promise`
seconds, by its own clock. The coordinator counts the same seconds from when it sent that answer, so
its count ends first. It renews leases only while the promise of a majority lasts for another
`margin` seconds by this count. A voter breaks its promise in two cases: no process listens at the
coordinator's address any more, or a server names a newer epoch. Each grant says whether the voter
has waited for the end of its promise, and whether it found that the coordinator has ended. If a
majority has waited, the old coordinator renewed its last lease at least `margin` seconds ago. If a
majority found that it has ended, it renews none from now on. Otherwise it may renew leases for
another `promise - margin` seconds. The new coordinator counts the silence of the nodes from the
latest of these times.

A voter that resigns, because its agent leaves, grants no epoch from then on. So it counts for its
coordinator as if it confirmed everything. A voter that is killed does not count: the closed
connection of a process may be the work of a proxy, and the process may live.

**Change of voters.** The voters follow the members of the rounds (`wanted_voters`). While they
change, there are two sets, the old and the new voters, and everything needs a majority of both
(joint consensus, Ongaro and Ousterhout 2014). Voters are added only when they have the record. With
fewer than three hosts, a majority would outlive no loss, so there are no voters, and the loss of
the coordinator's host ends the job. The last voters first learn that they are *retired*: they grant
no epoch any more.

**Two hosts** have voters if the job has a *witness* (`protocol/witness.py`): a third voter, whose
state is in a directory that both hosts see. It runs no agent, so it is no candidate. Everything
else holds for it too.

**Begin.** If the user lists several endpoints, these are the first voters, each with the record of
a job without nodes. The agents that serve them grant the first epochs in their place, and so elect
the first coordinator. In its record, the agents take the place of the endpoints (`with_agents`). So
one job begins, although some of the listed hosts may be lost, and an agent that is started again on
one of them does not begin a second one. With a single endpoint, its server begins the job by
itself, and there are no voters until the first round is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from regrow.rendezvous.protocol.messages import Voter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regrow.rendezvous.protocol.state import Round

PROMISE = 1 / 2
"""How long a voter stands by its promise, as a part of a lease."""
MARGIN = 1 / 6
"""The coordinator stops renewing leases this long before its end, as a part of a lease."""
MOST_SUCCESSORS = 4
"""Most voters besides the coordinator's; with so many, any two hosts may be lost at one time."""

TWO = 2
"""So many hosts need a witness."""

Voters = tuple[Voter, ...]


class Succession(Struct, array_like=True, frozen=True):
    """Who runs the rounds of a job, and who may take over; a part of the job's record."""

    epoch: int = 0
    """The number of the turn in which the coordinator was elected; 0: the job's first server."""
    coordinator: Voter | None = None
    """The voter whose agent hosts the coordinator; None if no agent has reported that it does."""
    voters: tuple[Voters, ...] = ()
    """Empty: no voters. One set: the voters. Two sets: the old and the new voters."""
    retired: bool = False
    """Whether the voters are about to be removed, so that they grant nothing any more."""


class Position(NamedTuple):
    """How new a copy of the record is; the greater position is the newer one."""

    epoch: int = -1
    """The epoch of the coordinator from which the copy was received; -1: there is no copy."""
    seq: int = 0
    """The number of changes in it."""


class Grant(NamedTuple):
    """A voter's grant of an epoch to a candidate."""

    position: Position
    """The position of the voter's copy."""
    succession: Succession
    """The succession in that copy."""
    ended: bool
    """Whether the voter found that the coordinator of its copy has ended."""
    waited: bool
    """Whether the voter has waited for the end of its promise to that coordinator."""


def is_voter(succession: Succession, id: str) -> bool:
    """Return whether an agent is one of the voters, old or new."""
    return any(voter.id == id for voters in succession.voters for voter in voters)


def is_quorum(voters: Iterable[Voters], ids: Set[str]) -> bool:
    """Return whether the ids contain a majority of each set of voters."""
    return all(2 * sum(voter.id in ids for voter in one) > len(one) for one in voters)


def quorum_value(voters: Iterable[Voters], values: Mapping[str, float]) -> float:
    """Return the greatest number that a majority of each set of voters has reached.

    Args:
        voters: the sets of voters; at least one.
        values: a number for each voter; a voter that is not in it has reached none (minus
            infinity).
    """
    reached = []
    for one in voters:
        numbers = sorted((values.get(voter.id, float("-inf")) for voter in one), reverse=True)
        reached.append(numbers[len(one) // 2])
    return min(reached)


def odd_number(voters: Voters) -> Voters:
    """Return the voters without the last one if their number is even: it outlives no loss more."""
    return voters[: len(voters) - 1 + len(voters) % 2]


def first_voters(listed: Voters, *, witness: bool) -> Voters:
    """Return the first voters of a job with several endpoints.

    With a witness, two endpoints are both voters: both hosts begin the job. The witness joins them
    later, because only two agents together can find out that they see the same directory.
    """
    return listed if witness and len(listed) == TWO else odd_number(listed)


def is_witness(voter: Voter) -> bool:
    """Return whether a voter is a witness: it is on no host."""
    return not voter.host


def wanted_voters(
    state: Round, succession: Succession, successors: int, witness: Voter | None = None
) -> Voters:
    """Return the voters that a job should have: an odd number on different hosts, or none.

    Args:
        state: the state of the rounds.
        succession: the current succession.
        successors: most voters besides the coordinator's.
        witness: the third voter if there are two hosts; None: the job has no witness that answers.

    The coordinator's agent comes first, then the other voters that are still members, then the
    members in the order of their ranks. While no round is complete, and when the job is closed, the
    voters stay as they are; only two voters get their witness.
    """
    current = succession.voters[-1] if succession.voters else ()
    first = succession.coordinator
    if first is None or not state.complete or state.closed:
        if succession.retired:
            return ()
        joins = witness is not None and not state.closed and len(current) == TWO
        return (*current, witness) if joins and witness is not None else current
    able = _able(state)
    by_id = {voter.id: voter for voter in able}
    kept = [by_id[voter.id] for voter in current if voter.id in by_id]
    chosen: dict[str, Voter] = {}
    # The server of an agent that has ended still serves its clients, but that agent has no vote.
    for voter in (*([by_id[first.id]] if first.id in by_id else []), *kept, *able):
        chosen.setdefault(voter.host, voter)
    voters = tuple(chosen.values())[: 1 + successors]
    if witness is not None and len(voters) == TWO:
        return (*voters, witness)
    voters = odd_number(voters)
    return voters if len(voters) > 1 else ()


def reporter(state: Round, succession: Succession) -> Voter | None:
    """Return the agent that reports to the endpoints where the rounds are run: the coordinator's.

    If that agent has ended, its server still serves the nodes. Then the first member reports.
    """
    first = succession.coordinator
    if first is None or not state.complete:
        return None
    able = _able(state)
    return next((voter for voter in able if voter.id == first.id), able[0] if able else None)


def _able(state: Round) -> list[Voter]:
    """Return the voters of the members that have not left, in the order of their ranks."""
    staying = (state.members[id].voter for id in state.ranks if id not in state.gone)
    return [voter for voter in staying if voter is not None]


def with_agents(succession: Succession, agents: Mapping[str, Voter]) -> Succession:
    """Return the succession with agents in place of the listed endpoints that they serve.

    Args:
        succession: the current succession.
        agents: by endpoint, the voter that the agent there is.

    This is the first step of a coordinator that these agents have elected. An agent that is started
    again is another voter, because it has forgotten what it has granted.
    """
    first = succession.coordinator
    return replace(
        succession,
        coordinator=first and agents.get(first.id, first),
        voters=tuple(
            tuple(agents.get(voter.id, voter) for voter in one) for one in succession.voters
        ),
    )


def with_agent(succession: Succession, endpoint: str, agent: Voter) -> Succession:
    """Return the succession after an agent begins to take the place of the endpoint that it serves.

    Args:
        succession: the current succession; a majority has it.
        endpoint: an endpoint.
        agent: the voter that the agent there is.

    An endpoint among the voters confirms nothing. So while there is one of three, each change that
    was kept is known to both others, and each of them may take over together with any agent that
    serves the endpoint. This ends when both others have the change to the two sets.
    """
    after = with_agents(succession, {endpoint: agent})
    if after == succession or len(succession.voters) != 1:
        return succession
    return replace(after, voters=(*succession.voters, *after.voters))


def change_voters(
    succession: Succession, wanted: Voters, ready: Set[str], kept: bool
) -> Succession:
    """Return the succession after the next step towards the wanted voters.

    Args:
        succession: the current succession.
        wanted: the wanted voters.
        ready: ids of the agents that have the whole record.
        kept: whether a majority of the voters has the whole record, with the latest step.
    """
    if not kept:
        return succession
    if succession.retired:
        return replace(succession, voters=(), retired=False)
    *old, new = succession.voters or ((),)
    if old:
        return replace(succession, voters=(new,))
    if {*wanted} == {*new} or not {voter.id for voter in wanted} <= ready:
        return succession
    if not wanted:
        return replace(succession, retired=True)
    return replace(succession, voters=(new, wanted) if new else (wanted,))


def candidate(succession: Succession, epoch: int) -> Voter:
    """Return the voter that may take over in an epoch: the voters on hosts take turns.

    Args:
        succession: a succession with voters.
        epoch: an epoch after the one of the succession.
    """
    voters = tuple(voter for voter in succession.voters[-1] if not is_witness(voter))
    ids = [voter.id for voter in voters]
    first = succession.coordinator
    at = ids.index(first.id) if first and first.id in ids else -1
    return voters[(at + epoch - succession.epoch) % len(voters)]


def elected(grants: Mapping[str, Grant]) -> str | None:
    """Return the voter with the newest record if the grants of one epoch elect the candidate.

    Args:
        grants: the grants of one epoch by id of the voter.
    """
    if not grants:
        return None
    newest = max(grants, key=lambda id: grants[id].position)
    succession = grants[newest].succession
    if not succession.voters or succession.retired:
        return None
    return newest if is_quorum(succession.voters, grants.keys()) else None


def has_ended(grants: Mapping[str, Grant], succession: Succession) -> bool:
    """Return whether a majority found that the coordinator of a succession has ended."""
    found = {
        id
        for id, grant in grants.items()
        if grant.ended and grant.position.epoch == succession.epoch
    }
    return is_quorum(succession.voters, found)


def has_waited(grants: Mapping[str, Grant], succession: Succession) -> bool:
    """Return whether a majority has waited for the end of its promise to the old coordinator."""
    return is_quorum(succession.voters, {id for id, grant in grants.items() if grant.waited})
