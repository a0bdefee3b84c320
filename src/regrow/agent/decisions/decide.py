"""Decides what an agent does next (restart, give up, end the job), as a pure function.

An agent forms a round, starts its workers and watches them. When something changes, it restarts the
workers, ends the job, or gives up. Everything that takes time is an operation (see `events`). This
module requests an operation by an action, and the end of the operation is an event. So no decision
waits, and the agent handles notifications and signals at once in every phase.

    FORMING --Formed--> RUNNING --CheckResult(SUCCEEDED)--> BARRIER --BarrierOver--> ENDED
       ^                   |
       |                   `--Failing, CheckResult(FAILED)--> AWAITING_VERDICT --final--> STOPPING
       |                   |                                         |                       |
       |      round over, lease expired, nodes wait            charged or not              ENDED
       '-------------------'---------- BACKOFF ----------------------'

**The restart budget.** Failed and replaced workers spend it. In some jobs all nodes count failures
together (`Formed.shared`). There the agent reports the first failed worker to all nodes at once,
while it still stops the other workers of its node. The verdict states whether the job is charged
with the failure, and how many charged failures it has had. In other jobs each agent counts its own
failures and does not enter the phase AWAITING_VERDICT. A change of membership starts a new round
without spending the budget.

**Notifications may arrive at any time.** The agent may not know yet that the round has formed, or
may be leaving the round already. So each notification has the number of its round. The state keeps
a notification about a round that still forms until the round has formed (`over`, `early_join`). A
notification about an older round changes nothing. Round numbers only grow, so the state keeps only
the notification about the latest round.

**Waiting nodes join together.** Ten nodes that arrive within a moment cost one restart. Only group
rank 0 waits for further arrivals; otherwise ten agents would. The other nodes get a notification
that the round is over.

**Short attempts are slowed down**, whether workers crash or a host joins and leaves. After the
first attempt shorter than `QUICK_S`, the next attempt starts at once. The later pauses are 1 s,
2 s, 4 s and so on. If only waiting nodes end the attempt, its workers run until the attempt has
lasted as long as the pause; then the nodes join, and no node pauses. No node pauses after a node
has left as announced. If the attempt ends for another reason, the agent stops the workers at
once and pauses before it joins the next round. If all nodes count failures
together, this pause is at most `SHARED_BACKOFF_CAP_S`, because the other nodes wait for it in their
last call.

**The grace of stopped workers** depends on the reason. A change without a failure (a node joins, or
leaves with notice) gives the whole `--shutdown-timeout`, so that workers can save. So does the end
of the job. A restart after a failure or a loss gives `--restart-timeout`: a worker may be blocked
in a collective that only SIGKILL ends. While the agent does not know whether the job ends, it gives
the longer grace. `ShortenGrace` shortens it when the job continues. The agent may also learn too
late that no restart is left, because another node spent the last one. `LengthenGrace` then gives
the workers the grace of the end of the job.

**Workers that live on.** If a round ends because a host was lost, has left as announced or waits to
join, or because the lease of one has expired, workers that can go on in the next round
(`Wrapper(elastic=True)`) are not stopped (`Restart.keep`). `keep` has the rules for the workers of
one node.

A signal ends the run in any phase; the loop then stops the workers with that signal.

While all ranks are to stop at the same step (`StopBegun`), the job neither restarts nor fails. A
failure or a change of membership ends it as a SIGTERM does, because new workers could only save
what they had loaded. A node that has reached the exit barrier has saved its state already. If only
another node has to end, this node restarts as usual.

The caller provides the clock: times in events are monotonic seconds.
"""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import NamedTuple

from regrow.agent.api import FAILED_STATES, WorkerState
from regrow.agent.decisions import events
from regrow.utils import Backoff, name_hosts

QUICK_S = 10.0
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 30.0
SHARED_BACKOFF_CAP_S = 15.0  # well below a last call, after which the others start without us
GATHER_S = 1.0
GATHER_CAP_S = 5.0


WORKER_FAILURE = "worker failure"
"""Reason of a restart that is charged to the job."""


