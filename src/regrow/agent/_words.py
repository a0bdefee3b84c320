"""What happens to an agent, and what it does about it: the words of `_decide`.

Events go in, actions come out; both are plain values. An action that takes time is an *operation*:
it runs beside the loop, one after the other, and its end is an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrow.agent._types import WorkerState

# --- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The run starts."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The round is formed and its workers are started."""

    now: float
    round: int | None = None
    """Its number, from 1; None where the rendezvous has none."""
    shared: bool = False
    """Whether all nodes count failures together, and so judge them."""
    leads: bool = True
    """Whether this node has group rank 0: it decides when waiting nodes are taken in."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Something about the workers may have changed: look at them."""


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker has failed, and the others of this node are being stopped because of it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the look at the workers found."""

    state: WorkerState
    nodes_waiting: int
    """How many nodes wait for the next round, where nobody pushes that."""
    now: float
    hopeless: bool = False
    """No restart can help: new workers would run into the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whose fault the failure of this node's workers was."""

    charged: bool
    """The workers are to blame, and not a node that was lost or left."""
    final: bool
    """The job's budget of restarts is used up."""
    mine: bool
    """It is this node's failure that the job is charged with; else another's, at the same time."""
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class RoundOver:
    """A round is over by the doing of another node."""

    round: int
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nodes wait that would have a seat in the next round."""

    round: int
    """The round that runs."""
    waiting: int
    """How many; 0: no longer any."""
    full: bool
    """They fill the next round: there is nobody else to wait for."""
    now: float


@dataclass(frozen=True, slots=True)
class Closed:
    """There will be no other round."""

    failed: bool
    """Because the job has failed for good, on some node."""
    refused: bool = False
    """It was learnt by being refused a seat in one."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """This node's lease was over, and its workers have been killed by their guardian."""

    round: int
    """The one that the workers were started in."""
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """A rendezvous that does not number its rounds says that this one should give way."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class DelayOver:
    """The back-off is over."""


@dataclass(frozen=True, slots=True)
class GatherOver:
    """The time for which waiting nodes were gathered may be over."""

    now: float
    waiting: int
    """How many there are by now."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The workers that `Stop` was about are gone."""


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """Every agent has reached the exit barrier, or it timed out."""


@dataclass(frozen=True, slots=True)
class BarrierBroken:
    """The round ended while the agents met at the exit barrier."""

    now: float


@dataclass(frozen=True, slots=True)
class Signaled:
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


@dataclass(frozen=True, slots=True)
class Form:
    """Rendezvous and start the workers."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Stop the workers, rendezvous and start them again."""

    reason: str
    announce: bool = False
    """It is this node's own doing: tell the others before its workers are stopped."""


@dataclass(frozen=True, slots=True)
class Look:
    """Find out how the workers are."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell all nodes that the workers have failed, and say Verdict."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Say GatherOver at `until`, in seconds of the clock; the workers run on."""

    waiting: int
    until: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Stop what is left of the workers, and say DelayOver in `seconds`."""

    seconds: float
    reason: str = "worker failure"
    announce: bool = False
    """As in `Restart`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers; the job has failed."""

    tell: bool = False
    """It failed here: close the rendezvous for all, with the reason."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait for the other agents."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Return the last report's result; in state `state`."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Leave whatever runs and end the job by this signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The group is in a state no agent can act on: end with this error."""

    message: str


@dataclass(frozen=True, slots=True)
class Raise:
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
