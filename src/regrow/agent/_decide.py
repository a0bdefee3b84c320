"""The decisions of an agent, as a function of its state and one event.

An agent forms a round and starts its workers, watches them, and when something changes either
starts them again, ends, or gives up. Everything that takes time (the rendezvous, starting and
stopping processes, looking at them, the exit barrier) is an *operation*: this file asks for one by
an action and hears of its end by an event, so that no decision ever waits and a signal is heeded
at once in every phase. At most one operation runs at a time.

    FORMING --Formed--> RUNNING --Report(SUCCEEDED)--> BARRIER --BarrierPassed--> ENDED
       ^                   |  \\--Report(FAILED), no budget--> STOPPING --Stopped--> ENDED
       |                   |--Report(FAILED), budget--> BACKOFF --DelayOver--.
       '-------------------'--membership changed                             |
       '---------------------------------------------------------------------'

What spends the restart budget: failed workers, nothing else. A change of membership (nodes wait,
a peer was lost) starts a new round for free.

A crash loop backs off: the first failure restarts at once; a group that fails again and again
within `QUICK_S` of its start waits 1 s, 2 s, 4 s ... up to `BACKOFF_CAP_S` before the next try.
An attempt that lives longer than that ends the loop.

A signal ends the run from any phase; the loop then stops the workers with that signal.

The clock is the caller's: times in events are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from regrow.agent._types import WorkerState

QUICK_S = 10.0
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 30.0

_FAILED_STATES = frozenset({WorkerState.FAILED, WorkerState.UNHEALTHY})


class Phase(StrEnum):
    """Where the agent is; see the drawing above."""

    IDLE = "IDLE"
    FORMING = "FORMING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    BARRIER = "BARRIER"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class State:
    """What the agent must remember between two events."""

    remaining_restarts: int  # failures that may still be healed
    phase: Phase = Phase.IDLE
    started_at: float = 0.0  # monotonic seconds: when the running attempt was formed
    quick_failures: int = 0  # attempts in a row that failed within QUICK_S
    looking: bool = False  # a Look operation runs
    look_again: bool = False  # something changed while it ran


# --- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The run starts."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The round is formed and its workers are started."""

    now: float


@dataclass(frozen=True, slots=True)
class Changed:
    """Something about the workers may have changed: look at them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the look at the workers found."""

    state: WorkerState
    nodes_waiting: int
    now: float


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """The rendezvous says that this round should give way to the next one."""

    reason: str


@dataclass(frozen=True, slots=True)
class DelayOver:
    """The back-off is over."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The workers that `Stop` was about are gone."""


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """Every agent has reached the exit barrier, or it timed out."""


@dataclass(frozen=True, slots=True)
class Signaled:
    """A signal that ends the job arrived."""

    signum: int


Event = (
    Begin
    | Formed
    | Changed
    | Report
    | MembershipChanged
    | DelayOver
    | Stopped
    | BarrierPassed
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


@dataclass(frozen=True, slots=True)
class Look:
    """Find out how the workers are."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Stop what is left of the workers, and say DelayOver in `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers; the job has failed."""


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


Action = Form | Restart | Look | Delay | Stop | Barrier | Finish | Interrupt | GiveUp


def decide(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what is to be done about it.

    An event that means nothing in the present phase (a worker's exit while the group is being
    stopped anyway) changes nothing.
    """
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case Signaled(signum):
            return replace(state, phase=Phase.ENDED), (Interrupt(signum),)
        case Begin() if state.phase is Phase.IDLE:
            return replace(state, phase=Phase.FORMING), (Form(),)
        case Formed(now) if state.phase is Phase.FORMING:
            # Looking at once catches what changed while the group was being formed.
            running = replace(state, phase=Phase.RUNNING, started_at=now)
            return _look(replace(running, looking=False, look_again=False))
        case Changed() if state.phase is Phase.RUNNING:
            return _look(state)
        case Report() if state.phase is Phase.RUNNING:
            return _after_look(replace(state, looking=False), event)
        case MembershipChanged(reason) if state.phase is Phase.RUNNING:
            return replace(state, phase=Phase.FORMING), (Restart(reason),)
        case DelayOver() if state.phase is Phase.BACKOFF:
            return replace(state, phase=Phase.FORMING), (Restart("worker failure"),)
        case Stopped() if state.phase is Phase.STOPPING:
            return replace(state, phase=Phase.ENDED), (Finish(WorkerState.FAILED),)
        case BarrierPassed() if state.phase is Phase.BARRIER:
            return replace(state, phase=Phase.ENDED), (Finish(WorkerState.SUCCEEDED),)
    return state, ()


def _look(state: State) -> tuple[State, tuple[Action, ...]]:
    if state.looking:
        return replace(state, look_again=True), ()
    return replace(state, looking=True, look_again=False), (Look(),)


def _after_look(state: State, report: Report) -> tuple[State, tuple[Action, ...]]:
    if report.state is WorkerState.SUCCEEDED:
        return replace(state, phase=Phase.BARRIER), (Barrier(),)
    if report.state in _FAILED_STATES:
        return _after_failure(state, report)
    if report.state is not WorkerState.HEALTHY:
        message = f"Worker group in {report.state.name} state"
        return replace(state, phase=Phase.ENDED), (GiveUp(message),)
    if report.nodes_waiting > 0:
        reason = f"{report.nodes_waiting} nodes wait to join"
        return replace(state, phase=Phase.FORMING), (Restart(reason),)
    return _look(state) if state.look_again else (state, ())


def _after_failure(state: State, report: Report) -> tuple[State, tuple[Action, ...]]:
    if state.remaining_restarts <= 0:
        return replace(state, phase=Phase.STOPPING), (Stop(),)
    quick = state.quick_failures + 1 if report.now - state.started_at < QUICK_S else 0
    healed = replace(state, remaining_restarts=state.remaining_restarts - 1, quick_failures=quick)
    delay = backoff(quick)
    if delay > 0:
        return replace(healed, phase=Phase.BACKOFF), (Delay(delay),)
    return replace(healed, phase=Phase.FORMING), (Restart("worker failure"),)


def backoff(quick_failures: int) -> float:
    """Seconds to wait before the restart that follows this many quick failures in a row."""
    if quick_failures <= 1:
        return 0.0
    return float(min(BACKOFF_BASE_S * 2 ** min(quick_failures - 2, 30), BACKOFF_CAP_S))
