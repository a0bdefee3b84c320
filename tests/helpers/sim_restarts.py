"""Simulated ranks that restart in place under faults, and what must hold of them.

The service is the real one, and so is every byte that it is sent; time, the network and the
processes are simulated. A rank goes through the flow of a wrapper: its main thread and the one that
follows ask the questions of a `Link`. At each step a seed may have it raise, leave, die, hang, be
stopped for a while, or lose its connection: for so short a time that its session goes on, for so
long that it is over, or with its whole host.

What is promised, and checked here (`Violation`):

- Every process comes to an end: the call is over for it, it left, or it was killed.
- The function runs on all ranks of a world or on none; all agree about the world.
- What a rank reported is recorded once, also if the answer was lost and the question came again;
  so is a soft time-out that its watcher has seen as well.
- A rank that ended has ended once, for one reason; none is counted out without one.
- All that are told of an iteration's end are told the same root cause, and all that meet the same
  records.
- The call is over for all living ranks or for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from sim_kernel import Simulation
from sim_restart_rank import Rank
from sim_restart_server import Client, Server, Violation

from regrow.inprocess import _messages as messages
from regrow.inprocess._link import Faults, Met, Timeouts

END = 3000.0
"""Virtual seconds after which whoever still waits, waits for ever."""
ENDS = ("TERMINATED", "UNRESPONSIVE", "HARD_TIMEOUT", "BASE_EXCEPTION")
"""Kinds of faults that end a rank here."""


class Profile(NamedTuple):
    """What kind of job a seed is."""

    size: int
    delay: float
    """Seconds that a message takes, at most."""
    mishap: float
    """The chance of a mishap at each step."""
    watched: bool
    """Whether an agent tells of a process that ended before its connection does."""
    gaps: bool
    """Whether lost ranks are replaced by the last ones; else the others close up."""
    least: int
    """Worlds of an odd size above this discard their last rank."""
    calm_after: int
    """Iterations after which nothing happens any more."""
    late: bool
    """Whether ranks may end before they join; then none of the others can begin."""
    reserve: int
    """How many of the last ranks are in reserve."""


class Outcome(NamedTuple):
    """What came of a seed."""

    seed: int
    size: int
    events: int
    seconds: float
    """Of virtual time."""
    iterations: int
    faults: int
    """Recorded in all iterations."""
    lost: int
    """Ranks that ended before the call was over."""
    repeated: int
    """Questions that were put again after a reconnect."""
    completed: int
    """Ranks for which the call came to its end."""
    violation: str


class Job:
    """All ranks of a group, and what is seen of them from outside."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.sim = Simulation(seed)
        self.seed = seed
        self.profile = profile_of(self.sim)
        self.server = Server(self.sim)
        completion = self.sim.random.choice([90.0, 90.0, 1.5])
        self.timeouts = Timeouts(barrier=120.0, completion=completion, last_call=1.0)
        self._trace = trace
        self.asked_to_enter: dict[int, dict[int, tuple[int, ...]]] = {}
        """By iteration and rank: the world that it entered with."""
        self.running: dict[int, set[int]] = {}
        """Who began to run an iteration."""
        self.roots: dict[int, tuple[Any, ...]] = {}
        self.met: dict[int, Met] = {}
        self.over: dict[int, int] = {}
        """Ranks for which the call is over, and in which iteration."""
        self.doomed: set[int] = set()
        """Ranks that something happened to which may have them counted out."""
        self.ranks = [Rank(self, rank) for rank in range(self.profile.size)]
        self.watcher = Client(self.server, self.profile.delay)

    def note(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.sim.now:10.4f} {text}")

    def accuse(self, rank: int, kind: str) -> None:
        question = messages.Accuse("job", rank, "", kind, f"seen: {kind} of {rank}")
        self.watcher.ask(messages.encode(question), lambda body: None)

    def overdue(self, rank: int, iteration: int) -> None:
        question = messages.overdue("job", rank, f"process-{rank}", iteration, "seen from outside")

        def told(body: bytes) -> None:
            answer = messages.decode_answer(body)
            if not isinstance(answer, messages.Noted | messages.Unknown):
                raise Violation(f"the watcher of rank {rank} was told {answer}")

        self.watcher.ask(messages.encode(question), told)

    @property
    def somebody_never_joined(self) -> bool:
        """Whether a rank ended before the server heard of it."""
        joined = self.server.joined
        return any(not rank.program.alive and not joined >> rank.rank & 1 for rank in self.ranks)

    # ------------------------------------------------------------------- what ranks see

    def told(self, faults: Faults) -> None:
        """Somebody was told how an iteration ended."""
        root = faults.records[0]
        if self.roots.setdefault(faults.iteration, root) != root:
            raise Violation(f"two root causes of iteration {faults.iteration}")

    def gathered(self, met: Met) -> None:
        self.told(met.faults)
        still = met._replace(faults=met.faults._replace(now=0.0))
        first = self.met.setdefault(met.iteration, still)
        same = first._replace(faults=still.faults) == still
        begins = min(len(first.faults.records), len(still.faults.records))
        if not same or first.faults.records[:begins] != still.faults.records[:begins]:
            raise Violation(f"ranks met differently: {first} and {still}")
        if len(still.faults.records) > begins or self.met[met.iteration] is still:
            self.met[met.iteration] = still
        if any(iteration < met.iteration for iteration in self.over.values()):
            raise Violation(f"iteration {met.iteration} follows the end of the call")

    def goes(self, rank: int, iteration: int) -> None:
        """A rank was told that all have entered."""
        entered = self.asked_to_enter[iteration]
        world = entered[rank]
        if any(other != world for other in entered.values()):
            raise Violation(f"iteration {iteration} runs with different worlds: {entered}")
        if not set(world) <= set(entered):
            raise Violation(f"iteration {iteration} runs without {set(world) - set(entered)}")
        self.running.setdefault(iteration, set()).add(rank)

    # ------------------------------------------------------------------------ the end

    def check(self) -> None:
        """Look at what has become of everybody."""
        for rank in self.ranks:
            if rank.program.alive and not rank.ended:
                raise Violation(f"rank {rank.rank} waits for ever: {rank.doing}")
        of_all = [fault for records in self.server.records.values() for fault in records]
        for rank in self.ranks:
            own = [fault for fault in of_all if fault.rank == rank.rank]
            raised = sum(fault.kind == "EXCEPTION" for fault in own)
            if not rank.answered <= raised <= rank.reports:
                raise Violation(
                    f"rank {rank.rank} reported {rank.reports} faults, {rank.answered} of which "
                    f"were answered, and {raised} were recorded"
                )
            if sum(fault.kind in ENDS for fault in own) > 1:
                raise Violation(f"rank {rank.rank} ended more than once: {own}")
            left = any(end.own for end in self.server.ends if end.fault.rank == rank.rank)
            if rank.ended == "discarded" and left and any(fault.kind in ENDS for fault in own):
                raise Violation(f"rank {rank.rank} was discarded, and is a fault: {own}")
        ended = Counter(end.fault.rank for end in self.server.ends)
        over = [rank.rank for rank in self.ranks if rank.ended == "over"]
        if max(ended.values(), default=0) > 1 or set(ended) & set(over):
            raise Violation(f"ranks ended more than once, or after the end: {self.server.ends}")
        if over and self.server.over is None:
            raise Violation(f"the call is over for {over}, and for nobody else")
        texts = [fault.message for fault in of_all if fault.message.startswith("own")]
        if len(set(texts)) < len(texts):
            raise Violation(f"recorded more than once: {Counter(texts).most_common(1)}")
        for iteration, records in self.server.records.items():
            overdue = Counter(fault.rank for fault in records if fault.kind == "SOFT_TIMEOUT")
            if max(overdue.values(), default=0) > 1:
                raise Violation(f"overdue more than once in iteration {iteration}: {records}")
        self.faults = len(of_all)

    faults = 0
    """How many were recorded."""


