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
    port: int = 0
    """A free TCP port that the node holds, for the workers' rank 0 should it become rank 0."""


# --- what happens


class Join(NamedTuple):
    """A node wants to be in a round; a member thereby ends the round that is complete."""

    node: Node
    token: int = 0
    """The number of the round in which the node was last seated; 0 before the first."""
    why: str = "it asked for a new round"
    """What to tell the others if this ends their round."""


class Failed(NamedTuple):
    """The workers of a member have failed; this ends the round.

    Whether it is the workers' fault is judged when every other member of the round has been heard
    of after it: one that turns out to be lost, or to be leaving, is taken as the cause instead.
    """

    id: str
    token: int
    """The round in which they failed."""
    report: str
    """What failed, for the other nodes to show; this package does not look into it."""


class Heard(NamedTuple):
    """A member knows that its round is over, and is there: its workers are being stopped.

    A `Join` or a `Failed` of the member says the same.
    """

    id: str
    token: int
    """The round that is over."""


class Leaving(NamedTuple):
    """A member will go, and stops its workers first: the round is over, its seat not yet free."""

    id: str
    token: int
    why: str


class Leave(NamedTuple):
    """A node goes, by its own decision; its workers have ended."""

    id: str
    token: int = 0
    """The round it was last seated in; 0 leaves from wherever the node is."""
    why: str = "it left"


class Lost(NamedTuple):
    """Somebody who waited for the node has given it up."""

    id: str
    why: str
    """What was noticed, e.g. "its connection broke"."""
    place: int = 0
    """Where the node stood when it was judged (`_state.place`): it is not lost if it has got
    elsewhere since. 0: it is known to have ended, wherever it stands."""


class LastCallOver(NamedTuple):
    """Somebody has waited long enough after this last call began."""

    call: int
    """`Round.last_call` at the time."""


class Close(NamedTuple):
    """The job is over."""

    id: str
    why: str = "it closed the rendezvous"
    report: str = ""
    """What failed for good, for every node to show; empty when the job did not fail."""


Event = Join | Failed | Heard | Leaving | Leave | Lost | LastCallOver | Close


def subject(event: Event) -> str:
    """Return the node that an event is about; "" if it is about none."""
    if isinstance(event, Join):
        return event.node.id
    return "" if isinstance(event, LastCallOver) else event.id


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
    port: int = 0
    """The port that rank 0 holds for the workers; 0 when it named none."""
    failures: int = 0
    """How many failures of workers the job has been charged with so far."""


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
    report: str = ""
    """What failed, if the workers of that node did."""

    def __str__(self) -> str:
        return f"round {self.round} is over: node {self.id}: {self.why}"


class Judged(NamedTuple):
    """To the members of a round that `Failed` ended: whose fault it was."""

    round: int
    charged: bool
    """Whether the workers are to blame, so that it counts as a failure of the job."""
    failures: int
    """How many the job has been charged with, this one included."""
    cause: RoundEnded
    """What ended the round, as judged."""


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
    report: str = ""
    """What failed for good; empty when the job did not fail."""
    lost: bool = False
    """Whether that node was lost or left, and no other can take its place: the job could go on if
    it were started again."""


Effect = Seated | Placed | Refused | RoundEnded | Judged | NodesWaiting | LastCall | RoundClosed
