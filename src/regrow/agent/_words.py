"""What happens to an agent, and what it does about it: the words of `_decide`.

Events go in, actions come out; both are plain values, told apart by their class. An action that
takes time is an *operation*: it runs beside the loop, one after the other, and its end is an event.
"""

from __future__ import annotations

from typing import NamedTuple

from regrow.agent._types import WorkerState

# --- events


class Begin(NamedTuple):
    """The run starts."""


class Formed(NamedTuple):
    """The round is formed and its workers are started."""

    now: float
    round: int | None = None
    """Its number, from 1; None where the rendezvous has none."""
    shared: bool = False
    """Whether all nodes count failures together, and so judge them."""
    leads: bool = True
    """Whether this node has group rank 0: it decides when waiting nodes are taken in."""


class Changed(NamedTuple):
    """Something about the workers may have changed: look at them."""


class Failing(NamedTuple):
    """A worker has failed, and the others of this node are being stopped because of it."""


class Report(NamedTuple):
    """What the look at the workers found."""

    state: WorkerState
    nodes_waiting: int
    """How many nodes wait for the next round, where nobody pushes that."""
    now: float
    hopeless: bool = False
    """No restart can help: new workers would run into the same."""


class Verdict(NamedTuple):
    """Whose fault the failure of this node's workers was."""

    charged: bool
    """The workers are to blame, and not a node that was lost or left."""
    final: bool
    """The job's budget of restarts is used up."""
    mine: bool
    """It is this node's failure that the job is charged with; else another's, at the same time."""
    reason: str
    now: float


class RoundOver(NamedTuple):
    """A round is over by the doing of another node."""

    round: int
    reason: str
    now: float


class Waiting(NamedTuple):
    """Nodes wait that would have a seat in the next round."""

    round: int
    """The round that runs."""
    waiting: int
    """How many; 0: no longer any."""
    full: bool
    """They fill the next round: there is nobody else to wait for."""
    now: float


class Closed(NamedTuple):
    """There will be no other round."""

    failed: bool
    """Because the job has failed for good, on some node."""
    refused: bool = False
    """It was learnt by being refused a seat in one."""


class LeaseOver(NamedTuple):
    """This node's lease was over, and its workers have been killed by their guardian."""

    round: int
    """The one that the workers were started in."""
    reason: str
    now: float


class MembershipChanged(NamedTuple):
    """A rendezvous that does not number its rounds says that this one should give way."""

    reason: str
    now: float


class DelayOver(NamedTuple):
    """The back-off is over."""


class GatherOver(NamedTuple):
    """The time for which waiting nodes were gathered may be over."""

    now: float
    waiting: int
    """How many there are by now."""


class Stopped(NamedTuple):
    """The workers that `Stop` was about are gone."""


class BarrierPassed(NamedTuple):
    """Every agent has reached the exit barrier, or it timed out."""


class BarrierBroken(NamedTuple):
    """The round ended while the agents met at the exit barrier."""

    now: float


class Signaled(NamedTuple):
    """A signal that ends the job arrived."""

    signum: int


Event = (
    Begin
    | Formed
    | Changed
    | Failing
    | Report
    | Verdict
    | RoundOver
    | Waiting
    | Closed
    | LeaseOver
    | MembershipChanged
    | DelayOver
    | GatherOver
    | Stopped
    | BarrierPassed
    | BarrierBroken
    | Signaled
)

# --- actions


class Form(NamedTuple):
    """Rendezvous and start the workers."""


class Restart(NamedTuple):
    """Stop the workers, rendezvous and start them again."""

    reason: str
    announce: bool = False
    """It is this node's own doing: tell the others before its workers are stopped."""


class Look(NamedTuple):
    """Find out how the workers are."""


class Tell(NamedTuple):
    """Tell all nodes that the workers have failed, and say Verdict."""


class Gather(NamedTuple):
    """Say GatherOver at `until`, in seconds of the clock; the workers run on."""

    waiting: int
    until: float


class Delay(NamedTuple):
    """Stop what is left of the workers, and say DelayOver in `seconds`."""

    seconds: float
    reason: str = "worker failure"
    announce: bool = False
    """As in `Restart`."""


class Stop(NamedTuple):
    """Stop the workers; the job has failed."""

    tell: bool = False
    """It failed here: close the rendezvous for all, with the reason."""


class Barrier(NamedTuple):
    """Wait for the other agents."""


class Finish(NamedTuple):
    """Return the last report's result; in state `state`."""

    state: WorkerState


class Interrupt(NamedTuple):
    """Leave whatever runs and end the job by this signal."""

    signum: int


class GiveUp(NamedTuple):
    """The group is in a state no agent can act on: end with this error."""

    message: str


class Raise(NamedTuple):
    """End with the error that the last operation raised."""


Action = (
    Form
    | Restart
    | Look
    | Tell
    | Gather
    | Delay
    | Stop
    | Barrier
    | Finish
    | Interrupt
    | GiveUp
    | Raise
)
