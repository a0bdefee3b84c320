"""Rules of one worker's heartbeat: when to send it, and after how many misses it has failed.

The first exchange makes the workers a group: rank 0 sends a token, and all workers store it. After
that, the workers run an exchange every period and show the token each time. An exchange has one of
three results:

- All workers are in step. The count of failures starts again.
- The exchange fails. The worker tries again; the last allowed failure is fatal.
- The exchange succeeds, and shows that the workers are no longer one group. That is fatal at once.
  The same holds for a fault that the store reports between two exchanges.

This file contains the rules only: no clock, no exchange, no thread. `step` takes the state and an
event, and returns the new state and the actions. The caller waits for the last action.

**Windows.** The simple rule is to wait for a period after each exchange, whether it succeeded or
not. With that rule, one worker that is late once by more than the time-out breaks the job: it tries
while the others wait, and waits while the others try, until all workers end for no reason. So no
worker waits for a period after a failure. The next try begins at once, and lasts for the period and
the time-out. A worker with a failed exchange is therefore always present, and meets a late worker
as soon as that worker arrives. The same holds for an exchange that succeeded on some ranks only.

    exchange   period   window 0         window 1                window 2
    ---------|--------|==========|=======================|=======================| fatal

So the rules count failures in windows that have passed, with at most one try in each window. The
last allowed window ends at the bound: failures allowed x (period + time-out) after the last
complete beat. A worker that is late for a window uses the rest of the window.

A failed exchange shows neither tokens nor steps of the others. The worker compares nothing with its
earlier data.

There are no windows before the first exchange, which has a time-out of its own. A *patient* plan
tries the first exchange without a limit, where a launcher monitors the start of the workers.

Leaving is the last exchange of a worker. The worker tries it once, and ignores the result.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from regrow.heartbeat.failure import (
    NO_RANKS,
    HeartbeatFailure,
    Kind,
    Ranks,
    bound_text,
    not_begun,
    reports_loudly,
    stall_text,
)
from regrow.heartbeat.merge import (
    Agreed,
    Broken,
    ExchangeFailed,
    Outcome,
    StalledSteps,
    WorkersLeft,
)

WORTHWHILE: Final = 0.1
"""Minimum rest of a window for a new try, as a fraction of the time-out."""


@dataclass(frozen=True, slots=True)
class HeartbeatPlan:
    """The settings of a worker's heartbeat; the times are in seconds."""

    rank: int
    size: int
    """The number of workers."""
    period: float
    """Time from the end of an exchange to the next exchange."""
    timeout: float
    """Time for an exchange; after a failure, the exchange also gets the period."""
    failures: int
    """The number of consecutive failures that is fatal."""
    start_timeout: float
    """Time for the first exchange."""
    patient: bool = False
    """Whether the first exchange is tried without a limit."""
    stalled_after: int | None = None
    """Beats without progress after which a stall is reported; None: never."""
    stall_is_fatal: bool = False
    """Whether a stall is fatal instead."""

    @property
    def cycle(self) -> float:
        """Time from the end of one window to the end of the next one."""
        return self.period + self.timeout

    @property
    def bound(self) -> float:
        """Time from the last complete beat to a fatal failure."""
        return self.failures * self.cycle


@dataclass(frozen=True, slots=True)
class BeatState:
    """The state of a worker's heartbeat."""

    plan: HeartbeatPlan
    token: int
    """The token of the group; 0: not known yet."""
    since: float
    """Time of the last complete beat, or of the heartbeat's start; monotonic seconds."""
    beats: int = 0
    """Number of successful exchanges, which is also the number of the next exchange."""
    window: int = 0
    """The earliest window for the next try; during a try, the window of that try."""
    asked: float = 0.0
    """Time at which the last try began."""
    stalled: Ranks = NO_RANKS
    """The ranks with a reported stall."""
    leaving: bool = False
    """Whether the worker's last exchange is in progress."""
    over: bool = False
    """Whether all later events are ignored."""
    left: Ranks = NO_RANKS
    """The ranks that left and so ended the heartbeat."""


