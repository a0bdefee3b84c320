"""Events of the rounds, and what nodes learn from their state.

Drivers pass events to the rules (`rules.py`), which change the state. A node learns its status from
the state (`state.status_of`), and its agent receives notifications. All are plain values, and two
values are equal if their fields are equal.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from regrow.utils import host_of, printable


class Voter(NamedTuple):
    """An agent that can keep a copy of the job's record, and serve the rounds (`succession.py`)."""

    id: str
    """Unique among all agents that the job ever has; it stays the same in all lives of the node."""
    host: str
    """Host name or address by which the other nodes reach the agent."""
    port: int
    """The TCP port that the agent holds, and at which it serves."""


class Node(NamedTuple):
    """One agent during one life; an evicted agent rejoins with a new id."""

    id: str
    """The node's id, unique among all nodes that the job ever has."""
    addr: str
    """Host name or address by which the other nodes reach the node; ranks follow its natural
    order."""
    wanted: int | None = None
    """The node rank that the user gave; None if the user gave none."""
    port: int = 0
    """A free TCP port that the node holds. The workers' rank 0 uses it if the node becomes rank
    0."""
    voter: Voter | None = None
    """The voter that this agent can be; None if it cannot be one."""


# --- events


class JoinRound(NamedTuple):
    """A node asks for a seat in a round; if the node is a member, this ends the complete round."""

    node: Node
    token: int = 0
    """The number of the round in which the node was last seated; 0 before its first seat."""
    why: str = "it starts its workers again"
    """The reason that the other nodes receive if this event ends their round."""


class WorkersFailed(NamedTuple):
    """The workers of a member have failed; this ends the round.

    The verdict follows when every other member of the round has sent a message after this event. If
    a member is lost or leaving by then, that member is the cause instead.
    """

    id: str
    token: int
    """The number of the round in which the workers failed."""
    report: str
    """Description of the failure, for the other nodes to show; this package does not parse it."""


class SpendRestart(NamedTuple):
    """A member replaces one worker without the end of the round; this costs one restart."""

    id: str
    token: int
    """The number of the round."""
    number: int
    """Number of this replacement among those of the member in the round, from 1.

    A repeated event has the same number, and is charged once. An event that was not received is
    charged with the next one.
    """


class EndConfirmed(NamedTuple):
    """A member confirms that it knows the end of its round and is stopping its workers.

    A `JoinRound` or a `WorkersFailed` of the member confirms the same.
    """

    id: str
    token: int
    """The number of the round that is over."""


class NodeLeaving(NamedTuple):
    """A member is about to leave and stops its workers; it keeps its seat.

    Its round ends now, or, with `until_left`, when it has left.
    """

    id: str
    token: int
    why: str
    full_grace: bool = False
    """Whether the workers have the whole `--shutdown-timeout` to stop. They have it if nothing has
    failed, or if the job ends."""
    keep: bool = False
    """Whether workers that can go on in the next round live on: nodes wait to join, or this node's
    lease has expired. Nothing has failed, and this node comes back at once."""
    until_left: bool = False
    """Whether the round goes on until this node has left, so that the workers of the other nodes,
    which can go on in the next round, are not ended while it stops its own. If too few nodes would
    be left for a round, it is over at once all the same."""


class LeaveRound(NamedTuple):
    """A node leaves by its own decision, after its workers have ended."""

    id: str
    token: int = 0
    """The round in which the node was last seated; with 0 the node leaves from any place."""
    why: str = "it left"


class NodeLost(NamedTuple):
    """A node is lost: its process has ended, or it was silent for too long."""

    id: str
    why: str
    """The evidence, e.g. "its connection broke"."""
    place: int = 0
    """The place of the silent node (`state.place`); 0: its process has ended, in any place.

    The node is not lost if it has another place by now.
    """


class LastCallOver(NamedTuple):
    """The time of a last call is over."""

    call: int
    """The value of `Round.last_call` for this last call."""


JOB_STOPS: Final = "the job is stopped by "
"""How the reason of a node that leaves (`LeaveRound`) begins if the whole job stops early.

Such a job is not closed, because the next run may have the same id. But a node that stands by must
not go on with the job alone.
"""


class CloseRendezvous(NamedTuple):
    """A member of the round ends the job; any other node is refused."""

    id: str
    why: str = "it closed the rendezvous"
    report: str = ""
    """Description of the final failure, for every node to show; empty if the job did not fail."""


Event = (
    JoinRound
    | WorkersFailed
    | SpendRestart
    | EndConfirmed
    | NodeLeaving
    | LeaveRound
    | NodeLost
    | LastCallOver
    | CloseRendezvous
)


def subject(event: Event) -> str:
    """Return the id of the node that an event concerns; "" if it concerns none."""
    if isinstance(event, JoinRound):
        return event.node.id
    return "" if isinstance(event, LastCallOver) else event.id


# --- statuses of nodes, and notifications


SUCCESSORS = 3
"""How many ranks may act for rank 0 when its host is lost."""


MOST_JOINED = 16
FIRST_RANKS = 5
"""How many hosts each node can name: of these are the hosts that may serve the rounds."""


