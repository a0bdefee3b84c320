"""What is checked of a simulated job: not how it ends, but all that happened in it.

The checks know nothing of how the rules come to their decisions. They see each change of the state
and the event that made it, what each agent was told, and when workers ran (`sim_worlds`); what is
promised of these is written down here a second time, in other words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from sim_kernel import Machine, Simulation
from sim_worlds import Run, Violation, Worlds

from regrow.rendezvous._document import contradictions
from regrow.rendezvous._news import (
    Effect,
    Event,
    Failed,
    Heard,
    Join,
    LastCallOver,
    Leave,
    Leaving,
    Lost,
    Seated,
)
from regrow.rendezvous._patience import Bounds
from regrow.rendezvous._round import Round


class Life(Protocol):
    """An agent, as far as it matters here."""

    alive: bool
    machine: Machine

    @property
    def id(self) -> str:
        """Of its node."""
        ...


class _Accused:
    """A failure that is not judged yet."""

    def __init__(self, reporter: str, members: frozenset[str]) -> None:
        self.unheard = members - {reporter}
        self.excused = ""


class History:
    """All that has happened in one simulated job."""

    def __init__(self, sim: Simulation, bounds: Bounds) -> None:
        self.sim, self.bounds = sim, bounds
        self.epoch = 0
        """Counts the lives of the job: a server that forgets everything begins another."""
        self.lives: dict[str, Life] = {}
        """By node id."""
        self.rounds: dict[Run, Mapping[str, int]] = {}
        self.worlds = Worlds(sim, bounds, self.note)
        self.endings: set[str] = set()
        """Who has closed the job and why, as its nodes were told."""
        self.trace: Callable[[str], None] | None = None
        self.charged = 0
        self.forgiven = 0
        self.losses = 0
        self.evictions = 0
        self._seats: dict[Run, tuple[int, str, str]] = {}
        self._over: dict[tuple[int, str], int] = {}
        self._begin()

    def _begin(self) -> None:
        self._seated_in: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._given_up: set[str] = set()
        self._charged_rounds: set[int] = set()
        self._accused: dict[int, _Accused] = {}
        self._evicted: frozenset[str] = frozenset()

    def forgotten(self) -> None:
        """Another life of the job begins, that knows nothing of the one before."""
        self.epoch += 1
        self._begin()

    def note(self, what: str) -> None:
        """Tell whoever wants to know."""
        if self.trace is not None:
            self.trace(f"{self.sim.now:8.3f} {what}")

    def broken(self, promise: str) -> Violation:
        """Return what to raise."""
        return self.worlds.broken(promise)

    # --- the state

    def changed(
        self, before: Round, event: Event, after: Round, effects: tuple[Effect, ...]
    ) -> None:
        """An event took effect."""
        if after is not before and self.trace is not None:
            place = "complete" if after.complete else f"last call {after.last_call}"
            self.note(f"{event} -> round {after.number}, {place}: {', '.join(after.members)}")
        if wrong := next(contradictions(after), None):
            raise self.broken(f"the state contradicts itself: {wrong}: {after}")
        if not before.number <= after.number <= before.number + 1:
            raise self.broken(f"round {after.number} after round {before.number}")
        if after is not before and after.version <= before.version:
            raise self.broken("a change that nobody can see")
        self._check_token(before, event, after)
        self._check_loss(event, before, after)
        self._check_verdict(before, event, after)
        if after.complete:
            self._check_members(after)
        known = frozenset({*after.members, *after.queue, *after.awaited})
        self._given_up |= self._known - known
        self._given_up -= known
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
            case Join(node, token) if token:
                id = node.id
            case Failed(id, token) | Heard(id, token) | Leaving(id, token):
                pass
            case Leave(id, token) if token:
                pass
            case _:
                return
        if id in self._given_up or token != self._seated_in.get(id):
            raise self.broken(f"a stale token has won: {event}")

    def _check_loss(self, event: Event, before: Round, after: Round) -> None:
        if after is before:
            return
        self.evictions += after.evicting and not before.evicting
        self._evicted = frozenset(after.awaited if after.evicting else ())
        match event:
            case Lost(id, why):
                self.losses += 1
                life = self.lives[id]
                healthy_for = self.sim.now - life.machine.trouble_at
                here = life.alive and life.id == id
                if here and healthy_for > self.bounds.lease + self.bounds.kill + 2.0:
                    raise self.broken(
                        f"{id} was expelled ({why}), and was healthy for {healthy_for:.1f} s"
                    )

    def _check_verdict(self, before: Round, event: Event, after: Round) -> None:
        match event:
            case Failed(id, token) if after.number > before.number:
                members = frozenset(before.ranks) - before.gone
                self._accused[before.number] = _Accused(id, members)
            case Failed(id, token) | Heard(id, token) if accused := self._accused.get(token):
                accused.unheard -= {id}
            case Join(node, token) if accused := self._accused.get(token):
                accused.unheard -= {node.id}
            case Lost(id) | Leave(id) | Leaving(id):
                for accused in self._accused.values():
                    if id in accused.unheard:
                        accused.excused = id
            case LastCallOver() if after.evicting:
                for accused in self._accused.values():
                    if accused.unheard:
                        accused.excused = "somebody who did not come back"
        if after.failures != before.failures:
            round = after.number - 1
            if after.failures != before.failures + 1 or round in self._charged_rounds:
                raise self.broken(f"round {round} was charged twice")
            self._charged_rounds.add(round)
            self.charged += 1
            accused = self._accused.pop(round)
            if accused.excused or accused.unheard:
                why = accused.excused or f"{sorted(accused.unheard)}, of whom nothing was heard"
                raise self.broken(f"the failure in round {round} was charged, in spite of {why}")
        elif before.unheard and not after.unheard:
            self.forgiven += 1
            del self._accused[after.number - 1]

    # --- the agents

    def seated(self, epoch: int, seat: Seated, over: int) -> None:
        """An agent is given a seat; when it asked it knew that round `over` was over."""
        self.note(f"{seat}")
        round = Run(epoch, seat.round)
        same = seat.world_size, seat.leader, seat.digest
        if self._seats.setdefault(round, same) != same:
            raise self.broken(f"two agents were told two things about {round}")
        if self.rounds.get(round, {}).get(seat.id) != seat.rank:
            raise self.broken(f"{seat.id} was told a rank that is not its own: {seat}")
        if seat.round <= over:
            raise self.broken(f"{seat.id} takes a seat in a round that it knows is over: {seat}")

    def told_over(self, epoch: int, id: str, round: int, *, alone: bool) -> None:
        """An agent has been told that its round is over; `alone`: it is for this node alone."""
        self.note(f"{id} knows that round {round} is over")
        self._over[epoch, id] = max(round, self._over.get((epoch, id), 0))
        if alone:
            self.worlds.gave_up(self.lives[id].machine, id, round)

    # --- the workers

    def taken_for_dead(self, id: str, since: float) -> None:
        """A connection was closed and nobody came back, so the seat of its node is given away.

        Args:
            id: the node.
            since: when that was, by the clock of its machine.
        """
        life = self.lives[id]
        if life.alive and life.id == id and id in self._seated_in:
            self.worlds.taken_for_dead(life.machine, id, self._seated_in[id], since)

    def started(self, machine: Machine, id: str, epoch: int, round: int, lease: float) -> None:
        """Workers begin to run."""
        if round <= self._over.get((epoch, id), 0):
            raise self.broken(f"{id} starts workers of round {round}, which it knows is over")
        self.worlds.started(machine, id, Run(epoch, round), lease)

    def killed_while_stopping(self, machine: Machine, asked: float) -> None:
        """A lease was over so many seconds after the workers were asked to end."""
        healthy_for, grace = self.sim.now - machine.trouble_at, self.bounds.grace
        evicted = self._evicted and machine in {self.lives[id].machine for id in self._evicted}
        if evicted and asked < grace and healthy_for > self.bounds.lease + self.bounds.kill + 2.0:
            raise self.broken(
                f"workers on {machine.name} were killed {asked:.1f} s into a grace of {grace:g} s, "
                f"and their host was healthy for {healthy_for:.1f} s"
            )
