"""The events and actions of an agent: the input and output values of `decide`.

The class of a value is its kind. An action that takes time is an *operation*: it runs beside the
loop, at most one at a time, and its end is an event.
"""

from __future__ import annotations

from typing import NamedTuple

from regrow.agent.api import WorkerState

# --- events


class Formed(NamedTuple):
    """The round is formed and its workers have started."""

    now: float
    round: int | None = None
    """Number of the round, from 1; None if the rendezvous does not number its rounds."""
    shared: bool = False
    """Whether all nodes count failures together and judge them."""
    leads: bool = True
    """Whether this node has group rank 0, which decides when waiting nodes join."""


class Changed(NamedTuple):
    """The workers may have changed; the agent must check them."""


class Failing(NamedTuple):
    """A worker has failed, and the agent is stopping the other workers of this node."""


class CheckResult(NamedTuple):
    """Result of a check of the workers."""

    state: WorkerState
    nodes_waiting: int
    """Number of nodes that wait for the next round; 0 if the rendezvous pushes it."""
    now: float
    hopeless: bool = False
    """Whether no restart can help, because new workers would fail in the same way."""


class Verdict(NamedTuple):
    """The job's decision on a failure of this node's workers."""

    charged: bool
    """Whether the job is charged: not if a node that was lost or left is the cause."""
    final: bool
    """Whether the job's restart budget is used up."""
    mine: bool
    """Whether the charged failure is this node's; False: it is a simultaneous one elsewhere."""
    reason: str
    now: float


class RoundOver(NamedTuple):
    """Another node has ended a round."""

    round: int
    reason: str
    now: float
    full_grace: bool = False
    """Whether the workers get the longer grace: nothing has failed, or the job ends."""
    failed: bool = False
    """Whether the workers of that node have failed."""
    lost: bool = False
    """Whether that node is lost, or has left."""
    keep: bool = False
    """Whether workers that can go on live on, as after a loss, and no node pauses: nodes wait to
    join, that node has left as announced, or its lease has expired."""


class JobContinues(NamedTuple):
    """The failure that ended a round does not end the job."""

    round: int


class JobEnds(NamedTuple):
    """The failure that ended a round ends the job."""

    round: int


class JoinRequested(NamedTuple):
    """Nodes wait for a place in the next round."""

    round: int
    """The current round."""
    waiting: int
    """Number of waiting nodes; 0: all have left."""
    full: bool
    """Whether they fill the next round, so that no other node can join."""
    now: float
    hosts: tuple[str, ...] = ()
    """The first of their hosts."""


class Closed(NamedTuple):
    """The rendezvous forms no further round."""

    failed: bool
    """Whether it closed because the job has failed for good, on any node."""
    refused: bool = False
    """Whether the agent learned it when the rendezvous refused it a place in a round."""


class LeaseOver(NamedTuple):
    """This node's lease has expired, and the guardian has killed its workers."""

    round: int
    """The round in which the workers were started."""
    reason: str
    now: float


class MembershipChanged(NamedTuple):
    """A rendezvous that does not number its rounds asks to end the current round."""

    reason: str
    now: float


class DelayOver(NamedTuple):
    """The back-off is over."""


class GatherOver(NamedTuple):
    """The wait for further nodes may be over."""

    now: float
    waiting: int
    """Current number of waiting nodes."""


class Stopped(NamedTuple):
    """The workers that `StopWorkers` stopped have ended."""


class BarrierOver(NamedTuple):
    """The agents have passed the exit barrier, or the round ended while they were waiting."""

    now: float
    passed: bool
    """Whether all agents have reached the barrier, or it timed out."""


class Signaled(NamedTuple):
    """A signal that ends the job has arrived."""

    signum: int


class WorkersStarted(NamedTuple):
    """The workers of the attempt that is being formed are about to run."""


class StopBegun(NamedTuple):
    """All ranks of the job are to stop at the same step; see `features.early_stop`."""

    of_another_node: bool = False
    """Whether only another node has to end, so that this one may go on without it."""


class StopDropped(NamedTuple):
    """The job goes on: only another node leaves."""


Event = (
    Formed
    | Changed
    | Failing
    | CheckResult
    | Verdict
    | RoundOver
    | JobContinues
    | JobEnds
    | JoinRequested
    | Closed
    | LeaseOver
    | MembershipChanged
    | DelayOver
    | GatherOver
    | Stopped
    | BarrierOver
    | Signaled
    | WorkersStarted
    | StopBegun
    | StopDropped
)

# --- actions


class Form(NamedTuple):
    """Join the rendezvous and start the workers."""


class Restart(NamedTuple):
    """Stop the workers, join the rendezvous and start the workers again."""

    reason: str
    announce: bool = False
    """Whether to notify the other nodes before the stop, because this node causes the restart."""
    full_grace: bool = False
    """Whether the workers get `--shutdown-timeout` to stop, and not only `--restart-timeout`."""
    keep: bool = False
    """Whether workers that can go on in the next round live on; see `keep`."""


class CheckWorkers(NamedTuple):
    """Check the workers."""


class ReportFailure(NamedTuple):
    """Report the failure of the workers to all nodes; the result is `Verdict`."""


class Gather(NamedTuple):
    """Emit GatherOver at `until` (monotonic seconds); the workers continue until then."""

    waiting: int
    until: float


class Delay(NamedTuple):
    """Stop the remaining workers, and emit DelayOver after `seconds`."""

    seconds: float
    reason: str = "worker failure"
    announce: bool = False
    full_grace: bool = False
    """`announce` and `full_grace` are as in `Restart`."""


class ShortenGrace(NamedTuple):
    """Shorten the grace of workers that are being stopped to `--restart-timeout` from now."""


class LengthenGrace(NamedTuple):
    """Give workers that are being stopped the whole `--shutdown-timeout`, because the job ends."""


class StopWorkers(NamedTuple):
    """Stop the workers, because the job has failed."""

    report: bool = False
    """Whether the job failed on this node, which then closes the rendezvous with the reason."""


class Barrier(NamedTuple):
    """Wait for the other agents."""


class Finish(NamedTuple):
    """End the run with the result of the last check, in the state `state`."""

    state: WorkerState


class Interrupt(NamedTuple):
    """Leave any running operation and end the job with this signal."""

    signum: int


class Raise(NamedTuple):
    """End with the error of the last operation, or with a new one."""

    message: str = ""
    """Text of a new error; empty if the last operation has raised."""


Action = (
    Form
    | Restart
    | CheckWorkers
    | ReportFailure
    | Gather
    | Delay
    | ShortenGrace
    | LengthenGrace
    | StopWorkers
    | Barrier
    | Finish
    | Interrupt
    | Raise
)