class Woke(NamedTuple):
    """The sleep has ended."""

    now: float


class Result(NamedTuple):
    """An exchange ended, or the meeting reported an outcome between two exchanges."""

    outcome: Outcome
    now: float


class LeaveRequest(NamedTuple):
    """A request that this worker leaves."""

    now: float


class SetStallRule(NamedTuple):
    """A new rule for stalled workers; see `HeartbeatPlan`."""

    stalled_after: int | None
    stall_is_fatal: bool
    now: float


Event = Woke | Result | LeaveRequest | SetStallRule


class TryExchange(NamedTuple):
    """Run an exchange, and return its result as an event."""

    timeout: float
    final: bool = False
    """Whether a failure is fatal."""


class Sleep(NamedTuple):
    """Wait for an event."""

    until: float
    """Latest time at which the wait ends, in monotonic seconds; an event may end it earlier."""


class Listen(NamedTuple):
    """Report outcomes of the meeting between exchanges from now on."""


class Extend(NamedTuple):
    """A beat succeeded: the process may live for `seconds`."""

    seconds: float


class LogLine(NamedTuple):
    """Write `text` to the log at `level`."""

    level: int
    text: str


class Stalled(NamedTuple):
    """Report a stall."""

    steps: StalledSteps
    text: str


class Fail(NamedTuple):
    """The heartbeat has failed."""

    failure: HeartbeatFailure


Action = TryExchange | Sleep | Listen | Extend | LogLine | Stalled | Fail
Step = tuple[BeatState, tuple[Action, ...]]


def begin(plan: HeartbeatPlan, token: int, now: float) -> Step:
    """Return the first state, and the first exchange as an action.

    Args:
        plan: settings of this worker.
        token: 1 to 65535 for rank 0, 0 for the others.
        now: monotonic seconds, as all times.
    """
    state = BeatState(plan, token, since=now, asked=now)
    return state, (
        LogLine(logging.INFO, bound_text(plan)),
        TryExchange(plan.start_timeout, not plan.patient),
    )


def step(state: BeatState, event: Event) -> Step:
    """Apply an event.

    Returns:
        The new state, and the actions. The caller waits for the last action: `TryExchange` or
        `Sleep`. If the new state is `over`, there is nothing to wait for.
    """
    if state.over:
        return state, ()
    match event:
        case Woke(now):
            return _try(state, now)
        case LeaveRequest(now):
            return _leave(state, now)
        case Result() if state.leaving:
            return replace(state, over=True), ()
        case SetStallRule(stalled_after, stall_is_fatal, now):
            changed = replace(
                state.plan, stalled_after=stalled_after, stall_is_fatal=stall_is_fatal
            )
            return _wait(replace(state, plan=changed), now)
        case Result(outcome, now):
            return _on_result(state, outcome, now)


def _on_result(state: BeatState, outcome: Outcome, now: float) -> Step:
    match outcome:
        case Agreed():
            return _agreed(state, outcome, now)
        case ExchangeFailed():
            return _failed(state, outcome, now)
        case Broken(kind, ranks, detail):
            return _fail(state, kind, ranks, detail, now)
        case WorkersLeft(ranks):
            text = f"heartbeat: {ranks} left; the heartbeat is over"
            return replace(state, over=True, left=ranks), (LogLine(logging.INFO, text),)


def _wait(state: BeatState, now: float) -> Step:
    """Wait for the next try."""
    if state.beats:
        return _try(state, now)
    return state, (Sleep(max(state.asked + state.plan.period, now)),)


