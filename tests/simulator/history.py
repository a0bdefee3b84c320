"""Checks of a simulated job: they test its whole history, not only its end.

The checks do not know how the rules decide. They see each change of the state with its event, and
the notifications to each agent. They also see when workers ran (`worlds.py`). This module states
the promises about all these a second time, in other words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from regrow.rendezvous.protocol.document import contradictions
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LastCallOver,
    LeaveRound,
    NodeLeaving,
    NodeLost,
    Seated,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.protocol.state import Round
from simulator.kernel import Machine, Simulation
from simulator.worlds import Run, Violation, Worlds


class Life(Protocol):
    """The part of an agent that the checks need."""

    alive: bool
    machine: Machine

    @property
    def id(self) -> str:
        """The id of the agent's node."""
        ...


class _Accused:
    """A failure that is not classified yet."""

    def __init__(self, reporter: str, members: frozenset[str]) -> None:
        self.unheard = members - {reporter}
        self.excused = ""


class History:
    """All events of one simulated job."""

    def __init__(self, sim: Simulation, bounds: Bounds) -> None:
        self.sim, self.bounds = sim, bounds
        self.epoch = 0
        """Counts the lives of the job: a server that loses its state begins another life."""
        self.lives: dict[str, Life] = {}
        """Agents by node id."""
        self.rounds: dict[Run, Mapping[str, int]] = {}
        self.worlds = Worlds(sim, bounds, self.note)
        self.endings: set[str] = set()
        """The node that closed the job, and why, as its nodes were notified."""
        self.trace: Callable[[str], None] | None = None
        self.charged = 0
        self.forgiven = 0
        self.spends = 0
        self.losses = 0
        self.evictions = 0
        self._asked: dict[tuple[int, str], int] = {}
        """By life of the job and node: restarts that its agent asked to spend."""
        self._accepted: dict[tuple[int, str], int] = {}
        self._seats: dict[Run, tuple[int, str, str]] = {}
        self._over: dict[tuple[int, str], int] = {}
        self._replayed = False
        self._begin()

    def _begin(self) -> None:
        self._seated_in: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self.given_up: set[str] = set()
        """Nodes that were known once, and are unknown now."""
        self._charged_rounds: set[int] = set()
        self._spent: dict[str, dict[int, int]] = {}
        """By node and round: restarts with which the job was charged in the running round."""
        self._accused: dict[int, _Accused] = {}
        self._evicted: frozenset[str] = frozenset()

    def forgotten(self) -> None:
        """Begin another life of the job, without knowledge of the life before."""
        self.epoch += 1
        self.endings.clear()  # of a job that the server forgot when its last node had gone
        self._begin()

    def recovered(self, before: Round, after: Round | None) -> None:
        """Check that a restarted server continues with the essential state of the killed one."""
        self.note(f"the server was killed in round {before.number}, and another one goes on")
        if after is None or after.number < before.number:
            raise self.broken(f"round numbers went back: {before}, then {after}")
        if after.failures < before.failures:
            raise self.broken(f"failures were forgotten: {before}, then {after}")
        if after.closed != before.closed:
            raise self.broken(f"the end of the job was forgotten: {before}, then {after}")
        if after.number == before.number and after.ranks != before.ranks:
            raise self.broken(f"a round has other members than before: {before}, then {after}")

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Check no changes inside the `with` block: a server replays them from its journal."""
        self._replayed = True
        yield
        self._replayed = False

    def note(self, what: str) -> None:
        """Send a line to the trace, if there is one."""
        if self.trace is not None:
            self.trace(f"{self.sim.now:8.3f} {what}")

    def broken(self, promise: str) -> Violation:
        """Return the exception to raise for a broken promise."""
        return self.worlds.broken(promise)

    # --- the state

    def changed(self, before: Round, event: Event, after: Round) -> None:
        """Check the effect of an event on the state."""
        if self._replayed:
            return
        if after is not before and self.trace is not None:
            place = "complete" if after.complete else f"last call {after.last_call}"
            self.note(f"{event} -> round {after.number}, {place}: {', '.join(after.members)}")
        if wrong := next(contradictions(after), None):
            raise self.broken(f"the state contradicts itself: {wrong}: {after}")
        if not before.number <= after.number <= before.number + 1:
            raise self.broken(f"round {after.number} after round {before.number}")
        if after is not before and after.version <= before.version:
            raise self.broken("a change without a new version")
        self._check_token(before, event, after)
        self._check_loss(event, before, after)
        self._check_close(event, before, after)
        if isinstance(event, SpendRestart):
            self._check_spend(before, event, after)
        else:
            self._check_verdict(before, event, after)
        if after.failures != len(self._charged_rounds) + self._all_spent():
            raise self.broken(
                f"{after.failures} failures, of which {len(self._charged_rounds)} are verdicts and "
                f"{self._all_spent()} were spent"
            )
        if after.complete:
            self._check_members(after)
        known = frozenset({*after.members, *after.queue, *after.awaited})
        self.given_up |= self._known - known
        self.given_up -= known
        self._known = known

    def _check_members(self, state: Round) -> None:
        round = Run(self.epoch, state.number)
        ranks = self.rounds.setdefault(round, state.ranks)
        if ranks != state.ranks:
            raise self.broken(f"two memberships of {round}: {ranks} and {state.ranks}")
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise self.broken(f"ranks that are not given once each: {ranks}")
        if not state.min_nodes <= len(ranks) <= state.max_nodes:
            raise self.broken(f"{len(ranks)} nodes in a round")
        for id in ranks:
            self._seated_in[id] = state.number

    def _check_token(self, before: Round, event: Event, after: Round) -> None:
        if after is before:
            return
        match event:
            case JoinRound(node, token) if token:
                id = node.id
            case WorkersFailed(id, token) | EndConfirmed(id, token) | NodeLeaving(id, token):
                pass
            case LeaveRound(id, token) if token:
                pass
            case _:
                return
        if id in self.given_up or token != self._seated_in.get(id):
            raise self.broken(f"a stale token has won: {event}")

    def _check_loss(self, event: Event, before: Round, after: Round) -> None:
        if after is before:
            return
        self.evictions += after.evicting and not before.evicting
        self._evicted = frozenset(after.awaited if after.evicting else ())
        match event:
            case NodeLost(id, why):
                self.losses += 1
                life = self.lives[id]
                healthy_for = self.sim.now - life.machine.trouble_at
                here = life.alive and life.id == id
                if here and healthy_for > self.bounds.lease + self.bounds.kill + 2.0:
                    raise self.broken(
                        f"{id} was expelled ({why}), and was healthy for {healthy_for:.1f} s"
                    )

    def _check_close(self, event: Event, before: Round, after: Round) -> None:
        if isinstance(event, CloseRendezvous) and after.closed != before.closed:
            if event.id in self.given_up or event.id not in self._known | before.ranks.keys():
                raise self.broken(f"{event.id}, which has no seat, closed the rendezvous")
            if event.id in before.queue:
                raise self.broken(f"{event.id}, which only waits for a seat, closed the rendezvous")

    def _check_verdict(self, before: Round, event: Event, after: Round) -> None:
        match event:
            case WorkersFailed(id, token) if after.number > before.number:
                members = frozenset(before.ranks) - before.gone
                self._accused[before.number] = _Accused(id, members)
                self._accused[before.number].excused = next(iter(before.leaving), "")
            case WorkersFailed(id, token) | EndConfirmed(id, token) if accused := self._accused.get(
                token
            ):
                accused.unheard -= {id}
            case JoinRound(node, token) if accused := self._accused.get(token):
                accused.unheard -= {node.id}
            case NodeLost(id) | LeaveRound(id) | NodeLeaving(id):
                for accused in self._accused.values():
                    if id in accused.unheard:
                        accused.excused = id
            case LastCallOver() if after.evicting:
                for accused in self._accused.values():
                    if accused.unheard:
                        accused.excused = "a node that did not come back"
        if after.failures != before.failures:
            round = after.number - 1
            if after.failures != before.failures + 1 or round in self._charged_rounds:
                raise self.broken(f"round {round} was charged twice")
            self._charged_rounds.add(round)
            self.charged += 1
            accused = self._accused.pop(round)
            if accused.excused or accused.unheard:
                why = accused.excused or f"{sorted(accused.unheard)}, which sent no message"
                raise self.broken(f"the failure in round {round} was charged, in spite of {why}")
        elif not after.unheard and (before.unheard or after.number - 1 in self._accused):
            self.forgiven += 1
            del self._accused[after.number - 1]

    def _check_spend(self, before: Round, event: SpendRestart, after: Round) -> None:
        if after is before:
            return
        member = event.token == before.number and event.id in before.ranks
        if not member or event.id in self.given_up:
            raise self.broken(f"a node spends a restart that is not in the round: {event}")
        spent = self._spent.setdefault(event.id, {})
        costs = event.number - spent.get(event.token, 0)
        if costs <= 0 or after.failures != before.failures + costs:
            raise self.broken(f"{event} was charged twice, or not at all: {before}, then {after}")
        kept = (before.number, before.complete, before.members, before.ranks, before.queue)
        if (after.number, after.complete, after.members, after.ranks, after.queue) != kept:
            raise self.broken(f"the round does not go on after {event}: {before}, then {after}")
        spent[event.token] = event.number
        self.spends += costs
        if sum(spent.values()) > self._asked.get((self.epoch, event.id), 0):
            raise self.broken(f"{event} was charged, and its agent did not ask: {spent}")

    def _all_spent(self) -> int:
        return sum(sum(spent.values()) for spent in self._spent.values())

    # --- the agents

    def asks_to_spend(self, epoch: int, id: str) -> None:
        """Note that an agent asks to spend a restart."""
        self._asked[epoch, id] = self._asked.get((epoch, id), 0) + 1

    def spent(self, epoch: int, id: str, failures: int | None) -> None:
        """Check that the job was charged when an agent receives that it may replace a worker."""
        self.note(f"{id} replaces a worker, after {failures} failures")
        self._accepted[epoch, id] = accepted = self._accepted.get((epoch, id), 0) + 1
        if epoch == self.epoch and sum(self._spent.get(id, {}).values()) < accepted:
            raise self.broken(f"{id} replaced {accepted} workers, and paid {self._spent.get(id)}")
        if failures is None or failures < accepted:
            raise self.broken(f"{id} replaced {accepted} workers after {failures} failures")

    def seated(self, epoch: int, seat: Seated, over: int) -> None:
        """Check an agent's new seat; `over` is the last ended round it knew at its request."""
        self.note(f"{seat}")
        round = Run(epoch, seat.round)
        same = seat.world_size, seat.leader, seat.digest
        if self._seats.setdefault(round, same) != same:
            raise self.broken(f"two agents got different seats in {round}")
        if self.rounds.get(round, {}).get(seat.id) != seat.rank:
            raise self.broken(f"{seat.id} got a rank that is not its own: {seat}")
        if seat.round <= over:
            raise self.broken(f"{seat.id} takes a seat in a round that it knows is over: {seat}")

    def notified_over(self, epoch: int, id: str, round: int, *, alone: bool) -> None:
        """Note an agent's notice that its round is over; `alone`: for this node alone."""
        self.note(f"{id} knows that round {round} is over")
        self._over[epoch, id] = max(round, self._over.get((epoch, id), 0))
        if alone:
            self.worlds.gave_up(self.lives[id].machine, id, round)

    # --- the workers

    def taken_for_dead(self, id: str, since: float) -> None:
        """Note that a node's seat is given away: its connection closed and it did not reconnect.

        Args:
            id: the node.
            since: when the connection closed, by the clock of its machine.
        """
        life = self.lives[id]
        if life.alive and life.id == id and id in self._seated_in:
            self.worlds.taken_for_dead(life.machine, id, self._seated_in[id], since)

    def started(self, machine: Machine, id: str, epoch: int, round: int, lease: float) -> None:
        """Check that workers may begin to run."""
        if round <= self._over.get((epoch, id), 0):
            raise self.broken(f"{id} starts workers of round {round}, which it knows is over")
        self.worlds.started(machine, id, Run(epoch, round), lease)

    def killed_while_stopping(self, machine: Machine, asked: float) -> None:
        """Check a lease that ended `asked` seconds after the workers were asked to stop."""
        healthy_for, grace = self.sim.now - machine.trouble_at, self.bounds.grace
        evicted = self._evicted and machine in {self.lives[id].machine for id in self._evicted}
        if evicted and asked < grace and healthy_for > self.bounds.lease + self.bounds.kill + 2.0:
            raise self.broken(
                f"workers on {machine.name} were killed {asked:.1f} s into a grace of {grace:g} s, "
                f"and their host was healthy for {healthy_for:.1f} s"
            )
