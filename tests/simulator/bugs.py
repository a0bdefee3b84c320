"""Planted bugs that the simulator must find: each is a small patch of the rules, or of a driver.

They are bugs that were made here or elsewhere, or nearly. A test that finds no planted bug proves
nothing, and the simulator is a test like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from msgspec import structs

from helpers.rendezvous.kept_records import Records
from regrow.rendezvous.node.seat_lease import SeatLease
from regrow.rendezvous.peer import peer_driver
from regrow.rendezvous.protocol import rules
from regrow.rendezvous.protocol.failure_detector import Bounds, FailureDetector
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LastCallOver,
    LeaveRound,
    NodeLeaving,
    NodeLost,
    SpendRestart,
)
from regrow.rendezvous.protocol.state import Round, place, seated, watched
from regrow.rendezvous.server import records, round_service
from regrow.rendezvous.server.served_job import ServedJob
from regrow.rendezvous.server.server_driver import ServerDriver
from regrow.store import Answer
from simulator import host as sim_host
from simulator import nodes as sim_nodes
from simulator import successor_bugs, witness_bugs
from simulator.agent import Agent
from simulator.nodes import Plain, Written

Step = Callable[[Round, Event], rules.Step]


def _stepping(change: Callable[[Step, Round, Event], rules.Step]) -> list[Any]:
    """Replace the step of the rules by `change(real, state, event)`."""
    return [mock.patch.object(rules, "step", partial(change, rules.step))]


def _a_stale_token_is_accepted() -> list[Any]:
    """An evicted node is admitted again with any token."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        if isinstance(event, JoinRound) and not place(state, event.node.id):
            event = event._replace(token=0)
        return real(state, event)

    return _stepping(change)


def _a_seat_is_given_away_at_once() -> list[Any]:
    """When the last call ends, the rules do not wait for the leases of the missing nodes."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        after, refusal = real(state, event)
        if isinstance(event, LastCallOver) and after.evicting and not state.evicting:
            return real(after, LastCallOver(after.last_call))
        return after, refusal

    return _stepping(change)


def _an_evicted_member_renews_its_lease() -> list[Any]:
    """A beat is answered without a check for eviction."""
    return [
        mock.patch.object(round_service, "holds", seated),
        mock.patch.object(peer_driver, "holds", seated),
    ]


def _a_host_that_leaves_is_not_awaited() -> list[Any]:
    """The notice of a host is taken for its leave, although its workers still run."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        after, refusal = real(state, event)
        if isinstance(event, NodeLeaving) and after.leaving.keys() - state.leaving.keys():
            return real(after, LeaveRound(event.id, event.token, event.why))
        return after, refusal

    return _stepping(change)


def _a_round_goes_on_without_those_that_left() -> list[Any]:
    """The last host that leaves with notice does not end the round."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        if isinstance(event, LeaveRound | NodeLost) and event.id in state.leaving:
            gone = structs.replace(state, gone=state.gone | {event.id}, version=state.version + 1)
            return gone, None
        return real(state, event)

    return _stepping(change)


def _ranks_are_kept_when_the_world_shrinks() -> list[Any]:
    """Members keep their ranks, and new nodes take the first free numbers after those."""

    def assign(nodes: Mapping[str, Any], previous: Mapping[str, int]) -> dict[str, int]:
        ranks = {id: previous[id] for id in nodes if id in previous}
        for id in nodes:
            ranks.setdefault(id, len(ranks))
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    return [mock.patch.object(rules, "assign_ranks", assign)]


def _silence_is_measured_by_wall_clock() -> list[Any]:
    """Silence is the difference of two wall times, and the wall clock may jump between them."""

    real = FailureDetector.check

    def by_wall(
        detector: FailureDetector,
        state: Round,
        beats: Mapping[str, int] | None,
        bounds: Bounds,
        now: float,
        *more: Any,
        **among: Any,
    ) -> tuple[FailureDetector, tuple[LastCallOver | NodeLost, ...], float | None]:
        after, due, _ = real(detector, state, None, bounds, now, *more, **among)
        silent: dict[str, tuple[int, float]] = {}
        lost: list[LastCallOver | NodeLost] = []
        for id in sorted(watched(state) - {*more[:1]}):
            received = (beats or {}).get(id, 0)
            beat, since = detector.silent.get(id, (received, now))
            silent[id] = (received, now if beat != received else since)
            if now - silent[id][1] > bounds.lease + bounds.kill:
                lost.append(NodeLost(id, "its last beat is too old"))
        return replace(after, silent=silent), (*due, *lost), None

    def wall(agent: Agent) -> Callable[[], float]:
        return lambda: agent.host.clock + agent.host.wall

    return [
        mock.patch.object(FailureDetector, "check", by_wall),
        mock.patch.object(sim_nodes, "clock_of", wall),
    ]


def _a_failure_is_charged_before_the_others_confirm() -> list[Any]:
    """The first report decides, before the other members have sent a message."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        after, refusal = real(state, event)
        for id in sorted(after.unheard):
            after, _ = real(after, EndConfirmed(id, after.number - 1))
        return after, refusal

    return _stepping(change)