def profile_of(sim: Simulation) -> Profile:
    """Draw the kind of job."""
    chance = sim.random
    size = chance.choice([1, 2, 3, 4, 4, 6, 8, 8, 12, 16, 24, 64])
    return Profile(
        size=size,
        delay=chance.choice([0.0005, 0.005, 0.05]),
        mishap=chance.choice([0.02, 0.05, 0.15]) * min(1.0, 8 / size),
        watched=chance.random() < 0.5,
        gaps=chance.random() < 0.4,
        least=chance.choice([size, size, 2]),
        calm_after=chance.choice([3, 6, 12]),
        late=chance.random() < 0.05,
        reserve=chance.choice([0, 0, 1, 2]) if size > 3 else 0,
    )


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed to its end."""
    job = Job(seed, trace)
    violation = ""
    try:
        for rank in job.ranks:
            rank.program.spawn(rank.main())
        job.sim.run(END)
        job.check()
    except Violation as broken:
        violation = str(broken)
    return Outcome(
        seed,
        job.profile.size,
        job.sim.done,
        job.sim.now,
        max([0, *job.running]) + 1,
        job.faults,
        sum(rank.ended != "over" for rank in job.ranks),
        sum(rank.client.repeated for rank in job.ranks),
        len(job.over),
        violation,
    )