def _try(state: BeatState, now: float) -> Step:
    """Run an exchange if a window is open, else wait for the next window."""
    plan = state.plan
    if not state.beats:
        return replace(state, asked=now), (TryExchange(plan.start_timeout, not plan.patient),)
    window, closes = _window(state, now)
    opens = state.since + window * plan.cycle + (0.0 if window else plan.period)
    if now < opens:
        return state, (Sleep(opens),)
    final = window + 1 >= plan.failures
    return replace(state, window=window, asked=now), (TryExchange(closes - now, final),)


def _window(state: BeatState, now: float) -> tuple[int, float]:
    """The first window with enough time left for an exchange, and the time of its end."""
    plan = state.plan
    window = max(state.window, int((now - state.since) // plan.cycle))
    closes = state.since + (window + 1) * plan.cycle
    if closes - now < WORTHWHILE * plan.timeout:
        return window + 1, closes + plan.cycle
    return window, closes


def _agreed(state: BeatState, agreed: Agreed, now: float) -> Step:
    plan = state.plan
    if (state.token and agreed.token != state.token) or not agreed.token:
        detail = f"it received the token {agreed.token}, and its own is {state.token}"
        return _fail(state, "out of step", Ranks.of([plan.rank]), detail, now)
    first = not state.beats
    state = replace(
        state,
        token=agreed.token,
        since=now - agreed.age,
        beats=state.beats + 1,
        window=0,
    )
    actions: tuple[Action, ...] = (Extend(max(plan.bound - agreed.age, 0.0)),)
    if first:
        actions = (*actions, Listen())
    stalled = agreed.stalled
    if plan.stalled_after and stalled and stalled.beats >= plan.stalled_after:
        text = stall_text(stalled)
        if plan.stall_is_fatal:
            return _fail(state, "stalled", stalled.ranks, text, now)
        if stalled.ranks != state.stalled:
            state = replace(state, stalled=stalled.ranks)
            actions = (*actions, Stalled(stalled, f"heartbeat: {text}"))
    else:
        state = replace(state, stalled=NO_RANKS)
    state, then = _try(state, now)
    return state, (*actions, *then)


def _failed(state: BeatState, failed: ExchangeFailed, now: float) -> Step:
    plan = state.plan
    if not state.beats:
        if not plan.patient:
            kind: Kind = "never started" if failed.missing.total else "no exchange"
            return _fail(state, kind, failed.missing, failed.why, now)
        state, then = _wait(state, now)
        if not failed.missing.total:
            text = f"heartbeat: waiting for all {plan.size} workers: {failed.why}"
            return state, (LogLine(logging.WARNING, text), *then)
        text = not_begun(plan, failed.missing, now - state.since)
        loud = logging.WARNING if reports_loudly(plan, failed.missing) else logging.INFO
        return state, (LogLine(loud, text), *then)
    failures = state.window + 1
    if failures >= plan.failures:
        kind = "missing" if failed.missing.total else "no exchange"
        return _fail(state, kind, failed.missing, failed.why, now)
    named = str(failed.missing)
    missing = f" ({named} missing)" if failed.missing.total and named not in failed.why else ""
    text = (
        f"rank {plan.rank}: heartbeat: failure {failures} of {plan.failures} in a row that are "
        f"fatal: {failed.why}{missing}"
    )
    state, then = _try(replace(state, window=failures), now)
    loud = logging.WARNING if reports_loudly(plan, failed.missing) else logging.INFO
    return state, (LogLine(loud, text), *then)


def _leave(state: BeatState, now: float) -> Step:
    if state.leaving or not state.beats:  # the other workers have not met this worker
        return replace(state, over=True), ()
    _, closes = _window(state, now)
    return replace(state, leaving=True), (TryExchange(closes - now),)


def _fail(state: BeatState, kind: Kind, ranks: Ranks, detail: str, now: float) -> Step:
    plan = state.plan
    failure = HeartbeatFailure(
        kind,
        ranks,
        detail,
        rank=plan.rank,
        world_size=plan.size,
        beat=state.beats,
        seconds=now - state.since,
        failures=state.window + 1,
    )
    return replace(state, over=True), (Fail(failure),)
