"""The directory of a job with a witness: it answers late, fails, and hangs for one host or for all.

A change takes effect at some moment between call and return. It may take effect long after the
call, as that of a client that repeats its request until the file server answers. It may also take
effect although the call has failed, or after the death of the caller. A read may return an older
version, as a cache does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

from regrow.rendezvous.protocol.witness import Ballot
from simulator.agent import Agent
from simulator.host import Job
from simulator.kernel import Resume

T = TypeVar("T")

TRIES_S = 4.0
"""Seconds after which a call fails in a directory that does not hang for ever."""


class SimDirectory:
    """The ballots of a job, by id of the witness, as all hosts see them."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.versions: dict[str, list[Ballot]] = {}
        self._hangs_until: dict[str, float] = {}
        """By host: the virtual time until which its calls take no effect; "": of all hosts."""
        self._fails = False

    def ballot(self, agent: Agent, id: str) -> SimBallot:
        """Return a ballot as an agent sees it."""
        return SimBallot(self, agent, id)

    def begin_faults(self, seed: int, until: float, trouble: Callable[[float], None]) -> None:
        """Let the directory hang or fail at times.

        Args:
            seed: decides when.
            until: the virtual time of the last fault.
            trouble: notes that faults may have effects for some seconds.
        """
        random = Random(seed)

        def fault() -> None:
            if self.sim.now < until:
                host = random.choice(["", *(host.name for host in self.job.hosts)])
                span = random.choice([0.5, 2.0, 8.0]) * random.uniform(0.7, 1.3)
                self._fails = random.random() < 0.3
                self._hangs_until[host] = self.sim.now + span
                self.job.history.note(f"the directory hangs for {host or 'all'} ({span:.1f} s)")
                trouble(span + 8.0)
                self.sim.after(random.expovariate(1 / 12), fault)

        self.sim.after(random.uniform(4, 20), fault)

    def call(self, agent: Agent, do: Callable[[], T]) -> T:
        """Let a call of an agent take effect, and return its result."""
        sim, random = self.sim, self.sim.random
        over: list[OSError | None] = []  # the failure of the call, or None when it took effect

        def waits(resume: Resume) -> None:
            def arrive() -> None:
                until = max(self._hangs_until.get(at, 0.0) for at in ("", agent.host.name))
                if sim.now < until:
                    sim.after(until - sim.now + random.uniform(0, 0.2), arrive)
                elif not over:
                    over.append(None)
                    result = do()
                    sim.after(self.job.delay(), lambda: resume((result,)))
                elif random.random() < 0.5:
                    do()

            def give_up() -> None:
                until = max(self._hangs_until.get(at, 0.0) for at in ("", agent.host.name))
                if self._fails and sim.now < until and not over:
                    over.append(OSError("the file server does not answer"))
                    resume(over[0])

            sim.after(self.job.delay(), arrive)
            if self._fails:
                sim.after(TRIES_S * random.random(), give_up)

        (result,) = agent.wait(waits)
        return result  # type: ignore[no-any-return]


class SimBallot:
    """One agent's access to a ballot; a `BallotCell`."""

    def __init__(self, directory: SimDirectory, agent: Agent, id: str) -> None:
        self._directory, self._agent, self._id = directory, agent, id
        self.sim = directory.sim

    def call(self, do: Callable[[], T]) -> T:
        """See `SimDirectory.call`."""
        return self._directory.call(self._agent, do)

    def versions(self, *, create: bool = False) -> list[Ballot]:
        """Return the versions; the list is of no effect if there is no such ballot."""
        if create:
            return self._directory.versions.setdefault(self._id, [])
        return self._directory.versions.get(self._id, [])

    def read(self) -> tuple[int, Ballot | None]:
        """See `BallotCell.read`."""

        def do() -> tuple[int, Ballot | None]:
            versions = self.versions()
            if not versions:
                return 0, None
            stale = len(versions) > 1 and self.sim.random.random() < 0.05
            version = len(versions) - stale
            return version, versions[version - 1]

        return self.call(do)

    def replace(self, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        """See `BallotCell.replace`."""

        def do() -> bool:
            versions = self.versions(create=create)
            if len(versions) != version or not (version or create):
                return False
            versions.append(ballot)
            return True

        return self.call(do)

    def check(self) -> None:
        """See `BallotCell.check`."""
        self.call(lambda: None)

    def remove(self) -> None:
        """See `BallotCell.remove`."""
        with suppress(OSError):
            self.call(lambda: self._directory.versions.pop(self._id, None))
