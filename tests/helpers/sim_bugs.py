"""Mistakes that the simulator has to find: each is a small patch of the rules, or of a driver.

They are mistakes that were made here or elsewhere, or nearly: a test that no mistake can fail says
nothing, and a simulator is a test like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partialmethod
from typing import Any, NamedTuple
from unittest import mock

import sim_host
import sim_nodes
from sim_agent import Agent

from regrow.rendezvous import _by_nodes, _neighbours, _round, _service, _shared
from regrow.rendezvous._by_server import ServerDriver
from regrow.rendezvous._envelope import Envelope, seal
from regrow.rendezvous._lease import Lease
from regrow.rendezvous._news import Effect, Event, Join, Judged, LastCallOver, Lost
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._round import Step
from regrow.rendezvous._shared import Shared
from regrow.rendezvous._state import Round, watched
from regrow.store import Answer


def _a_stale_token_is_accepted() -> list[Any]:
    """Who was given up is taken back, whatever it shows."""
    real = _round._join

    def join(state: Round, event: Join) -> Step:
        known = _round._known(state, event.node.id)
        return real(state, event if known else event._replace(token=0))

    return [mock.patch.object(_round, "_join", join)]


def _a_seat_is_given_away_at_once() -> list[Any]:
    """At the end of the last call nobody waits for the leases of those who are missing."""

    def over(state: Round) -> Step:
        state = replace(state, awaited=frozenset(), unheard=frozenset())
        return _round._settle(state, last_call_over=True)

    return [mock.patch.object(_round, "_last_call_over", over)]


def _an_evicted_member_renews_its_lease() -> list[Any]:
    """A beat is answered without a look at the eviction."""
    return [
        mock.patch.object(_service, "holds", _round.seated),
        mock.patch.object(_by_nodes, "holds", _round.seated),
    ]


def _ranks_are_kept_when_the_world_shrinks() -> list[Any]:
    """Members keep their ranks, and new ones take the first free number beyond those."""

    def assign(nodes: Mapping[str, Any], previous: Mapping[str, int]) -> dict[str, int]:
        ranks = {id: previous[id] for id in nodes if id in previous}
        for id in nodes:
            ranks.setdefault(id, len(ranks))
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    return [mock.patch.object(_round, "assign_ranks", assign)]


def _silence_is_measured_by_wall_clock() -> list[Any]:
    """What counts is the difference of two wall times, of which one may have jumped."""

    def by_wall(
        patience: Patience,
        state: Round,
        beats: Mapping[str, int] | None,
        bounds: Bounds,
        now: float,
        me: str = "",
        *among: Any,
    ) -> tuple[Patience, tuple[LastCallOver | Lost, ...], float | None]:
        after, due, _ = look(patience, state, None, bounds, now, me, *among)
        silent: dict[str, tuple[int, float]] = {}
        lost: list[LastCallOver | Lost] = []
        for id in sorted(watched(state) - {me}):
            heard = (beats or {}).get(id, 0)
            beat, since = patience.silent.get(id, (heard, now))
            silent[id] = (heard, now if beat != heard else since)
            if now - silent[id][1] > bounds.lease + bounds.kill:
                lost.append(Lost(id, "its last beat is too old"))
        return replace(after, silent=silent), (*due, *lost), None

    def wall(agent: Agent) -> Callable[[], float]:
        return lambda: agent.host.clock + agent.host.wall

    return [
        mock.patch.object(_neighbours, "look", by_wall),
        mock.patch.object(sim_nodes, "clock_of", wall),
    ]


def _a_failure_is_charged_before_anyone_is_heard() -> list[Any]:
    """The first report decides."""
    real = _round._judge

    def judge(state: Round, told: tuple[Effect, ...]) -> Step:
        if any(isinstance(effect, Judged) for effect in told):
            return state, told
        return real(replace(state, unheard=frozenset()), told)

    return [mock.patch.object(_round, "_judge", judge)]


def _a_late_judgement_ends_another_last_call() -> list[Any]:
    """The end of a last call is taken for the end of whichever runs."""
    real = _round.step

    def step(state: Round, event: Event) -> Step:
        if isinstance(event, LastCallOver) and state.last_call:
            event = LastCallOver(state.last_call)
        return real(state, event)

    return [mock.patch.object(_round, "step", step)]


def _a_silent_node_is_lost_while_its_lease_lasts() -> list[Any]:
    """Two missed beats are taken for an end."""
    hasty = Bounds(keep_alive=1.0, misses=1, kill=1.0)

    def look_hastily(
        patience: Patience, state: Round, beats: Any, bounds: Bounds, *rest: Any
    ) -> Any:
        return look(patience, state, beats, replace(hasty, last_call=bounds.last_call), *rest)

    return [
        mock.patch.object(_service, "look", look_hastily),
        mock.patch.object(_neighbours, "look", look_hastily),
    ]


def _whoever_slept_blames_the_others() -> list[Any]:
    """A waiter that was stopped counts the time in which it could not listen as their silence."""

    def look_back(
        patience: Patience, state: Round, beats: Any, bounds: Bounds, now: float, *whom: Any
    ) -> Any:
        slept = max(now - patience.looked - bounds.keep_alive, 0.0) if patience.silent else 0.0
        blamed = {id: (beat, silence + slept) for id, (beat, silence) in patience.silent.items()}
        return look(replace(patience, silent=blamed), state, beats, bounds, now, *whom)

    return [
        mock.patch.object(_service, "look", look_back),
        mock.patch.object(_neighbours, "look", look_back),
    ]


def _the_lease_is_not_checked() -> list[Any]:
    """The guardian does not look at the time."""

    def watch(guardian: sim_host.Guardian, run: int) -> None:
        pass

    return [mock.patch.object(sim_host.Guardian, "_watch", watch)]


def _the_grace_is_cut_by_the_last_call() -> list[Any]:
    """Whoever still stops its workers when the last call is over is evicted."""
    return [mock.patch.object(Bounds, "comeback", property(lambda bounds: bounds.last_call))]


def _a_seat_that_was_given_away_is_kept() -> list[Any]:
    """A node that hears that its seat is another's stops its workers as at the end of any round."""

    def lapse(lease: Lease, round: int) -> None:
        pass

    return [mock.patch.object(Lease, "lapse", lapse)]


