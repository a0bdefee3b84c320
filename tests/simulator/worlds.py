"""The workers of a simulated job: when they run, and together with which other workers.

No two worlds run at once: while workers of a round run anywhere, no workers of another round do.
There is one exception, and it has a bound. If the network closes an agent's connection, the agent
counts as dead, and its seat is given away at once. Its workers may then run beside the workers of
the next round. They end when the agent is notified, and at the latest with the lease that the agent
had when the connection closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from regrow.rendezvous.protocol.failure_detector import Bounds
from simulator.kernel import Machine, Simulation


class Violation(AssertionError):
    """A promise was broken."""


class Run(NamedTuple):
    """The workers of one machine."""

    epoch: int
    round: int
    until: float | None = None
    """When the workers must end, by the clock of the machine, if they may run beside a newer round.

    None: they may not run beside a newer round.
    """


class Worlds:
    """The workers of all machines.

    Args:
        sim: the simulation, for its time.
        bounds: bounds of a lease and of a kill.
        note: receives a line for each event.
    """

    def __init__(self, sim: Simulation, bounds: Bounds, note: Callable[[str], None]) -> None:
        self.sim, self.bounds, self.note = sim, bounds, note
        self.running: dict[Machine, Run] = {}
        self.mistaken = 0
        self._frozen: dict[Machine, Run] = {}
        self._given_away: dict[tuple[str, int], float] = {}
        """By node and round: when its workers must end, by the clock of their machine."""
        self._count: Counter[Run] = Counter()

    def broken(self, promise: str) -> Violation:
        """Return the exception to raise for a broken promise."""
        return Violation(f"at {self.sim.now:.3f} s: {promise}")

    def started(self, machine: Machine, id: str, run: Run, lease: float) -> None:
        """Check the start of a node's workers; `lease` is its end by the machine's clock."""
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

    def _remove(self, machine: Machine) -> Run | None:
        run = self.running.pop(machine, None)
        if run is not None and run.until is None:
            self._count[run] -= 1
            if not self._count[run]:
                del self._count[run]
        return run

    def ended(self, machine: Machine, lease: float) -> None:
        """Check the end of the workers on a machine."""
        self.note(f"the workers on {machine.name} have ended")
        self._frozen.pop(machine, None)
        run = self._remove(machine)
        if run is None:
            return
        late = machine.clock - (lease if run.until is None else min(lease, run.until))
        if late > self.bounds.kill:
            raise self.broken(f"workers on {machine.name} outlived their lease by {late:.2f} s")

    # --- frozen hosts

    def frozen(self, machine: Machine) -> None:
        """Freeze a whole host: none of its processes runs."""
        if run := self._remove(machine):
            self._frozen[machine] = run

    def thawed(self, machine: Machine) -> None:
        """Thaw a host; its workers continue if their lease is not over."""
        if run := self._frozen.pop(machine, None):
            self._run(machine, run)

    # --- living agents that count as dead

    def taken_for_dead(self, machine: Machine, id: str, round: int, since: float) -> None:
        """Note that the seat of a living agent is given away.

        Args:
            machine: the machine of the agent.
            id: its node.
            round: the round in which it has the seat.
            since: when its connection was closed, by the clock of the machine.
        """
        self.note(f"{id} lives, and is taken for dead")
        self.mistaken += 1
        self._given_away[id, round] = since + self.bounds.lease
        self._bound(machine, id, round)

    def gave_up(self, machine: Machine, id: str, round: int) -> None:
        """Note that an agent ends a round for itself alone: it lost its seat or keep-alive."""
        if (id, round) in self._given_away:
            self._given_away[id, round] = min(machine.clock, self._given_away[id, round])
            self._bound(machine, id, round)

    def _bound(self, machine: Machine, id: str, round: int) -> None:
        until = self._given_away[id, round]
        if run := self._frozen.get(machine):
            self._frozen[machine] = run._replace(until=until)
        elif run := self._remove(machine):
            self.running[machine] = run._replace(until=until)