class AgentPhase(StrEnum):
    """Phase of the agent; see the diagram at the top."""

    FORMING = "FORMING"
    RUNNING = "RUNNING"
    AWAITING_VERDICT = "AWAITING_VERDICT"
    BACKOFF = "BACKOFF"
    BARRIER = "BARRIER"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


class AgentState(NamedTuple):
    """The state that the agent keeps between two events; the first action of a run is `Form`."""

    remaining_restarts: int  # failures that the job may still recover from
    phase: AgentPhase = AgentPhase.FORMING
    started_at: float = 0.0  # monotonic seconds at which the current attempt was formed
    quick_ends: int = 0  # number of consecutive attempts shorter than QUICK_S
    checking: bool = False  # a CheckWorkers operation is running
    check_again: bool = False  # a change arrived during the CheckWorkers operation
    round: int | None = None  # the latest round that this node formed
    shared: bool = False  # all nodes count and judge failures together
    leads: bool = True
    over: events.RoundOver | None = None  # the end of the latest round that is known to be over
    lapsed: int = 0  # the latest round in which this node's lease expired
    why_lapsed: str = ""
    closed: bool = False  # the rendezvous forms no further round
    job_failed: bool = False  # the rendezvous closed because the job failed
    succeeded: bool = False  # this node's workers succeeded, but the round ended after that
    early_join: events.JoinRequested | None = None  # for a round that has not formed here yet
    gathered: int = 0  # number of waiting nodes
    joining: tuple[str, ...] = ()  # the first of their hosts
    gathered_since: float = 0.0  # monotonic seconds at which the first waiting node arrived
    gather_until: float | None = None  # monotonic seconds at which they join
    verdict: events.Verdict | None = None  # on this node's failure in the latest attempt
    ended: bool = False  # in AWAITING_VERDICT: the group has ended, the verdict has not arrived
    next_reason: str = ""  # in BACKOFF: reason of the next restart
    started: bool = False  # in FORMING: the new workers are about to run
    stopping: bool = False  # all ranks are to stop at the same step
    outlives: bool = False  # and if the round ends before, this node goes on without the other one


Decision = tuple[AgentState, tuple[events.Action, ...]]


_ATTEMPT_ENDS = (events.Restart, events.Delay, events.ReportFailure, events.StopWorkers)


def decide(state: AgentState, event: events.Event) -> Decision:
    """Return the state after `event`, and the actions to carry out.

    An event without meaning in the current phase only changes what the state keeps. Example: the
    exit of a worker while the group is being stopped.
    """
    if state.phase is AgentPhase.ENDED:
        return state, ()
    if isinstance(event, events.StopDropped):
        return state._replace(stopping=False), ()
    if isinstance(event, events.StopBegun):
        starts = state.phase is AgentPhase.FORMING and state.started
        waits = starts or state.phase in (AgentPhase.RUNNING, AgentPhase.BARRIER)
        outlives = event.of_another_node
        if outlives and not waits:
            return state, ()  # the workers of this node are being stopped already
        state = state._replace(stopping=True, outlives=outlives, gathered=0, gather_until=None)
        return (state, ()) if waits else _decide(state, events.Signaled(signal.SIGTERM))
    if isinstance(event, events.WorkersStarted):
        return state._replace(started=True), ()
    if state.stopping and isinstance(event, events.JoinRequested):
        return state, ()
    after, actions = _decide(state, event)
    if not state.stopping or not any(isinstance(each, _ATTEMPT_ENDS) for each in actions):
        return after, actions
    if state.outlives:  # only another node has to end
        return _decide(state._replace(stopping=False), event)
    failed = isinstance(event, events.RoundOver) and event.failed
    if state.phase is AgentPhase.BARRIER and not failed:
        return _finish(state, WorkerState.SUCCEEDED)
    return _decide(state, events.Signaled(signal.SIGTERM))


