"""Simulated ranks that restart in place under faults, and what must hold of them.

The service is the real one, and so is every byte that it is sent; time, the network and the
processes are simulated. A rank goes through the flow of a wrapper: its main thread and the one that
follows ask the questions of a `Link`. At each step a seed may have it raise, leave, die, hang, be
stopped for a while, or lose its connection: for so short a time that its session goes on, for so
long that it is over, or with its whole host.

What is promised, and checked here (`Violation`):

- Every process comes to an end: the call is over for it, it left, or it was killed.
- The function runs on all ranks of a world or on none; all agree about the world.
- What a rank reported is recorded once, also if the answer was lost and the question came again.
- A rank that ended has ended once, for one reason; none is counted out without one.
- All that are told of an iteration's end are told the same root cause, and all that meet the same
  records.
- The call is over for all living ranks or for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from sim_kernel import Machine, Program, Simulation, Thread

from regrow.inprocess import _messages as messages
from regrow.inprocess._group import End, Group, Phase
from regrow.inprocess._link import Fault, Faults, Met, Timeouts
from regrow.inprocess._service import InprocessService
from regrow.store import Answer

GRACE = 0.5
"""Seconds of a session without a connection."""
SILENCE = 11.0
"""Seconds until a silent host is noticed."""
HANGS = 20.0
"""Seconds after which a watcher ends a rank that hangs."""
END = 3000.0
"""Virtual seconds after which whoever still waits, waits for ever."""


ENDS = ("TERMINATED", "UNRESPONSIVE", "HARD_TIMEOUT", "BASE_EXCEPTION")
"""Kinds of faults that end a rank here."""


class Violation(Exception):
    """A promise was broken."""


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


class Server:
    """The service, with its clock."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.service = InprocessService()
        self.clients: dict[Hashable, Client] = {}
        self.records: dict[int, tuple[Fault, ...]] = {}
        """Everything that was recorded, by iteration."""
        self.joined = 0
        """The ranks that have joined, while others had not."""
        self.ends: tuple[End, ...] = ()
        """How ranks ended."""
        self.over: int | None = None
        """In which iteration the call was over, if it was."""
        self._alarm: float | None = None

    def tell(self, call: Callable[[], list[Answer]]) -> None:
        """Have something told to the service, and its answers sent."""
        self.send(call())

    def send(self, answers: list[Answer]) -> None:
        entry = self.service._groups.get("job")
        if entry is not None:
            self._look(entry.state)
        for answer in answers:
            client = self.clients.get(answer.session)
            if client is not None and client.session is answer.session:
                client.answered(answer)
        at = self.service.deadline
        if at is not None and at != self._alarm:
            self._alarm = at
            self.sim.after(max(at - self.sim.now, 0.0), lambda: self._due(at))

    def _look(self, group: Group) -> None:
        if group.phase is Phase.JOINING:
            self.joined = group.here
        self.records[group.iteration] = group.faults
        if group.before is not None:
            self.records[group.iteration - 1] = group.before.faults.records
        self.ends = group.ends
        if group.phase is Phase.OVER:
            self.over = group.iteration

    def _due(self, at: float) -> None:
        if self._alarm == at:
            self._alarm = None
        if self.service.deadline is not None and self.service.deadline <= self.sim.now:
            self.send(self.service.due(self.sim.now))
        else:
            self.send([])