def _a_reset_is_taken_for_an_end() -> list[Any]:
    """A seat is given away at once however a connection has broken."""
    real = _service.RendezvousService.ended

    def ended(
        service: _service.RendezvousService, session: Hashable, why: str, _: bool, now: float
    ) -> list[Answer]:
        return real(service, session, why, True, now)

    return [mock.patch.object(_service.RendezvousService, "ended", ended)]


def _change(
    shared: Shared, change: Callable[[Envelope], Envelope], deadline: float, *, torn: bool
) -> Round:
    """Compare and set without the care that it takes."""
    while True:
        old, token = shared.envelope, shared._token
        if torn:
            with shared._changed:
                token = shared._token
        new = _shared._begun(change(old))
        answered = shared._call(lambda: shared._backend.set_state(seal(new), token))  # noqa: B023
        if answered is None:
            return new.state
        shared._take(*answered[:2])
        if answered[2]:
            return new.state
        shared.sleep(shared._random.uniform(0, shared._last_call_took))


def _a_write_is_taken_for_made() -> list[Any]:
    """The backend cannot say what became of it, and nobody looks."""
    return [mock.patch.object(Shared, "change", partialmethod(_change, torn=False))]


def _a_token_is_taken_for_that_of_an_older_state() -> list[Any]:
    """Another thread reads between a look at the state and one at its token."""
    return [mock.patch.object(Shared, "change", partialmethod(_change, torn=True))]


def _another_life_of_the_job_is_taken_for_ours() -> list[Any]:
    """A driver does not look which life of the job an answer is about."""

    def check(driver: ServerDriver, life: str) -> None:
        pass

    return [mock.patch.object(ServerDriver, "_check_life", check)]


class Bug(NamedTuple):
    """A mistake, and where it shows."""

    driver: str
    seeds: range
    """One of these finds it; they begin with the first that does, to save the search."""
    patches: Callable[[], list[Any]]


BUGS: dict[str, Bug] = {
    "stale token": Bug("server", range(100), _a_stale_token_is_accepted),
    "seat given away": Bug("nodes", range(20, 120), _a_seat_is_given_away_at_once),
    "evicted member": Bug("server", range(48, 148), _an_evicted_member_renews_its_lease),
    "ranks kept": Bug("server", range(100), _ranks_are_kept_when_the_world_shrinks),
    "wall clock": Bug("nodes", range(100), _silence_is_measured_by_wall_clock),
    "hasty judge": Bug("nodes", range(100), _a_failure_is_charged_before_anyone_is_heard),
    "late judgement": Bug("nodes", range(46, 146), _a_late_judgement_ends_another_last_call),
    "hasty loss": Bug("server", range(4, 104), _a_silent_node_is_lost_while_its_lease_lasts),
    "sleeper blames": Bug("nodes", range(131, 231), _whoever_slept_blames_the_others),
    "grace cut": Bug("server", range(100), _the_grace_is_cut_by_the_last_call),
    "unsure write": Bug("nodes", range(187, 287), _a_write_is_taken_for_made),
    "torn read": Bug("nodes", range(3, 103), _a_token_is_taken_for_that_of_an_older_state),
    "another life": Bug("server", range(4, 104), _another_life_of_the_job_is_taken_for_ours),
    "seat kept": Bug("server", range(14, 114), _a_seat_that_was_given_away_is_kept),
    "reset for end": Bug("server", range(6, 106), _a_reset_is_taken_for_an_end),
    "no lease": Bug("server", range(100), _the_lease_is_not_checked),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a mistake for a while."""
    with ExitStack() as stack:
        for patch in BUGS[name].patches():
            stack.enter_context(patch)
        yield