def _a_late_judgement_ends_another_last_call() -> list[Any]:
    """The end of one last call also ends any other last call that is running."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        if isinstance(event, LastCallOver) and state.last_call:
            event = LastCallOver(state.last_call)
        return real(state, event)

    return _stepping(change)


def _a_silent_node_is_lost_while_its_lease_lasts() -> list[Any]:
    """Two missed beats count as the end of a node."""
    hasty = Bounds(keep_alive=1.0, misses=1, kill=1.0)

    real = FailureDetector.check

    def check(
        detector: FailureDetector, state: Round, beats: Any, bounds: Bounds, *rest: Any, **more: Any
    ) -> Any:
        hurried = replace(hasty, last_call=bounds.last_call)
        return real(detector, state, beats, hurried, *rest, **more)

    return [mock.patch.object(FailureDetector, "check", check)]


def _a_paused_process_blames_the_others() -> list[Any]:
    """A process that was stopped counts its own pause as the silence of the others."""

    real = FailureDetector.check

    def check(
        detector: FailureDetector,
        state: Round,
        beats: Any,
        bounds: Bounds,
        now: float,
        *peers: Any,
        **more: Any,
    ) -> Any:
        slept = max(now - detector.checked - bounds.keep_alive, 0.0) if detector.silent else 0.0
        blamed = {id: (beat, silence + slept) for id, (beat, silence) in detector.silent.items()}
        return real(replace(detector, silent=blamed), state, beats, bounds, now, *peers, **more)

    return [mock.patch.object(FailureDetector, "check", check)]


def _the_lease_is_not_checked() -> list[Any]:
    """The guardian does not check the lease."""

    def watch(guardian: sim_host.Guardian, run: int) -> None:
        pass

    return [mock.patch.object(sim_host.Guardian, "watch", watch)]


def _the_grace_is_cut_by_the_last_call() -> list[Any]:
    """A node that still stops its workers at the end of the last call is evicted."""
    return [mock.patch.object(Bounds, "comeback", property(lambda bounds: bounds.last_call))]


def _a_seat_that_was_given_away_is_kept() -> list[Any]:
    """A node that lost its seat to another stops its workers as at the end of any round."""

    def lapse(lease: SeatLease, round: int) -> None:
        pass

    return [mock.patch.object(SeatLease, "lapse", lapse)]


def _a_reset_is_taken_for_an_end() -> list[Any]:
    """A seat is given away at once, however the connection broke."""
    real = round_service.RendezvousService.ended

    def ended(
        service: round_service.RendezvousService, session: Hashable, why: str, _: bool, now: float
    ) -> list[Answer]:
        return real(service, session, why, True, now)

    return [mock.patch.object(round_service.RendezvousService, "ended", ended)]


def _a_write_is_taken_for_made() -> list[Any]:
    """If the backend does not know whether a write was made, the driver does not check."""

    def made(backend: Plain, state: bytes, answer: Written) -> Written:
        return state, answer[1], True

    return [mock.patch.object(Plain, "unsure", made)]


def _a_token_is_taken_for_that_of_an_older_state() -> list[Any]:
    """Another thread updates the document between the read of the state and of its token."""
    real = Plain.set_state

    def set_state(backend: Plain, state: bytes, token: int | None = None) -> Written | None:
        return real(backend, state, max(token or 0, backend.latest))

    return [mock.patch.object(Plain, "set_state", set_state)]


def _another_life_of_the_job_is_taken_for_ours() -> list[Any]:
    """A driver does not check to which life of the job an answer belongs."""

    def check(driver: ServerDriver, life: str) -> None:
        pass

    return [mock.patch.object(ServerDriver, "check_life", check)]


def _any_node_closes() -> list[Any]:
    """A close is accepted without a check that the node has a seat."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        if isinstance(event, CloseRendezvous):
            member = event.id in state.members or event.id in state.awaited
            id = event.id if member else next(iter(state.members), event.id)
            return real(state, event._replace(id=id))
        return real(state, event)

    return _stepping(change)