class Client:
    """A session of one process, and its connection."""

    def __init__(self, server: Server, delay: float) -> None:
        self.server, self.sim, self.delay = server, server.sim, delay
        self.repeated = 0
        """Questions that were put again."""
        self.unheard = False
        """Whether it began another session and had no question to put over it, so that the server
        cannot know whose it is."""
        self.alive = True
        """Whether the process is."""
        self._asked: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}
        self._number = 0
        self._cable = 0
        """Which connection it is; what is under way on another is lost."""
        self._connected = True
        self._waits_for: dict[object, int] = {}
        """Suspended sessions, and by the loss of which connection."""
        self._last = {"up": 0.0, "down": 0.0}
        self._begin()

    def _begin(self) -> None:
        self.session = object()
        self.server.clients[self.session] = self

    def ask(self, body: bytes, told: Callable[[bytes], None]) -> None:
        self._number += 1
        self._asked[self._number] = body, told
        if self._connected:
            self._send(self._number, body)

    def _send(self, number: int, body: bytes) -> None:
        session, service = self.session, self.server.service

        def arrive() -> None:
            self.server.tell(lambda: service.asked(session, number, body, self.sim.now))

        self._travel("up", arrive)

    def answered(self, answer: Answer) -> None:
        def arrive() -> None:
            asked = self._asked.pop(answer.id, None)
            if asked is not None and self.alive:
                asked[1](answer.body)

        self._travel("down", arrive)

    def _travel(self, way: str, arrive: Callable[[], None]) -> None:
        cable = self._cable
        at = max(self._last[way], self.sim.now + self.sim.random.uniform(0.1, 1.0) * self.delay)
        self._last[way] = at

        def come() -> None:
            if cable == self._cable:
                arrive()

        self.sim.after(at - self.sim.now, come)

    def cut(
        self, noticed: float, back: float | None, closed: bool = False, fresh: bool = False
    ) -> None:
        """Lose the connection.

        Args:
            noticed: seconds after which the server does.
            back: seconds after which the client reaches the server again, if ever.
            closed: the client's side has closed it.
            fresh: the client has given the session up when it comes back, and begins another.
        """
        if not self._connected:
            return
        self._connected = False
        self._cable += 1
        session, cable = self.session, self._cable

        def suspended() -> None:
            if session in self.server.clients:
                self._waits_for[session] = cable
                service = self.server.service
                self.server.tell(lambda: service.suspended(session, self.sim.now))
                self.sim.after(GRACE, lambda: self._over(session, closed, cable))

        self.sim.after(noticed, suspended)
        if back is not None:
            back = back if fresh else max(back, noticed + 1e-6)
            self.sim.after(back, lambda: self._back(fresh))

    def _over(self, session: object, closed: bool, cable: int) -> None:
        if self._waits_for.get(session) != cable or session not in self.server.clients:
            return
        del self.server.clients[session]
        service, why = self.server.service, "its connection broke"
        self.server.tell(lambda: service.ended(session, why, closed, self.sim.now))

    def _back(self, fresh: bool) -> None:
        if not self.alive:
            return
        self._connected = True
        if self.session in self.server.clients and not fresh:
            self._waits_for.pop(self.session, None)
            service = self.server.service
            self.server.tell(lambda: service.resumed(self.session, self.sim.now))
        else:
            self._begin()
            self.unheard = self.unheard or not self._asked
        for number, (body, _) in self._asked.items():
            self.repeated += 1
            self._send(number, body)

    def close(self) -> None:
        """Say goodbye."""
        session = self.session

        def bye() -> None:
            if self.server.clients.pop(session, None) is not None:
                service, why = self.server.service, "it closed its connection"
                self.server.tell(lambda: service.ended(session, why, True, self.sim.now))

        if self._connected:
            self._travel("up", bye)
        self.alive = False


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
        self.faults = len(of_all)

    faults = 0
    """How many were recorded."""