def _decide(state: AgentState, event: events.Event) -> Decision:
    match event:
        case events.Signaled(signum):
            return state._replace(phase=AgentPhase.ENDED), (events.Interrupt(signum),)
        case events.RoundOver():
            return _round_over(state, event)
        case events.JobContinues(round):
            return state, _shorten_grace(state, round)
        case events.JobEnds(round):
            return state, (events.LengthenGrace(),) if _is_stopping(state, round) else ()
        case events.JoinRequested():
            return _join_requested(state, event)
        case events.LeaseOver():
            return _lease_over(state, event)
        case events.Closed():
            return _closed(state, event)
    match state.phase, event:
        case AgentPhase.FORMING, events.Formed():
            return _formed(state, event)
        case AgentPhase.RUNNING | AgentPhase.AWAITING_VERDICT, events.Changed():
            return _check(state)
        case AgentPhase.RUNNING, events.Failing():
            return _report_failure(state) if state.shared else _check(state)
        case AgentPhase.RUNNING, events.CheckResult():
            return _after_check(state._replace(checking=False), event)
        case AgentPhase.RUNNING, events.MembershipChanged(reason, now):
            return _again(state, reason, now, full_grace=True)
        case AgentPhase.RUNNING, events.GatherOver(now, waiting):
            if waiting == 0:
                return state._replace(gathered=0, gather_until=None), ()
            return _let_in(state._replace(gathered=waiting), now)
        case AgentPhase.AWAITING_VERDICT, events.CheckResult():
            return _after_check_of_failed(state._replace(checking=False), event)
        case AgentPhase.AWAITING_VERDICT, events.Verdict():
            state = state._replace(verdict=event)
            if state.ended:
                return _apply_verdict(state, event)
            final = state.closed or (event.charged and event.final)
            state, actions = _check(state)
            return state, (events.LengthenGrace() if final else events.ShortenGrace(), *actions)
        case AgentPhase.BACKOFF, events.DelayOver():
            return _restart(state, events.Restart(state.next_reason))
        case AgentPhase.STOPPING, events.Stopped():
            return _finish(state, WorkerState.FAILED)
        case AgentPhase.BARRIER, events.BarrierOver(now, passed):
            if passed or state.closed:
                return _finish(state, WorkerState.SUCCEEDED)
            reason = "the round ended while the nodes waited at the exit barrier"
            return _again(state._replace(succeeded=True), reason, now)
    return state, ()


# --- notifications about other nodes


def _formed(state: AgentState, event: events.Formed) -> Decision:
    early = state.early_join
    state = state._replace(
        phase=AgentPhase.RUNNING,
        started_at=event.now,
        checking=False,
        check_again=False,
        round=event.round,
        shared=event.shared,
        leads=event.leads,
        succeeded=False,
        early_join=None,
        gathered=0,
        gather_until=None,
        verdict=None,
        ended=False,
    )
    if state.job_failed:
        return _stop(state)
    number, over = event.round, state.over
    if over is not None and number is not None and number <= over.round and not state.closed:
        return _follow(state, over, event.now)
    if event.round is not None and event.round <= state.lapsed:
        return _again(state, state.why_lapsed, event.now, announce=True, keep=True)
    # This check finds changes that happened while the group was forming.
    state, actions = _check(state)
    if early is not None and early.round == event.round:
        state, more = _gather(state, early._replace(now=event.now))
        actions = more if state.phase is not AgentPhase.RUNNING else (*actions, *more)
    return state, actions


def _round_over(state: AgentState, event: events.RoundOver) -> Decision:
    if state.over is not None and event.round <= state.over.round:
        return state, ()
    state = state._replace(over=event)
    concerns_us = state.round is None or event.round >= state.round
    # The failure ends the job if the job is charged with it and has no restarts left.
    full = event.full_grace or (event.failed and state.remaining_restarts <= 0)
    if not full and state.phase in (AgentPhase.FORMING, AgentPhase.BACKOFF):
        return state, _shorten_grace(state, event.round)
    active = state.phase in (AgentPhase.RUNNING, AgentPhase.BARRIER)
    if not concerns_us or state.closed or not active:
        return state, ()
    state = state._replace(succeeded=state.phase is AgentPhase.BARRIER)
    return _follow(state, event, event.now, full_grace=full)