def _a_change_is_written_down_after_its_answer() -> list[Any]:
    """The last action of a killed server is missing in its journal."""
    real = Records.append

    def append(journal: Records, record: bytes) -> bool:
        late = getattr(journal, "late", None)
        setattr(journal, "late", record)  # noqa: B010
        return late is not None and real(journal, late)

    return [mock.patch.object(Records, "append", append)]


def _recovered_as(change: Callable[[Round], Round]) -> list[Any]:
    real = records.recover

    def recover(records: Any) -> Any:
        jobs = real(records)
        return {id: structs.replace(job, state=change(job.state)) for id, job in jobs.items()}

    return [mock.patch.object(round_service, "recover", recover)]


def _failures_are_forgotten_when_the_server_is_killed() -> list[Any]:
    """The next server starts with the full budget of failures."""
    return _recovered_as(lambda state: structs.replace(state, failures=0, charged=False))


def _rounds_begin_again_when_the_server_is_killed() -> list[Any]:
    """The next server knows the members of the job, but not its round number."""
    return _recovered_as(lambda state: Round(state.min_nodes, state.max_nodes))


def _a_repeated_replacement_is_charged_twice() -> list[Any]:
    """A restart that is spent is charged again if the event is repeated after a lost answer."""

    def change(real: Step, state: Round, event: Event) -> rules.Step:
        if isinstance(event, SpendRestart) and event.id in state.spent:
            event = event._replace(number=state.spent[event.id] + 1)
        return real(state, event)

    return _stepping(change)


def _a_node_with_a_lost_connection_keeps_its_place() -> list[Any]:
    """Under overload the server also waits for a node whose session has ended."""
    real = ServedJob.unleased

    class All:
        def __contains__(self, _: object) -> bool:
            return True

    return [mock.patch.object(ServedJob, "unleased", lambda job, _: real(job, All()))]


class Bug(NamedTuple):
    """A planted bug, and the seeds and the driver that show it."""

    driver: str
    seeds: range
    """One of these seeds finds it; they begin with the first that does, to save time."""
    patches: Callable[[], list[Any]]