class Rank:
    """One process: a wrapper's flow, whose function does nothing but take time."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.sim = job, rank, job.sim
        self.me = "job", rank, f"process-{rank}"
        self.program = Program(Machine(job.sim, f"rank {rank}"))
        self.client = Client(job.server, job.profile.delay)
        self.world = tuple(range(job.profile.size))
        self.doing = "nothing yet"
        self.ended = ""
        """How its flow came to an end."""
        self.reports = self.answered = 0
        """How many faults of its own it reported, and knows to be recorded."""
        self._interrupted: dict[int, bool] = {}
        self.iteration = 0

    # ------------------------------------------------------------------------ questions

    def ask(self, question: messages.Asked, why: str = "") -> Thread:
        """Put a question and wait for the answer."""
        self.doing = f"{type(question).__name__} {getattr(question, 'iteration', '')}{why}"
        box: list[bytes] = []

        def told(body: bytes) -> None:
            box.append(body)
            self.program.notify()

        self.client.ask(messages.encode(question), told)
        self.maybe_cut()
        yield self.program.until(lambda: bool(box))
        answer = messages.decode_answer(box[0])
        self.job.note(f"rank {self.rank}: {self.doing} -> {answer!r:.150}")
        if isinstance(answer, messages.Unknown) and self.rank in self.job.doomed:
            raise Ended("counted out and forgotten")
        if isinstance(answer, messages.Problem | messages.Unknown):
            raise Violation(f"rank {self.rank} asked {question} and was told {answer}")
        if isinstance(answer, messages.Failed):
            if not self.job.somebody_never_joined:
                raise Violation(f"the group failed without a reason: {answer.text}")
            raise Ended("failed")
        if isinstance(answer, messages.CountedOut):
            if self.rank not in self.job.doomed and not self.client.unheard:
                raise Violation(f"rank {self.rank} was counted out for nothing: {answer.fault}")
            raise Ended("counted out")
        if isinstance(answer, messages.Interrupted | messages.Left) and answer.faults.records:
            self.job.told(answer.faults)
        return answer

    def follow(self, iteration: int) -> Thread:
        """The thread that follows an iteration, and answers the last call."""
        box: list[bytes] = []

        def told(body: bytes) -> None:
            answer = messages.decode_answer(body)
            if isinstance(answer, messages.Interrupted):
                self.job.told(answer.faults)
            self._interrupted[iteration] = True
            box.append(body)
            self.program.notify()

        self.client.ask(messages.encode(messages.Follow(*self.me, iteration)), told)
        yield self.program.until(lambda: bool(box))

    # ------------------------------------------------------------------------- the flow

    def main(self) -> Thread:
        try:
            yield from self.steps()
        except Ended as end:
            self.ended = str(end)
        self.client.close()

    def steps(self) -> Thread:
        yield self.program.sleep(self.sim.random.uniform(0.0, 2.0))
        if self.job.profile.late:
            yield from self.mishap("before joining", may_leave=False)
        question = messages.Join(*self.me, self.job.profile.size, self.job.timeouts)
        told = yield from self.ask(question)
        self.iteration = told.iteration
        while not (yield from self.one_iteration()):
            pass

    def one_iteration(self) -> Thread:
        """Go through an iteration; returns whether the call is over."""
        iteration = self.iteration
        yield from self.mishap("assigning ranks")
        if self.rank not in self.world:
            yield from self.leave("BASE_EXCEPTION", discarded=True)
        place, size = self.world.index(self.rank), len(self.world)
        self.job.asked_to_enter.setdefault(iteration, {})[self.rank] = self.world
        told = yield from self.ask(messages.Enter(*self.me, iteration, place, size))
        self.program.spawn(self.follow(iteration))
        if isinstance(told, messages.Go):
            self.job.goes(self.rank, iteration)
            if (
                yield from self.function(
                    iteration, place >= max(1, size - self.job.profile.reserve)
                )
            ):
                return True
        yield from self.heal(iteration)
        return False

    def function(self, iteration: int, in_reserve: bool) -> Thread:
        """Initialize, and call the function; returns whether the call is over."""
        yield from self.mishap("initializing")
        if in_reserve and not self.interrupted():
            question: messages.Asked = messages.WaitCompleted(*self.me, iteration)
            if not isinstance((yield from self.ask(question)), messages.Go):
                return False
        else:
            calm = iteration >= self.job.profile.calm_after
            takes = self.sim.random.uniform(0.0, 0.3 if calm else 3.0)
            yield self.program.until(self.interrupted, timeout=takes)
            yield from self.mishap("in the function")
            if self.interrupted():
                return False
            yield from self.ask(messages.Completed(*self.me, iteration))
        yield from self.mishap("completed")
        if self.interrupted():
            return False
        told = yield from self.ask(messages.Done(*self.me, iteration))
        if isinstance(told, messages.Over):
            self.job.over[self.rank] = iteration
            raise Ended("over")
        return False

    def heal(self, iteration: int) -> Thread:
        yield self.program.until(self.interrupted)
        yield from self.mishap("interrupted", survives=False)
        yield from self.ask(messages.Heard(*self.me, iteration))
        for doing in ("aborting", "finalizing", "checking its health"):
            yield self.program.sleep(self.sim.random.uniform(0.0, 0.3))
            yield from self.mishap(doing, survives=False)
        told = yield from self.ask(messages.Ready(*self.me, iteration))
        met = told.met
        self.job.gathered(met)
        self.world = self.assigned(met.terminated)
        self.iteration = met.iteration
        yield from self.mishap("met")

    def assigned(self, terminated: tuple[int, ...]) -> tuple[int, ...]:
        """The initial ranks of the next world, in the order of their new ranks."""
        world = list(self.world)
        living = [rank for place, rank in enumerate(world) if place not in terminated]
        if self.job.profile.gaps:
            size, movers = len(living), [r for r in living if world.index(r) >= len(living)]
            living = [
                movers.pop(0) if place in terminated else world[place] for place in range(size)
            ]
        if len(living) % 2 and len(living) > self.job.profile.least:
            living.pop()
        return tuple(living)

    def interrupted(self) -> bool:
        """Whether the thread that follows has heard the end of the iteration."""
        return self._interrupted.get(self.iteration, False)

    # ------------------------------------------------------------------------- mishaps

    def mishap(self, step: str, *, survives: bool = True, may_leave: bool = True) -> Thread:
        """Let something happen, or nothing."""
        self.doing = step
        chance = self.sim.random
        calm = self.iteration >= self.job.profile.calm_after
        if calm or chance.random() >= self.job.profile.mishap:
            return
        kinds = [
            "die",
            "die soon",
            "cut",
            "cut",
            "lose session",
            "begin session",
            "silent",
            "stop",
            "hang",
        ]
        kinds += (["raise"] * 6 if survives and may_leave else []) + ["leave"] * may_leave
        kind = chance.choice(kinds)
        self.job.note(f"rank {self.rank}: {kind} while {step}")
        if kind == "raise":
            yield from self.report()
        elif kind == "leave":
            yield from self.leave("BASE_EXCEPTION")
        elif kind == "die":
            self.die()
            yield self.program.until(lambda: False)
        elif kind == "die soon":
            self.sim.after(chance.uniform(0.0, 0.02), self.die)
        elif kind == "cut":  # now or in the next question, and back in time
            again = chance.uniform(0.0, GRACE * 0.8)
            delay = chance.choice([0.0, chance.uniform(0.0, 4 * self.job.profile.delay)])
            self.sim.after(delay, lambda: self.client.cut(again * chance.random(), again))
        elif kind == "lose session":
            self.job.doomed.add(self.rank)
            self.client.cut(0.0, chance.uniform(GRACE, 3.0))
        elif kind == "begin session":  # before the server has noticed that the old one is over
            back = chance.uniform(0.0, 3.0)
            noticed = back + chance.uniform(2 * self.job.profile.delay, SILENCE)
            self.client.cut(noticed, back, fresh=True)
        elif kind == "silent":
            self.job.doomed.add(self.rank)
            noticed = chance.choice([SILENCE, chance.uniform(0.0, SILENCE)])
            self.client.cut(noticed, chance.choice([None, chance.uniform(0.0, 20.0)]))
            self.sim.after(chance.choice([HANGS, SILENCE + HANGS]), self.die_if_cut)
        elif kind == "stop":
            self.program.paused_until = self.sim.now + chance.uniform(0.0, 8.0)
        elif kind == "hang":
            yield from self.hang()

    def maybe_cut(self) -> None:
        """Lose the connection while a question or its answer is under way, and be back in time."""
        chance, profile = self.sim.random, self.job.profile
        if self.iteration < profile.calm_after and chance.random() < profile.mishap:
            back = chance.uniform(0.0, GRACE * 0.8)
            cut = chance.uniform(0.0, 2 * profile.delay)
            self.sim.after(cut, lambda: self.client.cut(back * chance.random(), back))

    def report(self) -> Thread:
        self.reports += 1
        text = f"own {self.rank}.{self.reports}"
        yield from self.ask(
            messages.Report(*self.me, self.iteration, self.reports, "EXCEPTION", text)
        )
        self.answered += 1

    def leave(self, kind: str, discarded: bool = False) -> Thread:
        text = f"own leave {self.rank}"
        self.job.doomed.add(self.rank)
        iteration = self.iteration
        told = yield from self.ask(
            messages.Leave(*self.me, iteration, kind, text, discarded), f" discarded={discarded}"
        )
        if not isinstance(told, messages.Left):
            raise Violation(f"rank {self.rank} left and was told {told}")
        raise Ended("discarded" if discarded else "left")

    def hang(self) -> Thread:
        """Do nothing any more, until a watcher sees it; or the group does."""
        self.job.doomed.add(self.rank)

        def ended_by_watcher() -> None:
            if self.program.alive:
                self.job.accuse(self.rank, "HARD_TIMEOUT")
                self.sim.after(self.sim.random.uniform(0.0, 5.0), self.die)

        self.sim.after(HANGS, ended_by_watcher)
        yield self.program.until(lambda: False)

    def die_if_cut(self) -> None:
        if self.program.alive and not self.ended and not self.client._connected:
            self.die()

    def die(self) -> None:
        """End, without a word of its own."""
        if not self.program.alive or self.ended:
            return
        self.job.note(f"rank {self.rank} dies")
        self.job.doomed.add(self.rank)
        self.program.alive = self.client.alive = False
        self.client.cut(self.sim.random.uniform(0.0, self.job.profile.delay), None, closed=True)
        if self.job.profile.watched:
            self.job.accuse(self.rank, "TERMINATED")


class Ended(Exception):
    """A rank's flow has come to an end."""


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