def _follow(
    state: AgentState, over: events.RoundOver, now: float, full_grace: bool = False
) -> Decision:
    """Leave the round that another node has ended."""
    # Otherwise the workers end: a scheduler may be ending the whole job, and the other node may be
    # the first one that it has signalled. The workers of this node then need the grace to save.
    keep = not over.failed and (over.lost or over.keep)
    # With `keep`, this node makes no pause. If nodes wait to join, group rank 0 has made it. A node
    # that has left as announced had joined after a pause. A node whose lease expired makes none.
    if over.keep:
        state = state._replace(quick_ends=_quick(state, now))
        return _restart(state, events.Restart(over.reason, full_grace=full_grace, keep=keep))
    return _again(state, over.reason, now, full_grace=full_grace, keep=keep)


def _shorten_grace(state: AgentState, round: int) -> tuple[events.Action, ...]:
    """Shorten the grace of this round's stopping workers, which may have the longer grace."""
    stopping = _is_stopping(state, round) and not state.closed
    return (events.ShortenGrace(),) if stopping else ()


def _is_stopping(state: AgentState, round: int) -> bool:
    """Return whether this node may still stop the workers of this round."""
    return state.phase in (AgentPhase.FORMING, AgentPhase.BACKOFF) and round == state.round


def _lease_over(state: AgentState, event: events.LeaseOver) -> Decision:
    if event.round < (state.round or 0):
        return state, ()
    state = state._replace(lapsed=event.round, why_lapsed=event.reason)
    if state.phase is AgentPhase.RUNNING:  # this node's workers have ended, those of others live on
        return _again(state, event.reason, event.now, announce=True, keep=True)
    return state, ()


def _closed(state: AgentState, event: events.Closed) -> Decision:
    state = state._replace(closed=True, job_failed=state.job_failed or event.failed)
    match state.phase:
        case AgentPhase.FORMING if not event.refused:
            # The running operation ends, and its end event is handled.
            return state, (events.LengthenGrace(),) if event.failed else ()
        case AgentPhase.FORMING if not state.job_failed:
            if state.succeeded:
                return _finish(state, WorkerState.SUCCEEDED)
            if state.verdict is not None:  # our workers failed, and no further round forms
                return _finish(state, WorkerState.FAILED)
            return state._replace(phase=AgentPhase.ENDED), (events.Raise(),)
        case AgentPhase.FORMING | AgentPhase.BARRIER if state.job_failed:
            return _finish(state, WorkerState.FAILED)
        case AgentPhase.RUNNING if state.job_failed:
            return _stop(state)
        case AgentPhase.BACKOFF if state.job_failed:
            state, actions = _stop(state)
            return state, (events.LengthenGrace(), *actions)
        case AgentPhase.BACKOFF | AgentPhase.AWAITING_VERDICT if state.job_failed or event.refused:
            return _stop(state)
    return state, ()


def _join_requested(state: AgentState, event: events.JoinRequested) -> Decision:
    if state.phase is AgentPhase.RUNNING and event.round == state.round:
        return _gather(state, event)
    if state.phase is AgentPhase.FORMING and event.round > (state.round or 0):
        return state._replace(early_join=event), ()
    return state, ()


def _gather(state: AgentState, event: events.JoinRequested) -> Decision:
    """Let the waiting nodes join, now or after a short wait for further arrivals."""
    if event.waiting == 0:
        return state._replace(gathered=0, gather_until=None), ()
    if not state.leads or state.closed:
        return state, ()
    grew, now = event.waiting > state.gathered, event.now
    state = state._replace(
        gathered=event.waiting,
        joining=event.hosts,
        gathered_since=state.gathered_since if state.gather_until is not None else now,
    )
    until = state.gather_until
    if event.full:
        until = now
    elif grew or until is None:
        until = min(now + GATHER_S, state.gathered_since + GATHER_CAP_S)
    until = max(until, state.started_at + _pause(state, now))
    state = state._replace(gather_until=until)
    if until <= now:
        return _let_in(state, now)
    return state, (events.Gather(event.waiting, until),) if grew else ()


def _let_in(state: AgentState, now: float) -> Decision:
    if state.gather_until is None or now < state.gather_until:
        return state, ()
    number = state.gathered
    known = 0 < len(state.joining) <= number  # else nodes have left meanwhile
    who = name_hosts(state.joining, number) if known else f"{number} node{'s' * (number != 1)}"
    reason = f"{who} wait{'s' * (number == 1)} to join"
    state = state._replace(quick_ends=_quick(state, now), gather_until=None)
    return _restart(state, events.Restart(reason, announce=True, full_grace=True, keep=True))


