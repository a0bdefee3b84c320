"""What is checked of the workers of a simulated job: when they run, and beside whom.

No two worlds run at once: while workers of a round run anywhere, none of another do. There is one
exception, and it has a bound. An agent whose connection was closed by something in between is taken
for dead, and its seat is given away at once. Its workers may then run beside those of the next
round: until it hears of that, and no longer than the lease that it had when the connection closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from sim_kernel import Machine, Simulation

from regrow.rendezvous._patience import Bounds


class Violation(AssertionError):
    """A promise was broken."""


class Run(NamedTuple):
    """The workers of one machine."""

    epoch: int
    round: int
    until: float | None = None
    """By the clock of the machine: when they have to end that may run beside a newer round; None:
    they may not."""


class Worlds:
    """The workers of all machines.

    Args:
        sim: for its time.
        bounds: of a lease, and of a kill.
        note: tells whoever wants to know.
    """

    def __init__(self, sim: Simulation, bounds: Bounds, note: Callable[[str], None]) -> None:
        self.sim, self.bounds, self.note = sim, bounds, note
        self.running: dict[Machine, Run] = {}
        self.mistaken = 0
        self._frozen: dict[Machine, Run] = {}
        self._given_away: dict[tuple[str, int], float] = {}
        """By node and round: until when its workers may run."""
        self._count: Counter[Run] = Counter()

    def broken(self, promise: str) -> Violation:
        """Return what to raise."""
        return Violation(f"at {self.sim.now:.3f} s: {promise}")

    def started(self, machine: Machine, id: str, run: Run, lease: float) -> None:
        """A node's workers begin to run, with a lease by the clock of the machine."""
        self.note(f"{id} starts workers of round {run.round}")
        if machine in self.running:
            raise self.broken(f"workers of two rounds on {machine.name}")
        until = self._given_away.get((id, run.round))
        if machine.clock > (lease if until is None else min(lease, until)):
            raise self.broken(f"{id} starts workers without a lease")
        self._run(machine, run._replace(until=until))

    def _run(self, machine: Machine, run: Run) -> None:
        self.running[machine] = run
        if run.until is not None:
            return
        self._count[run] += 1
        for world in self._count:
            if world.epoch == run.epoch and world.round != run.round:
                names = [other.name for other, its in self.running.items() if its == world]
                raise self.broken(
                    f"workers of round {run.round} on {machine.name}, "
                    f"while those of round {world.round} run on {', '.join(names)}"
                )

    def _stand_still(self, machine: Machine) -> Run | None:
        run = self.running.pop(machine, None)
        if run is not None and run.until is None:
            self._count[run] -= 1
            if not self._count[run]:
                del self._count[run]
        return run

    def ended(self, machine: Machine, lease: float) -> None:
        """Workers do not run any more."""
        self.note(f"the workers on {machine.name} have ended")
        self._frozen.pop(machine, None)
        run = self._stand_still(machine)
        if run is None:
            return
        late = machine.clock - (lease if run.until is None else min(lease, run.until))
        if late > self.bounds.kill:
            raise self.broken(f"workers on {machine.name} outlived their lease by {late:.2f} s")

    # --- hosts that stand still

    def frozen(self, machine: Machine) -> None:
        """A whole host stands still: nothing of it runs."""
        if run := self._stand_still(machine):
            self._frozen[machine] = run

    def thawed(self, machine: Machine) -> None:
        """It goes on; its workers as well, if their lease is not over."""
        if run := self._frozen.pop(machine, None):
            self._run(machine, run)

    # --- agents that live, and are taken for dead

    def taken_for_dead(self, machine: Machine, id: str, round: int, since: float) -> None:
        """The seat of an agent that lives is given away.

        Args:
            machine: where it lives.
            id: its node.
            round: in which it has the seat.
            since: when its connection was closed, by the clock of the machine.
        """
        self.note(f"{id} lives, and is taken for dead")
        self.mistaken += 1
        self._given_away[id, round] = since + self.bounds.lease
        self._bound(machine, id, round)

    def gave_up(self, machine: Machine, id: str, round: int) -> None:
        """An agent says that a round is over for itself alone: its seat or its touch is lost."""
        if (id, round) in self._given_away:
            self._given_away[id, round] = min(machine.clock, self._given_away[id, round])
            self._bound(machine, id, round)

    def _bound(self, machine: Machine, id: str, round: int) -> None:
        until = self._given_away[id, round]
        if run := self._frozen.get(machine):
            self._frozen[machine] = run._replace(until=until)
        elif run := self._stand_still(machine):
            self.running[machine] = run._replace(until=until)
