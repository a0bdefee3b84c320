"""The rules by which one worker beats.

The first exchange makes the workers a group: rank 0 brings a token, and all take it. From then on
they exchange every period, and show the token each time. Three things can come of that. All are in
step: the count begins anew. The exchange fails: it is tried again, and is fatal when it has failed
as often as is allowed. Or it succeeds and shows that this is not one group any more: that is fatal
at once, and so is what the store says of its own accord. This file holds the rules and nothing
else: no clock, no exchange, no thread. `step` takes the state and what happened, and returns the
new state and what to do, of which the last is what to wait for.

**Windows.** What would be simple is to wait for a period after each exchange, whatever came of it.
But then a worker that was held up once, for longer than the time-out, tries the next exchange when
the others wait and waits when they try, and so it goes on until all die for nothing. So nobody
waits for a period again once an exchange has failed: the next try begins at once, and lasts for
what would have been the period and the time-out. Who has failed is there all the time, and whoever
was late meets it when it comes; so do those of an exchange that succeeded for some and not for
others.

    exchange   period   window 0         window 1                window 2
    ---------|--------|==========|=======================|=======================| fatal

So failures are counted in windows that have gone by, at most one try in each, and the last of those
allowed ends at the bound: failures allowed x (period + time-out) after the last beat in which all
were there. Who is late for a window comes to what is left of it.

A failed exchange shows nothing of the others, neither their tokens nor their steps. What was there
before it is never compared with anything.

Before the first exchange there are no windows. It has a time-out of its own; or it is *patient* and
tried for ever, where somebody else watches over the workers' starting.

Leaving is an exchange as well, the last one of the worker; it is tried once, and how it ends makes
no difference to who leaves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from regrow.heartbeat import _reports as reports
from regrow.heartbeat._failure import NOBODY, HeartbeatFailure, Kind, Ranks, failure_of
from regrow.heartbeat._merge import Agreed, Broken, Failed, Left, Outcome, Standing

WORTHWHILE: Final = 0.1
"""The part of the time-out that has to be left of a window for a try in it to be begun."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker beats; the times are in seconds."""

    rank: int
    size: int
    """How many workers there are."""
    period: float
    """From the end of an exchange to the next one."""
    timeout: float
    """For an exchange; one that follows a failure is given the period as well."""
    failures: int
    """In a row; with the last of them it is fatal."""
    start_timeout: float
    """For the first exchange."""
    patient: bool = False
    """Whether the first exchange is tried for ever."""
    stalled_after: int | None = None
    """Beats for which a worker stands still until that is reported; None: it never is."""
    stall_is_fatal: bool = False
    """Whether it is fatal instead."""

    @property
    def cycle(self) -> float:
        """From the begin of a window's period to its end."""
        return self.period + self.timeout

    @property
    def bound(self) -> float:
        """From the last beat in which all were there to when that they are not is fatal."""
        return self.failures * self.cycle


@dataclass(frozen=True, slots=True)
class Beating:
    """What a worker knows of the beating."""

    plan: Plan
    token: int
    """What it shows; 0 until it has been told."""
    since: float
    """When all were there for the last time, or when it began; monotonic seconds."""
    beats: int = 0
    """Exchanges that succeeded: the number of the next one."""
    window: int = 0
    """The earliest window for the next try; while one is made, its own."""
    asked: float = 0.0
    """When the last try began."""
    stalled: Ranks = NOBODY
    """Of whom it was reported that they stand still."""
    leaving: bool = False
    """Its last exchange is under way."""
    over: bool = False
    """Nothing is to be done any more, whatever happens."""
    left: Ranks = NOBODY
    """Who left, so that it is over."""


class Woke(NamedTuple):
    """The time to sleep is over."""

    now: float


class Heard(NamedTuple):
    """An exchange ended, or the meeting had something to tell between two."""

    outcome: Outcome
    now: float


class Stop(NamedTuple):
    """This worker is to leave."""

    now: float


class Judge(NamedTuple):
    """From now on, this is what is thought of workers that stand still; see `Plan`."""

    stalled_after: int | None
    stall_is_fatal: bool
    now: float


Event = Woke | Heard | Stop | Judge


class Exchange(NamedTuple):
    """Exchange, and tell what came of it."""

    timeout: float
    final: bool = False
    """Whether it is fatal if it fails."""


class Sleep(NamedTuple):
    """Wait until then, monotonic seconds, or until something happens."""

    until: float


class Listen(NamedTuple):
    """From now on, tell what the meeting has to tell between exchanges."""


class Rearm(NamedTuple):
    """A beat came to pass: there is no need to die for so many seconds."""

    seconds: float


class Say(NamedTuple):
    """Log a line."""

    level: int
    text: str


class Stalled(NamedTuple):
    """Report that somebody stands still."""

    standing: Standing
    text: str


class Fail(NamedTuple):
    """It is fatal."""

    failure: HeartbeatFailure


class End(NamedTuple):
    """The beating is over, and nothing is wrong."""


Action = Exchange | Sleep | Listen | Rearm | Say | Stalled | Fail | End
Step = tuple[Beating, tuple[Action, ...]]


def begin(plan: Plan, token: int, now: float) -> Step:
    """Begin with the first exchange.

    Args:
        plan: of this worker.
        token: 1 to 65535 for rank 0, 0 for the others.
        now: monotonic seconds, as all times.
    """
    state = Beating(plan, token, since=now, asked=now)
    return state, (
        Say(logging.INFO, reports.bound(plan)),
        Exchange(plan.start_timeout, not plan.patient),
    )


