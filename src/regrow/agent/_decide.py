"""The decisions of an agent, as a function of its state and one event.

An agent forms a round and starts its workers, watches them, and when something changes either
starts them again, ends, or gives up. Everything that takes time is an operation (see `_words`), of
which this file asks for one by an action and hears of its end by an event, so that no decision ever
waits and news and signals are heeded at once in every phase.

    FORMING --Formed--> RUNNING --Report(SUCCEEDED)--> BARRIER --BarrierPassed--> ENDED
       ^                   |  `--Failing, Report(FAILED)--> JUDGING --final--> STOPPING --> ENDED
       |                   |                                   |
       |        round over, lease over, nodes wait          charged or not
       '-------------------'---------- BACKOFF ----------------'

**What spends the restart budget**: failed workers, nothing else. Where the nodes of a job count
together (`Formed.shared`), a failure is told to all of them as soon as the first worker has failed,
while the others of its node are still being stopped; the verdict says whether it was the workers'
fault, and how many such failures the job has had. Elsewhere each agent counts for itself, and the
phase JUDGING is not entered. A change of membership starts a new round for free.

**News may come at any time**, also before the agent knows that the round they are about is formed,
or after it has begun to leave it. So each names its round: what concerns a round that is still
being formed is remembered and acted on when it is (`over`, `waiting`), what concerns an older one
changes nothing. Rounds only grow, so one number is enough to remember.

**Nodes that wait are gathered**: ten arrivals within a moment cost one restart. Only group rank 0
counts the time, or ten agents would; the others hear that the round is over.

**What ends quickly again and again is slowed down**, whether workers crash or a host comes and
goes: the first attempt that lived less than `QUICK_S` is followed by the next at once, later ones
after 1 s, 2 s, 4 s and so on. Nodes that wait are let in when the attempt has lived for that long;
else the agent pauses before it joins, for less than the last call in which the others wait for it.

A signal ends the run from any phase; the loop then stops the workers with that signal.

The clock is the caller's: times in events are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import replace

from regrow.agent._state import Phase, State
from regrow.agent._types import WorkerState
from regrow.agent._words import (
    Action,
    Barrier,
    BarrierBroken,
    BarrierPassed,
    Begin,
    Changed,
    Closed,
    Delay,
    DelayOver,
    Event,
    Failing,
    Finish,
    Form,
    Formed,
    Gather,
    GatherOver,
    GiveUp,
    Interrupt,
    LeaseOver,
    Look,
    MembershipChanged,
    Raise,
    Report,
    Restart,
    RoundOver,
    Signaled,
    Stop,
    Stopped,
    Tell,
    Verdict,
    Waiting,
)

QUICK_S = 10.0
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 30.0
SHARED_BACKOFF_CAP_S = 15.0  # well below a last call, after which the others go on without us
GATHER_S = 1.0
GATHER_CAP_S = 5.0

_FAILED_STATES = frozenset({WorkerState.FAILED, WorkerState.UNHEALTHY})


Decision = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event) -> Decision:
    """The state after `event`, and what is to be done about it.

    An event that means nothing in the present phase (a worker's exit while the group is being
    stopped anyway) changes nothing but what is remembered.
    """
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case Signaled(signum):
            return replace(state, phase=Phase.ENDED), (Interrupt(signum),)
        case RoundOver():
            return _round_over(state, event)
        case Waiting():
            return _waiting(state, event)
        case LeaseOver():
            return _lease_over(state, event)
        case Closed():
            return _closed(state, event)
    match state.phase, event:
        case Phase.IDLE, Begin():
            return replace(state, phase=Phase.FORMING), (Form(),)
        case Phase.FORMING, Formed():
            return _formed(state, event)
        case Phase.RUNNING | Phase.JUDGING, Changed():
            return _look(state)
        case Phase.RUNNING, Failing():
            return _tell(state) if state.shared and not state.closed else _look(state)
        case Phase.RUNNING, Report():
            return _after_look(replace(state, looking=False), event)
        case Phase.RUNNING, MembershipChanged(reason, now):
            return _again(state, reason, now)
        case Phase.RUNNING, GatherOver(now, waiting):
            if waiting == 0:
                return replace(state, gathered=0, gather_until=None), ()
            return _let_in(replace(state, gathered=waiting), now)
        case Phase.JUDGING, Report():
            return _after_end(replace(state, looking=False), event)
        case Phase.JUDGING, Verdict():
            judged = replace(state, verdict=event)
            return _sentence(judged, event) if state.ended else _look(judged)
        case Phase.BACKOFF, DelayOver():
            return replace(state, phase=Phase.FORMING), (Restart(state.next_reason),)
        case Phase.STOPPING, Stopped():
            return replace(state, phase=Phase.ENDED), (Finish(WorkerState.FAILED),)
        case Phase.BARRIER, BarrierPassed():
            return replace(state, phase=Phase.ENDED), (Finish(WorkerState.SUCCEEDED),)
        case Phase.BARRIER, BarrierBroken(now):
            if state.closed:
                return replace(state, phase=Phase.ENDED), (Finish(WorkerState.SUCCEEDED),)
            reason = "the round ended while the nodes waited for one another at the end"
            return _again(replace(state, succeeded=True), reason, now)
    return state, ()


# --- news of the other nodes


def _formed(state: State, event: Formed) -> Decision:
    early = state.waiting
    state = replace(
        state,
        phase=Phase.RUNNING,
        started_at=event.now,
        looking=False,
        look_again=False,
        round=event.round,
        shared=event.shared,
        leads=event.leads,
        succeeded=False,
        waiting=None,
        gathered=0,
        gather_until=None,
        verdict=None,
        ended=False,
    )
    if state.job_failed:
        return replace(state, phase=Phase.STOPPING), (Stop(),)
    if event.round is not None and event.round <= state.over and not state.closed:
        return _again(state, state.why_over, event.now)
    if event.round is not None and event.round <= state.lapsed:
        return _again(state, state.why_lapsed, event.now, announce=True)
    # Looking at once catches what changed while the group was being formed.
    state, actions = _look(state)
    if early is not None and early.round == event.round:
        state, more = _gather(state, early._replace(now=event.now))
        actions = more if state.phase is not Phase.RUNNING else (*actions, *more)
    return state, actions


def _round_over(state: State, event: RoundOver) -> Decision:
    if event.round <= state.over:
        return state, ()
    state = replace(state, over=event.round, why_over=event.reason)
    concerns_us = state.round is None or event.round >= state.round
    if not concerns_us or state.closed or state.phase not in (Phase.RUNNING, Phase.BARRIER):
        return state, ()
    state = replace(state, succeeded=state.phase is Phase.BARRIER)
    if state.gathered:  # they are let in, and who decided that has waited long enough
        state = replace(state, phase=Phase.FORMING, quick_ends=_quick(state, event.now))
        return state, (Restart(event.reason),)
    return _again(state, event.reason, event.now)


def _lease_over(state: State, event: LeaseOver) -> Decision:
    if event.round < (state.round or 0):
        return state, ()
    state = replace(state, lapsed=event.round, why_lapsed=event.reason)
    if state.phase is Phase.RUNNING:
        return _again(state, event.reason, event.now, announce=True)
    return state, ()


def _closed(state: State, event: Closed) -> Decision:
    state = replace(state, closed=True, job_failed=state.job_failed or event.failed)
    match state.phase:
        case Phase.FORMING if not event.refused:
            return state, ()  # the operation that runs will end, and is taken from there
        case Phase.FORMING if not state.job_failed:
            state = replace(state, phase=Phase.ENDED)
            return state, (Finish(WorkerState.SUCCEEDED) if state.succeeded else Raise(),)
        case Phase.FORMING | Phase.BARRIER if state.job_failed:
            return replace(state, phase=Phase.ENDED), (Finish(WorkerState.FAILED),)
        case Phase.RUNNING | Phase.BACKOFF if state.job_failed:
            return replace(state, phase=Phase.STOPPING), (Stop(),)
        case Phase.BACKOFF | Phase.JUDGING if state.job_failed or event.refused:
            return replace(state, phase=Phase.STOPPING), (Stop(),)
    return state, ()


def _waiting(state: State, event: Waiting) -> Decision:
    if state.phase is Phase.RUNNING and event.round == state.round:
        return _gather(state, event)
    if state.phase is Phase.FORMING and event.round > (state.round or 0):
        return replace(state, waiting=event), ()
    return state, ()


def _gather(state: State, event: Waiting) -> Decision:
    """Let the nodes that wait in, now or in a moment."""
    if event.waiting == 0:
        return replace(state, gathered=0, gather_until=None), ()
    if not state.leads or state.closed:
        return replace(state, gathered=event.waiting), ()
    grew, now = event.waiting > state.gathered, event.now
    state = replace(
        state,
        gathered=event.waiting,
        gathered_since=state.gathered_since if state.gather_until is not None else now,
    )
    until = state.gather_until
    if event.full:
        until = now
    elif grew or until is None:
        until = min(now + GATHER_S, state.gathered_since + GATHER_CAP_S)
    until = max(until, state.started_at + _pause(state, now))
    state = replace(state, gather_until=until)
    if until <= now:
        return _let_in(state, now)
    return state, (Gather(event.waiting, until),) if grew else ()


def _let_in(state: State, now: float) -> Decision:
    if state.gather_until is None or now < state.gather_until:
        return state, ()
    number = state.gathered
    reason = f"{number} node{'s wait' if number != 1 else ' waits'} to join"
    quick = _quick(state, now)
    state = replace(state, phase=Phase.FORMING, quick_ends=quick, gather_until=None)
    return state, (Restart(reason, announce=True),)


# --- the workers


def _look(state: State) -> Decision:
    if state.looking:
        return replace(state, look_again=True), ()
    return replace(state, looking=True, look_again=False), (Look(),)


def _after_look(state: State, report: Report) -> Decision:
    if report.state is WorkerState.SUCCEEDED:
        return replace(state, phase=Phase.BARRIER), (Barrier(),)
    if report.state in _FAILED_STATES:
        if report.hopeless or state.closed:
            tell = state.shared and not state.closed
            return replace(state, phase=Phase.STOPPING), (Stop(tell),)
        return _tell(replace(state, ended=True)) if state.shared else _count(state, report)
    if report.state is not WorkerState.HEALTHY:
        message = f"Worker group in {report.state.name} state"
        return replace(state, phase=Phase.ENDED), (GiveUp(message),)
    if report.nodes_waiting > 0:
        reason = f"{report.nodes_waiting} nodes wait to join"
        return replace(state, phase=Phase.FORMING), (Restart(reason),)
    return _look(state) if state.look_again else (state, ())


def _count(state: State, report: Report) -> Decision:
    """A failure where each agent has a budget of its own."""
    if state.remaining_restarts <= 0:
        return replace(state, phase=Phase.STOPPING), (Stop(),)
    spent = replace(state, remaining_restarts=state.remaining_restarts - 1)
    return _again(spent, "worker failure", report.now)


def _tell(state: State) -> Decision:
    return replace(state, phase=Phase.JUDGING), (Tell(),)


def _after_end(state: State, report: Report) -> Decision:
    """In JUDGING: the group may have ended."""
    if WorkerState.is_running(report.state) and not report.hopeless:
        return _look(state) if state.look_again else (state, ())
    state = replace(state, ended=True)
    return _sentence(state, state.verdict) if state.verdict is not None else (state, ())


def _sentence(state: State, verdict: Verdict) -> Decision:
    if verdict.charged and verdict.final and verdict.mine:
        return replace(state, phase=Phase.STOPPING), (Stop(tell=True),)
    if state.closed:
        return replace(state, phase=Phase.STOPPING), (Stop(),)
    # Where another node is to blame for good, it closes the rendezvous, and forming ends with that.
    return _again(state, verdict.reason, verdict.now)


# --- the next attempt


def _again(state: State, reason: str, now: float, announce: bool = False) -> Decision:
    """Start the workers again, after a pause if attempts have been short of late."""
    pause = _pause(state, now)
    state = replace(state, quick_ends=_quick(state, now), next_reason=reason)
    if pause > 0:
        return replace(state, phase=Phase.BACKOFF), (Delay(pause, reason, announce),)
    return replace(state, phase=Phase.FORMING), (Restart(reason, announce),)


def _quick(state: State, now: float) -> int:
    return state.quick_ends + 1 if now - state.started_at < QUICK_S else 0


def _pause(state: State, now: float) -> float:
    return backoff(_quick(state, now), SHARED_BACKOFF_CAP_S if state.shared else BACKOFF_CAP_S)


def backoff(quick_ends: int, cap: float = BACKOFF_CAP_S) -> float:
    """Seconds to wait before the restart that follows this many quick ends in a row."""
    if quick_ends <= 1:
        return 0.0
    return float(min(BACKOFF_BASE_S * 2 ** min(quick_ends - 2, 30), cap))
