"""Simulated ranks with in-process restart under faults, and the promises that are checked.

The service is the real one, and so is every byte that it receives. Time, the network and the
processes are simulated. A rank goes through the flow of a wrapper: its main thread and its thread
that follows the group send the requests of a `Link`. At each step a seed may let the rank raise,
leave, die, hang, stop for a while, or lose its connection. A connection is lost in one of three
ways: so briefly that its session continues, so long that its session ends, or with its whole host.

The odd seeds are jobs of `Wrapper(replace=True)`. When a process has died, or left and asked for
another one, an agent starts another process of its rank: from a standby at once, from a template
soon, or cold after a while. The standby or the template may be killed at that moment. Or the agent
reports that none follows, or it does nothing. A process may also be stopped and taken for dead; it
goes on after its replacement has joined. A replacement may die at any step, all processes may die
at once, and the next process then begins another group of the same name.

These promises are checked here (`Violation`):

- Every process comes to an end: the call is over for it, or it left, or it was killed.
- The function runs on all ranks of a world or on none, and all ranks agree about the world.
- A fault that a rank reported is recorded once, even if the reply was lost and the report came
  again. So is a soft time-out that its watcher has detected as well.
- A rank that ended has ended once, for one reason. No rank is evicted without a reason.
- All ranks that are notified of an iteration's end receive the same root cause. All ranks that meet
  receive the same records.
- The call is over for all living ranks or for none.
- If a rank dies and its launcher reads that the others continue, the call is not over with this
  rank. If a rank leaves and receives that the others continue, it counts as left.

The `Observer` checks these about replacements:

- No rank has two admitted processes. A process that joins gets the answer for its own rank.
- A rank that was lost and replaced in time keeps its place. No two ranks have one place, and the
  ranks of a meeting fill all places but those of `Met.terminated`.
- Ranks that are ready wait for the replacement of a rank that was lost in this iteration, for at
  most `Timeouts.replacement` after the last loss. They do not wait for a rank of which an agent has
  reported that no process replaces it, even if the report came before that of the loss. They do
  not wait for more ranks than those in reserve, and those that wait to join, can replace.
- No message of a process that was replaced changes the group. The process is refused.
- A replacement that joins when the call is over receives that. If no rank is left, it begins
  another group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Faults, Met, Timeouts
from simulator.kernel import Simulation
from simulator.restarts.agent import Agent
from simulator.restarts.bugs import NO_BUG, Bug
from simulator.restarts.observer import Observer, Violation, incarnation_of
from simulator.restarts.rank import Rank
from simulator.restarts.server import Client, Server

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
    replacement: float
    """Seconds that ranks wait for another process of an ended rank; 0.0: there is none."""


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
    """Processes that ended before the call was over."""
    replaced: int
    """Processes that a group admitted in the place of ended ones."""
    repeated: int
    """Requests that were repeated after a reconnect."""
    completed: int
    """Ranks for which the call came to its end."""
    violation: str


Iteration = tuple[int, int]
"""The number of a group, and of one of its iterations."""


class _Entered(NamedTuple):
    """How a process asked to enter an iteration."""

    process: str
    place: int
    size: int


class Job:
    """All ranks of a group, and the observer of their actions."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None, bug: Bug) -> None:
        self.sim = Simulation(seed)
        self.seed = seed
        self.profile = profile_of(self.sim, replacing=seed % 2 == 1)
        self.observer = Observer()
        self.server = Server(self.sim, bug, self.observer)
        completion = self.sim.random.choice([90.0, 90.0, 1.5])
        self.timeouts = Timeouts(
            barrier=120.0,
            completion=completion,
            last_call=1.0,
            replacement=self.profile.replacement,
        )
        self._trace = trace
        self._entered: dict[Iteration, dict[int, _Entered]] = {}
        """By iteration and rank: the process that asked to enter, and its place."""
        self._running: dict[Iteration, dict[int, str]] = {}
        """By iteration and rank: the process that began to run it."""
        self._roots: dict[Iteration, tuple[Any, ...]] = {}
        self._met: dict[Iteration, Met] = {}
        self.over: dict[str, Iteration] = {}
        """Processes for which the call is over, and the iteration in which it was."""
        self.ranks = [Rank(self, rank) for rank in range(self.profile.size)]
        """All processes of all ranks."""
        self.watcher = Client(self.server, self.profile.delay)
        self.agent = Agent(self)

    def note(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.sim.now:10.4f} {text}")

    def add(self, process: Rank) -> None:
        """Add a process that takes the place of one that ended."""
        self.ranks.append(process)

    def living(self, but: Rank) -> list[Rank]:
        """Return all processes that run, except one, in random order."""
        living = [each for each in self.ranks if each.runs and each is not but]
        self.sim.random.shuffle(living)
        return living

    def report_dead(self, rank: Rank, kind: str) -> None:
        question = messages.ReportDead(*rank.me, kind, f"seen: {kind} of {rank.process}")
        self.watcher.ask(messages.encode(question), lambda body: None)

    def overdue(self, rank: Rank, iteration: int) -> None:
        number = messages.OVERDUE
        question = messages.Report(*rank.me, iteration, number, "SOFT_TIMEOUT", "seen from outside")

        def on_reply(body: bytes) -> None:
            answer = messages.decode_reply(body)
            if (
                not isinstance(answer, messages.Noted)
                and getattr(answer, "reason", "") != "unknown"
            ):
                raise Violation(f"the monitor of {rank.process} received {answer}")

        self.watcher.ask(messages.encode(question), on_reply)

    def may_fail(self, group: int, process: str) -> bool:
        """Return whether a process may receive that its group failed.

        Either a rank never joined, or only processes that waited to join were left.
        """
        observer = self.observer
        if group != observer.group or process in observer.left_alone:
            return True
        latest = {rank.rank: rank for rank in self.ranks}
        joined = observer.joined
        return any(not each.runs and not joined >> rank & 1 for rank, each in latest.items())

    # ------------------------------------------------------------ notifications to ranks

    def interrupted(self, group: int, faults: Faults) -> None:
        """Check the end of an iteration, as a rank received it."""
        root = faults.records[0]
        if self._roots.setdefault((group, faults.iteration), root) != root:
            raise Violation(f"two root causes of iteration {faults.iteration}")

    def gathered(self, group: int, met: Met) -> None:
        self.interrupted(group, met.faults)
        still = met._replace(faults=met.faults._replace(now=0.0))
        first = self._met.setdefault((group, met.iteration), still)
        same = first._replace(faults=still.faults) == still
        begins = min(len(first.faults.records), len(still.faults.records))
        if not same or first.faults.records[:begins] != still.faults.records[:begins]:
            raise Violation(f"ranks met differently: {first} and {still}")
        if len(still.faults.records) > begins:
            self._met[group, met.iteration] = still
        if any(group == of and iteration < met.iteration for of, iteration in self.over.values()):
            raise Violation(f"iteration {met.iteration} follows the end of the call")

    def enters(self, rank: Rank, place: int) -> None:
        """Note that a rank asks to enter with a place."""
        entered = self._entered.setdefault((rank.group, rank.iteration), {})
        asks = _Entered(rank.process, place, rank.size)
        if entered.setdefault(rank.rank, asks) != asks:
            raise Violation(f"rank {rank.rank} enters twice: {entered[rank.rank]} and {asks}")

    def goes(self, rank: Rank) -> None:
        """Check that all ranks have entered; called when a rank is notified that they have."""
        iteration = rank.group, rank.iteration
        entered = self._entered[iteration]
        places = [each.place for each in entered.values()]
        if {each.size for each in entered.values()} != {rank.size}:
            raise Violation(f"iteration {iteration} runs with different worlds: {entered}")
        if len(set(places)) < len(places):
            raise Violation(f"iteration {iteration} runs with one place twice: {entered}")
        if len(places) < rank.size:
            raise Violation(f"iteration {iteration} runs without all of its ranks: {entered}")
        running = self._running.setdefault(iteration, {})
        if running.setdefault(rank.rank, rank.process) != rank.process:
            raise Violation(f"rank {rank.rank} runs twice in iteration {iteration}: {running}")

    # ------------------------------------------------------------------------ the end

    def check(self) -> None:
        """Check how each rank ended."""
        for rank in self.ranks:
            if rank.runs:
                raise Violation(f"{rank.process} never ends: {rank.doing}")
        of_all = [fault for records in self.server.records.values() for fault in records]
        ended = self.observer.ended
        for number in range(self.profile.size):
            own = [fault for fault in of_all if fault.rank == number]
            processes = [rank for rank in self.ranks if rank.rank == number]
            reports = sum(rank.reports for rank in processes)
            answered = sum(rank.answered for rank in processes)
            raised = sum(fault.kind == "EXCEPTION" for fault in own)
            if not answered <= raised <= reports:
                raise Violation(
                    f"rank {number} reported {reports} faults, {answered} of which were answered, "
                    f"and {raised} were recorded"
                )
            ends = [end for rank in processes for end in ended.get(rank.process, [])]
            if sum(fault.kind in ENDS for fault in own) > len(ends):
                raise Violation(f"rank {number} ended more than once: {own}")
        for rank in self.ranks:
            of_rank = ended.get(rank.process, [])
            if rank.ended == "discarded" and any(e.own and e.fault in of_all for e in of_rank):
                raise Violation(f"{rank.process} was discarded, and is a fault: {of_rank}")
            if rank.ended == "over" and (of_rank or rank.group not in self.observer.over):
                raise Violation(f"the call is over for {rank.process}, and for no other: {of_rank}")
            group = self.observer.admitted.get(rank.process)
            if rank.lost and not of_rank and group in self.observer.over:
                raise Violation(f"the call was over with {rank.process}, which died with a result")
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


def profile_of(sim: Simulation, *, replacing: bool) -> Profile:
    """Draw the kind of job; `replacing`: whether other processes take the place of ended ones."""
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
        replacement=chance.choice([3.0, 10.0, 30.0]) if replacing else 0.0,
    )


def simulate(seed: int, trace: Callable[[str], None] | None = None, bug: Bug = NO_BUG) -> Outcome:
    """Run one seed to its end."""
    job = Job(seed, trace, bug)
    violation = ""
    try:
        for rank in list(job.ranks):
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
        len(job.server.records),
        job.faults,
        sum(rank.ended != "over" for rank in job.ranks),
        sum(incarnation_of(process) > 0 for process in job.observer.admitted),
        sum(rank.client.repeated for rank in job.ranks),
        len(job.over),
        violation,
    )