class Departed(NamedTuple):
    """A member of the previous round that is not in this round."""

    id: str
    rank: int
    """The node's rank in the previous round."""
    why: str
    """The evidence of the loss, or the reason for leaving."""


class Seated(NamedTuple):
    """To one node: the round is complete, and the node has a seat in it."""

    id: str
    round: int
    """The number of the round, from 1; from now on it is the node's fencing token."""
    rank: int
    world_size: int
    leader: str
    """Address of rank 0."""
    digest: str
    """The same for all nodes that have the same members with the same ranks."""
    port: int = 0
    """The port that rank 0 holds for the workers; 0 if rank 0 gave none."""
    failures: int = 0
    """How many worker failures the job had been charged with when the round began."""
    departed: tuple[Departed, ...] = ()
    """Members of the previous round that are lost or have left, by their ranks in that round."""
    successors: tuple[str, ...] = ()
    """Addresses of the ranks from 1 on, at most `SUCCESSORS`: the first that act for rank 0."""
    joined: tuple[str, ...] = ()
    """Ids of the first nodes, at most `MOST_JOINED`, that were not in the previous round; empty in
    the first round."""
    first_ranks: tuple[str, ...] = ()
    """Ids of the nodes with the first ranks, at most `FIRST_RANKS`."""


class Placed(NamedTuple):
    """To one node: the node has to wait."""

    id: str
    place: str
    """"forming" (a member of the round that forms), "waiting" or "standby"."""
    stopped_by: str = ""
    """Who asked the job to stop, if a member of the previous round has left for this reason."""


class NodeRefused(NamedTuple):
    """To one node: its token is stale. It has to stop its workers, and to rejoin under a new id."""

    id: str
    why: str


class RoundEnded(NamedTuple):
    """To the members: the round is over before its work was done.

    It is also the answer to a member that asks with the token of an older round. The member can ask
    again with the token of this round after it has stopped its workers.
    """

    round: int
    id: str
    """The node that caused the end."""
    why: str
    report: str = ""
    """Description of the failure, if the workers of that node failed."""
    full_grace: bool = False
    """See `NodeLeaving`."""
    lost: bool = False
    """Whether that node is lost, or has left without notice; otherwise it is present, is about to
    leave, or has left as it had announced."""
    keep: bool = False
    """Whether workers that can go on in the next round live on, because nothing has failed: waiting
    nodes join, the node has left as it had announced, or its lease has expired. See
    `NodeLeaving`."""

    def __str__(self) -> str:
        return f"{'lost host' if self.lost else 'host'} {host_of(self.id)}: {printable(self.why)}"


class Judged(NamedTuple):
    """To the members of a round that `WorkersFailed` ended: the verdict on the cause."""

    round: int
    charged: bool
    """Whether the workers are the cause, so that the job is charged with a failure."""
    failures: int
    """How many failures the job has been charged with, including this one."""
    cause: RoundEnded
    """The event that ended the round, according to the verdict."""


class NodesWaiting(NamedTuple):
    """To the members: the number of waiting nodes that would have a seat in the next round."""

    round: int
    waiting: int
    first: tuple[str, ...] = ()
    """The ids of the first of them, at most `MOST_JOINED`."""

    def __str__(self) -> str:
        return (
            f"{self.waiting} node{'s wait' if self.waiting != 1 else ' waits'} for the next round"
        )


class LeavingAnnounced(NamedTuple):
    """To the other members: a node stops its workers, and ends the round when it has left."""

    round: int
    id: str
    why: str

    def __str__(self) -> str:
        return f"host {host_of(self.id)} leaves: {printable(self.why)}"


class RestartSpent(NamedTuple):
    """To the members: the job has been charged in the running round, for a replaced worker."""

    round: int
    failures: int
    """How many failures the job has been charged with, including this one."""

    def __str__(self) -> str:
        return f"a worker is replaced, the job's failure number {self.failures}"


class RoundClosed(NamedTuple):
    """To all nodes: no other round follows."""

    id: str
    """The node that closed the job."""
    why: str
    report: str = ""
    """Description of the final failure; empty if the job did not fail."""
    lost: bool = False
    """Whether that node was lost or left, and no other node can take its place. In this case, the
    job can continue if it is started again."""


class ServerRestarted(NamedTuple):
    """To the agent that hosts the server: the server's process has ended, and a new one serves."""

    how: str
    """How the process ended, e.g. "was killed by SIGKILL"."""
    pid: int
    """The process id of the ended server."""
    after: float
    """Seconds from the end of the old server until the new one served."""
    failed: str = ""
    """Why no new server serves; empty if one serves."""

    def __str__(self) -> str:
        what = f"the store server (pid {self.pid}) {self.how}"
        if self.failed:
            return f"{what}, and no other server is started: {self.failed}"
        return f"{what}, and another server took over after {round(self.after, 2):g} s"


class ServersChanged(NamedTuple):
    """To every agent: which host runs the rounds, and which others may take over from it."""

    epoch: int
    """The number of the election that the host has won; 0: no host has taken over yet."""
    server: str
    """The address of the host that runs the rounds."""
    successors: tuple[str, ...]
    """The addresses of the hosts that may take over; empty if the job ends with its server."""
    may_lose: int
    """How many of all these hosts may be lost at one time, while the job continues."""
