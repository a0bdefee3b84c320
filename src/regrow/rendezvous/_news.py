"""What happens to the nodes of a rendezvous, and what they are told of it.

These are the words in which everybody speaks with the rules (`_round`): the events that go in and
the effects that come out. Both are plain values, equal when their fields are.
"""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """One agent, for one life: an agent that was given up comes back with a new id."""

    id: str
    """Names the node; unique among all nodes that the job ever has."""
    addr: str
    """Host name or address, as the other nodes reach it; ranks follow its natural order."""
    wanted: int | None = None
    """The node rank the user gave, if any."""


# --- what happens


class Join(NamedTuple):
    """A node wants to be in a round; a member thereby ends the round that is complete."""

    node: Node
    token: int = 0
    """The number of the round in which the node was last seated; 0 before the first."""
    why: str = "it asked for a new round"
    """What to tell the others if this ends their round."""


class Leave(NamedTuple):
    """A node goes, by its own decision."""

    id: str
    token: int = 0
    """The round it was last seated in; 0 leaves from wherever the node is."""
    why: str = "it left"


class Lost(NamedTuple):
    """Somebody who waited for the node has given it up."""

    id: str
    why: str
    """What was noticed, e.g. "its connection broke"."""


class LastCallOver(NamedTuple):
    """Somebody has waited long enough after this last call began."""

    call: int
    """`Round.last_call` at the time."""


class Close(NamedTuple):
    """The job is over."""

    id: str
    why: str = "it closed the rendezvous"


Event = Join | Leave | Lost | LastCallOver | Close


# --- what nodes are told


class Seated(NamedTuple):
    """To one node: the round is complete, and you are in it."""

    id: str
    round: int
    """The round's number, from 1: the node's fencing token from now on."""
    rank: int
    world_size: int
    leader: str
    """Address of rank 0."""
    digest: str
    """The same for all who have the same members with the same ranks."""


class Placed(NamedTuple):
    """To one node: you are heard; wait."""

    id: str
    place: str
    """"forming" (a member of the round that forms), "waiting" or "standby"."""


class Refused(NamedTuple):
    """To one node: your token is not of this time. Stop what you do; come back as a new node."""

    id: str
    token: int
    why: str


class RoundEnded(NamedTuple):
    """To the members: the round is over before its work was done.

    Also the answer to a member that asks with the token of an older round; it can ask again with
    this one's, once its workers are stopped.
    """

    round: int
    id: str
    """Whose doing it was."""
    why: str

    def __str__(self) -> str:
        return f"round {self.round} is over: node {self.id}: {self.why}"


class NodesWaiting(NamedTuple):
    """To the members: this many nodes would have a seat in the next round."""

    round: int
    waiting: int

    def __str__(self) -> str:
        return (
            f"{self.waiting} node{'s wait' if self.waiting != 1 else ' waits'} for the next round"
        )


class LastCall(NamedTuple):
    """To whoever keeps the time: wait, then report `LastCallOver`, unless the call changes."""

    call: int


class RoundClosed(NamedTuple):
    """To everyone: there will be no other round."""

    id: str
    """Who closed it."""
    why: str


Effect = Seated | Placed | Refused | RoundEnded | NodesWaiting | LastCall | RoundClosed
