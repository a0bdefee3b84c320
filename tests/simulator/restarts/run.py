"""Simulated ranks with in-process restart under faults, and the promises that are checked.

The service is the real one, and so is every byte that it receives. Time, the network and the
processes are simulated. A rank goes through the flow of a wrapper: its main thread and its thread
that follows the group send the requests of a `Link`. At each step a seed may let the rank raise,
leave, die, hang, stop for a while, or lose its connection. A connection is lost in one of three
ways: so briefly that its session continues, so long that its session ends, or with its whole host.

These promises are checked here (`Violation`):

- Every process comes to an end: the call is over for it, or it left, or it was killed.
- The function runs on all ranks of a world or on none, and all ranks agree about the world.
- A fault that a rank reported is recorded once, even if the reply was lost and the report came
  again. So is a soft time-out that its watcher has detected as well.
- A rank that ended has ended once, for one reason. No rank is counted out without a reason.
- All ranks that are notified of an iteration's end receive the same root cause. All ranks that meet
  receive the same records.
- The call is over for all living ranks or for none.
- If a rank dies and its launcher reads that the others continue, the call is not over with this
  rank. If a rank leaves and receives that the others continue, it counts as left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Faults, Met, Timeouts
from simulator.kernel import Simulation
from simulator.restarts.bugs import NO_BUG, Bug
from simulator.restarts.rank import Rank
from simulator.restarts.server import Client, Server, Violation

END = 3000.0
"""Virtual seconds after which a rank that still waits counts as hung."""
ENDS = ("TERMINATED", "UNRESPONSIVE", "HARD_TIMEOUT", "BASE_EXCEPTION")
"""Kinds of faults that end a rank here."""


class Profile(NamedTuple):
    """The kind of job that a seed simulates."""

    size: int
    delay: float
    """Most seconds that a message takes."""
    mishap: float
    """The chance of a mishap at each step."""
    watched: bool
    """Whether an agent reports the end of a process before its connection ends."""
    gaps: bool
    """Whether the last ranks replace lost ranks; otherwise the remaining ranks close the gaps."""
    least: int
    """Worlds of an odd size above this discard their last rank."""
    calm_after: int
    """The iteration from which on there are no mishaps."""
    late: bool
    """Whether ranks may end before they join; then none of the others can begin."""
    reserve: int
    """Number of the last ranks that are in reserve."""


class Outcome(NamedTuple):
    """The result of one seed."""

    seed: int
    size: int
    events: int
    seconds: float
    """Seconds of virtual time."""
    iterations: int
    faults: int
    """Faults recorded in all iterations."""
    lost: int
    """Ranks that ended before the call was over."""
    repeated: int
    """Requests that were repeated after a reconnect."""
    completed: int
    """Ranks for which the call came to its end."""
    violation: str


class Job:
    """All ranks of a group, and the observer of their actions."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None, bug: Bug) -> None:
        self.sim = Simulation(seed)
        self.seed = seed
        self.profile = profile_of(self.sim)
        self.server = Server(self.sim, bug)
        completion = self.sim.random.choice([90.0, 90.0, 1.5])
        self.timeouts = Timeouts(barrier=120.0, completion=completion, last_call=1.0)
        self._trace = trace
        self.asked_to_enter: dict[int, dict[int, tuple[int, ...]]] = {}
        """By iteration and rank: the world with which the rank entered."""
        self.running: dict[int, set[int]] = {}
        """By iteration: the ranks that began to run it."""
        self.roots: dict[int, tuple[Any, ...]] = {}
        self.met: dict[int, Met] = {}
        self.over: dict[int, int] = {}
        """Ranks for which the call is over, and the iteration in which it was."""
        self.doomed: set[int] = set()
        """Ranks with a mishap that may count them out."""
        self.ranks = [Rank(self, rank) for rank in range(self.profile.size)]
        self.watcher = Client(self.server, self.profile.delay)

    def note(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.sim.now:10.4f} {text}")

    def report_dead(self, rank: int, kind: str) -> None:
        question = messages.ReportDead(
            "job", rank, f"process-{rank}", kind, f"seen: {kind} of {rank}"
        )
        self.watcher.ask(messages.encode(question), lambda body: None)

    def overdue(self, rank: int, iteration: int) -> None:
        me, number = ("job", rank, f"process-{rank}"), messages.OVERDUE
        question = messages.Report(*me, iteration, number, "SOFT_TIMEOUT", "seen from outside")

        def on_reply(body: bytes) -> None:
            answer = messages.decode_reply(body)
            if (
                not isinstance(answer, messages.Noted)
                and getattr(answer, "reason", "") != "unknown"
            ):
                raise Violation(f"the monitor of rank {rank} received {answer}")

        self.watcher.ask(messages.encode(question), on_reply)

    @property
    def a_rank_never_joined(self) -> bool:
        """Whether a rank ended before the server received its join."""
        joined = self.server.joined
        return any(not rank.program.alive and not joined >> rank.rank & 1 for rank in self.ranks)

    # ------------------------------------------------------------ notifications to ranks

    def interrupted(self, faults: Faults) -> None:
        """Check the end of an iteration, as a rank received it."""
        root = faults.records[0]
        if self.roots.setdefault(faults.iteration, root) != root:
            raise Violation(f"two root causes of iteration {faults.iteration}")

    def gathered(self, met: Met) -> None:
        self.interrupted(met.faults)
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
        """Check that all ranks have entered; called when a rank is notified that they have."""
        entered = self.asked_to_enter[iteration]
        world = entered[rank]
        if any(other != world for other in entered.values()):
            raise Violation(f"iteration {iteration} runs with different worlds: {entered}")
        if not set(world) <= set(entered):
            raise Violation(f"iteration {iteration} runs without {set(world) - set(entered)}")
        self.running.setdefault(iteration, set()).add(rank)

    # ------------------------------------------------------------------------ the end

    def check(self) -> None:
        """Check how each rank ended."""
        for rank in self.ranks:
            if rank.program.alive and not rank.ended:
                raise Violation(f"rank {rank.rank} never ends: {rank.doing}")
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
            raise Violation(f"the call is over for {over}, and for no other rank")
        lost = [rank.rank for rank in self.ranks if rank.lost and rank.rank not in ended]
        if self.server.over is not None and lost:
            raise Violation(f"the call was over with {lost}, which died with their results")
        texts = [fault.message for fault in of_all if fault.message.startswith("own")]
        if len(set(texts)) < len(texts):
            raise Violation(f"recorded more than once: {Counter(texts).most_common(1)}")
        for iteration, records in self.server.records.items():
            overdue = Counter(fault.rank for fault in records if fault.kind == "SOFT_TIMEOUT")
            if max(overdue.values(), default=0) > 1:
                raise Violation(f"overdue more than once in iteration {iteration}: {records}")
        self.faults = len(of_all)

    faults = 0
    """Number of recorded faults; set by `check`."""


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


def simulate(seed: int, trace: Callable[[str], None] | None = None, bug: Bug = NO_BUG) -> Outcome:
    """Run one seed to its end."""
    job = Job(seed, trace, bug)
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