# --- the workers


def _check(state: AgentState) -> Decision:
    if state.checking:
        return state._replace(check_again=True), ()
    return state._replace(checking=True, check_again=False), (events.CheckWorkers(),)


def _after_check(state: AgentState, found: events.CheckResult) -> Decision:
    if found.state is WorkerState.SUCCEEDED:
        return state._replace(phase=AgentPhase.BARRIER), (events.Barrier(),)
    if found.state in FAILED_STATES:
        if found.hopeless or state.closed:
            return _stop(state, report=state.shared)
        if state.shared:
            return _report_failure(state._replace(ended=True))
        # Each agent has its own budget.
        if state.remaining_restarts <= 0:
            return _stop(state)
        spent = state._replace(remaining_restarts=state.remaining_restarts - 1)
        return _again(spent, WORKER_FAILURE, found.now)
    if found.state is not WorkerState.HEALTHY:
        message = f"Worker group in {found.state.name} state"
        return state._replace(phase=AgentPhase.ENDED), (events.Raise(message),)
    if found.nodes_waiting > 0:
        reason = f"{found.nodes_waiting} nodes wait to join"
        return _restart(state, events.Restart(reason, full_grace=True))
    return _check(state) if state.check_again else (state, ())


def _report_failure(state: AgentState) -> Decision:
    return state._replace(phase=AgentPhase.AWAITING_VERDICT), (events.ReportFailure(),)


def _after_check_of_failed(state: AgentState, found: events.CheckResult) -> Decision:
    """Handle the result of a check in AWAITING_VERDICT: the group may have ended."""
    if WorkerState.is_running(found.state) and not found.hopeless:
        return _check(state) if state.check_again else (state, ())
    state = state._replace(ended=True)
    return _apply_verdict(state, state.verdict) if state.verdict is not None else (state, ())


def _apply_verdict(state: AgentState, verdict: events.Verdict) -> Decision:
    if verdict.charged and verdict.final and verdict.mine:
        return _stop(state, report=True)
    if state.closed:
        return _stop(state)
    # If another node's failure ends the job, that node closes the rendezvous, which ends forming.
    return _again(state, verdict.reason, verdict.now)


# --- the end of the job, and the next attempt


def _finish(state: AgentState, final: WorkerState) -> Decision:
    return state._replace(phase=AgentPhase.ENDED), (events.Finish(final),)


def _stop(state: AgentState, *, report: bool = False) -> Decision:
    return state._replace(phase=AgentPhase.STOPPING), (events.StopWorkers(report),)


def _restart(state: AgentState, action: events.Restart) -> Decision:
    return state._replace(phase=AgentPhase.FORMING, started=False), (action,)


def _again(
    state: AgentState,
    reason: str,
    now: float,
    announce: bool = False,
    full_grace: bool = False,
    keep: bool = False,
) -> Decision:
    """Restart the workers, after a pause if the latest attempts were short.

    Workers live on (`keep`) only without a pause: the other nodes wait for this one.
    """
    pause = _pause(state, now)
    state = state._replace(quick_ends=_quick(state, now), next_reason=reason)
    if pause > 0:
        delay = events.Delay(pause, reason, announce, full_grace)
        return state._replace(phase=AgentPhase.BACKOFF), (delay,)
    return _restart(state, events.Restart(reason, announce, full_grace, keep))


def _quick(state: AgentState, now: float) -> int:
    return state.quick_ends + 1 if now - state.started_at < QUICK_S else 0


def _pause(state: AgentState, now: float) -> float:
    return backoff(_quick(state, now), SHARED_BACKOFF_CAP_S if state.shared else BACKOFF_CAP_S)


def backoff(quick_ends: int, cap: float = BACKOFF_CAP_S) -> float:
    """Return the seconds to wait before a restart after `quick_ends` short attempts in a row."""
    return Backoff(BACKOFF_BASE_S, cap).pause(quick_ends - 1)