def step(state: Beating, event: Event) -> Step:
    """Apply what happened.

    Returns:
        The new state, and what to do. The last of it is what to wait for: `Exchange` or `Sleep`, or
        `Fail` or `End`, after which nothing is to come.
    """
    if state.over:
        return state, ()
    match event:
        case Woke(now):
            return _try(state, now)
        case Stop(now):
            return _leave(state, now)
        case Heard() if state.leaving:
            return replace(state, over=True), (End(),)
        case Judge(stalled_after, stall_is_fatal, now):
            changed = replace(
                state.plan, stalled_after=stalled_after, stall_is_fatal=stall_is_fatal
            )
            return _wait(replace(state, plan=changed), now)
        case Heard(outcome, now):
            return _heard(state, outcome, now)


def _heard(state: Beating, outcome: Outcome, now: float) -> Step:
    match outcome:
        case Agreed():
            return _agreed(state, outcome, now)
        case Failed():
            return _failed(state, outcome, now)
        case Broken(kind, ranks, detail):
            return _fail(state, kind, ranks, detail, now)
        case Left(ranks):
            text = f"heartbeat: {ranks} left in peace, and the beating is over"
            return replace(state, over=True, left=ranks), (Say(logging.INFO, text), End())


def _wait(state: Beating, now: float) -> Step:
    """Wait until it is time for the next try."""
    if state.beats:
        return _try(state, now)
    return state, (Sleep(max(state.asked + state.plan.period, now)),)


def _try(state: Beating, now: float) -> Step:
    """Exchange if a window is open, else wait for it."""
    plan = state.plan
    if not state.beats:
        return replace(state, asked=now), (Exchange(plan.start_timeout, not plan.patient),)
    window, closes = _window(state, now)
    opens = state.since + window * plan.cycle + (0.0 if window else plan.period)
    if now < opens:
        return state, (Sleep(opens),)
    final = window + 1 >= plan.failures
    return replace(state, window=window, asked=now), (Exchange(closes - now, final),)


def _window(state: Beating, now: float) -> tuple[int, float]:
    """The window for a try, the first that is not over, and when it closes."""
    plan = state.plan
    window = max(state.window, int((now - state.since) // plan.cycle))
    closes = state.since + (window + 1) * plan.cycle
    if closes - now < WORTHWHILE * plan.timeout:
        return window + 1, closes + plan.cycle
    return window, closes


def _agreed(state: Beating, agreed: Agreed, now: float) -> Step:
    plan = state.plan
    if (state.token and agreed.token != state.token) or not agreed.token:
        detail = f"it was told the token {agreed.token}, and its own is {state.token}"
        return _fail(state, "out of step", Ranks.of([plan.rank]), detail, now)
    first = not state.beats
    state = replace(
        state,
        token=agreed.token,
        since=now - agreed.age,
        beats=state.beats + 1,
        window=0,
    )
    actions: tuple[Action, ...] = (Rearm(max(plan.bound - agreed.age, 0.0)),)
    if first:
        actions = (*actions, Listen())
    standing = agreed.standing
    if plan.stalled_after and standing and standing.still >= plan.stalled_after:
        text = reports.stands_still(standing)
        if plan.stall_is_fatal:
            return _fail(state, "stalled", standing.stalled, text, now)
        if standing.stalled != state.stalled:
            state = replace(state, stalled=standing.stalled)
            actions = (*actions, Stalled(standing, f"heartbeat: {text}"))
    else:
        state = replace(state, stalled=NOBODY)
    state, then = _try(state, now)
    return state, (*actions, *then)


def _failed(state: Beating, failed: Failed, now: float) -> Step:
    plan = state.plan
    if not state.beats:
        if not plan.patient:
            kind: Kind = "never started" if failed.missing.total else "no exchange"
            return _fail(state, kind, failed.missing, failed.why, now)
        state, then = _wait(state, now)
        if not failed.missing.total:
            text = f"heartbeat: waiting for all {plan.size} workers: {failed.why}"
            return state, (Say(logging.WARNING, text), *then)
        text = reports.not_begun(plan, failed.missing, now - state.since)
        loud = logging.WARNING if reports.speaks(plan, failed.missing) else logging.INFO
        return state, (Say(loud, text), *then)
    failures = state.window + 1
    if failures >= plan.failures:
        kind = "missing" if failed.missing.total else "no exchange"
        return _fail(state, kind, failed.missing, failed.why, now)
    missing = f" ({failed.missing} missing)" if failed.missing.total else ""
    text = (
        f"heartbeat failure {failures} at beat {state.beats}, {plan.failures - failures} more "
        f"until the limit: {failed.why}{missing}"
    )
    state, then = _try(replace(state, window=failures), now)
    return state, (Say(logging.WARNING, text), *then)


def _leave(state: Beating, now: float) -> Step:
    if state.leaving or not state.beats:  # who never came need not leave
        return replace(state, over=True), (End(),)
    _, closes = _window(state, now)
    return replace(state, leaving=True), (Exchange(closes - now),)


def _fail(state: Beating, kind: Kind, ranks: Ranks, detail: str, now: float) -> Step:
    plan = state.plan
    failure = failure_of(
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