BUGS: dict[str, Bug] = {
    "stale token": Bug("server", range(100), _a_stale_token_is_accepted),
    "seat given away": Bug("nodes", range(25, 125), _a_seat_is_given_away_at_once),
    "evicted member": Bug("server", range(36, 136), _an_evicted_member_renews_its_lease),
    "not awaited": Bug("server", range(44, 144), _a_host_that_leaves_is_not_awaited),
    "never over": Bug("server", range(4, 104), _a_round_goes_on_without_those_that_left),
    "ranks kept": Bug("server", range(100), _ranks_are_kept_when_the_world_shrinks),
    "wall clock": Bug("nodes", range(6, 106), _silence_is_measured_by_wall_clock),
    "hasty judge": Bug("nodes", range(1, 101), _a_failure_is_charged_before_the_others_confirm),
    "late judgement": Bug("nodes", range(28, 128), _a_late_judgement_ends_another_last_call),
    "hasty loss": Bug("server", range(4, 104), _a_silent_node_is_lost_while_its_lease_lasts),
    "sleeper blames": Bug("nodes", range(19, 119), _a_paused_process_blames_the_others),
    "grace cut": Bug("server", range(100), _the_grace_is_cut_by_the_last_call),
    "unsure write": Bug("nodes", range(2, 102), _a_write_is_taken_for_made),
    "torn read": Bug("nodes", range(3, 103), _a_token_is_taken_for_that_of_an_older_state),
    "another life": Bug("server", range(75, 175), _another_life_of_the_job_is_taken_for_ours),
    "seat kept": Bug("server", range(23, 123), _a_seat_that_was_given_away_is_kept),
    "reset for end": Bug("server", range(25, 125), _a_reset_is_taken_for_an_end),
    "any node closes": Bug("server", range(1, 101), _any_node_closes),
    "any node closes a document": Bug("nodes", range(1, 101), _any_node_closes),
    "late record": Bug("server", range(2, 102), _a_change_is_written_down_after_its_answer),
    "failures forgotten": Bug(
        "server", range(10, 110), _failures_are_forgotten_when_the_server_is_killed
    ),
    "rounds begin again": Bug(
        "server", range(2, 102), _rounds_begin_again_when_the_server_is_killed
    ),
    "spent twice": Bug("server", range(12, 191, 7), _a_repeated_replacement_is_charged_twice),
    "spent twice in a document": Bug(
        "nodes", range(243, 422, 7), _a_repeated_replacement_is_charged_twice
    ),
    "lost and kept": Bug(
        "server", range(1741, 1841), _a_node_with_a_lost_connection_keeps_its_place
    ),
    "no lease": Bug("server", range(100), _the_lease_is_not_checked),
    "half is enough": Bug("hosts", range(1, 101), successor_bugs.half_of_the_voters_is_enough),
    "not held back": Bug("hosts", range(100), successor_bugs.an_answer_is_not_held_back),
    "oldest copy": Bug("hosts", range(10, 110), successor_bugs.the_oldest_copy_wins),
    "renewed alone": Bug(
        "hosts", range(549, 649), successor_bugs.leases_are_renewed_without_a_majority
    ),
    "seat given at takeover": Bug(
        "hosts", range(9, 109), successor_bugs.a_seat_is_given_away_at_the_takeover
    ),
    "voters at once": Bug("hosts", range(100), successor_bugs.voters_change_at_once),
    "voters forgotten": Bug(
        "hosts", range(12, 112), successor_bugs.a_restarted_server_forgets_the_voters
    ),
    "failures forgotten at takeover": Bug(
        "hosts", range(9, 109), successor_bugs.failures_are_forgotten_at_the_takeover
    ),
    "same voter": Bug(
        "hosts", range(185, 285), successor_bugs.an_agent_is_the_same_voter_after_its_start
    ),
    "never withdrawn": Bug("hosts", range(3, 103), successor_bugs.first_grants_are_never_withdrawn),
    "no compare": Bug("witness", range(9, 109), witness_bugs.a_ballot_is_written_without_compare),
    "confirmed unwritten": Bug(
        "witness", range(4, 104), witness_bugs.a_witness_confirms_before_it_writes
    ),
    "grant forgotten": Bug("witness", range(179, 279), witness_bugs.a_witness_forgets_its_grant),
    "two directories": Bug("witness", range(7, 107), witness_bugs.two_directories_are_one_witness),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Apply the patches of a bug inside the `with` block."""
    with ExitStack() as stack:
        for patch in BUGS[name].patches():
            stack.enter_context(patch)
        yield
