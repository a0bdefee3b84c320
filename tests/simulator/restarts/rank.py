"""A simulated rank of in-process restart: the flow of a wrapper, with injected mishaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Met
from simulator.kernel import Machine, Program, Thread
from simulator.restarts.observer import Violation, process_name
from simulator.restarts.server import GRACE, Client

if TYPE_CHECKING:
    from simulator.restarts.run import Job

SILENCE = 11.0
"""Seconds until a silent host is noticed."""
OVERDUE = 10.0
"""Seconds after which a watcher reports a rank that hangs."""
HANGS = 20.0
"""Seconds after which a watcher ends a rank that hangs."""
POLL = 60.0
"""Seconds after which a process that waits to join sends its question again."""


class Rank:
    """One process of a rank: the flow of a wrapper with a function that only takes time."""

    def __init__(self, job: Job, rank: int, incarnation: int = 0) -> None:
        self.job, self.rank, self.sim = job, rank, job.sim
        self.incarnation = incarnation
        self.process = process_name(rank, incarnation)
        self.me = "job", rank, self.process
        self.program = Program(Machine(job.sim, f"rank {rank}"))
        self.client = Client(job.server, job.profile.delay)
        self.place: int | None = rank
        """Its place in the world; None if the assignment gives it none."""
        self.size = job.profile.size
        """Number of places in the world."""
        self.doing = "nothing yet"
        self.ended = ""
        """How its flow ended; empty while it runs."""
        self.doomed = False
        """Whether it had a mishap that may count it out."""
        self.joined = False
        """Whether it knows that it takes part in the group."""
        self.followed = False
        """Whether the agent of its host has decided who takes its place."""
        self.asks_for_another = False
        """Whether it left, and asked for another process in its place."""
        self.reports = self.answered = 0
        """Number of its own faults that it reported, and that it knows to be recorded."""
        self.others_go_on = True
        """Whether its launcher would ignore its death, because the other ranks continue."""
        self.lost = False
        """Whether its launcher ignored its death."""
        self._interrupted: dict[int, bool] = {}
        self.iteration = 0

    # ------------------------------------------------------------------------ requests

    def ask(self, question: messages.Asked, why: str = "", poll: float | None = None) -> Thread:
        """Send a request and wait for the reply; send it again each `poll` seconds."""
        self.doing = f"{type(question).__name__} {getattr(question, 'iteration', '')}{why}"
        box: list[bytes] = []

        def on_reply(body: bytes) -> None:
            box.append(body)
            self.program.notify()

        self.client.ask(messages.encode(question), on_reply)
        self.maybe_cut()
        yield self.program.until(lambda: bool(box), poll)
        while not box:
            self.client.ask(messages.encode(question), on_reply)
            yield self.program.until(lambda: bool(box), poll)
        answer = messages.decode_reply(box[0])
        self.job.note(f"{self.process}: {self.doing} -> {answer!r:.150}")
        if isinstance(answer, messages.GroupRefusal):
            self.refused(question, answer)
        if isinstance(answer, messages.Interrupted | messages.Left) and answer.faults.records:
            self.job.interrupted(self.group, answer.faults)
        return answer

    def refused(self, question: messages.Asked, refusal: messages.GroupRefusal) -> NoReturn:
        """End the rank, if it had to expect this refusal."""
        match refusal.reason:
            case "unknown" if self.doomed or self.group in self.job.observer.failed:
                raise Ended("evicted and forgotten")
            case "mismatch" if self.job.observer.is_old(self.rank, self.process):
                raise Ended("replaced before it joined")
            case "unknown" | "impossible":
                raise Violation(f"{self.process} asked {question} and received {refusal}")
            case "missing" | "mismatch":
                if not self.job.may_fail(self.group, self.process):
                    raise Violation(f"the group failed without a reason: {refusal.text}")
                raise Ended("failed")
            case "evicted":
                if not self.doomed and not self.client.unknown:
                    raise Violation(f"{self.process} was evicted without a reason: {refusal}")
                raise Ended("evicted")

    def follow(self, iteration: int) -> Thread:
        """Run the thread that follows an iteration, and answers the last call."""
        box: list[bytes] = []

        def on_reply(body: bytes) -> None:
            answer = messages.decode_reply(body)
            if isinstance(answer, messages.Interrupted):
                self.job.interrupted(self.group, answer.faults)
            self._interrupted[iteration] = True
            box.append(body)
            self.program.notify()

        self.client.ask(messages.encode(messages.Follow(*self.me, iteration)), on_reply)
        yield self.program.until(lambda: bool(box))

    # ------------------------------------------------------------------------- the flow

    @property
    def group(self) -> int:
        """The number of its group: after the end of a group, another one of its name may begin."""
        return self.job.observer.admitted.get(self.process, self.job.observer.group)

    @property
    def runs(self) -> bool:
        """Whether its flow has not come to an end."""
        return self.program.alive and not self.ended

    def main(self) -> Thread:
        try:
            yield from self.steps()
        except Ended as end:
            self.ended = str(end)
        self.client.close()
        if self.asks_for_another:
            self.job.agent.on_end(self)

    def steps(self) -> Thread:
        yield from self.join()
        while not (yield from self.one_iteration()):
            pass

    def join(self) -> Thread:
        """Join the group, as one of the first processes or in place of one that has ended."""
        if not self.incarnation:
            yield self.program.sleep(self.sim.random.uniform(0.0, 2.0))
        if self.incarnation or self.job.profile.late:
            yield from self.mishap("before joining", may_leave=False)
        question = messages.Join(
            *self.me, self.job.profile.size, self.job.timeouts, self.incarnation
        )
        reply = yield from self.ask(question, poll=POLL if self.incarnation else None)
        self.joined = True
        if isinstance(reply, messages.Over):
            raise Ended("late")
        if isinstance(reply, messages.Admitted):
            self.place = reply.place
            yield from self.meet(reply.met)
        else:
            self.iteration = reply.iteration

    def one_iteration(self) -> Thread:
        """Run one iteration; returns whether the call is over."""
        iteration = self.iteration
        yield from self.mishap("assigning ranks")
        place, size, profile = self.place, self.size, self.job.profile
        if place is None:
            yield from self.leave("BASE_EXCEPTION", discarded=True)
            return True
        # With replacements the number of active ranks is fixed.
        in_reserve = place >= max(
            1, (profile.size if profile.replacement else size) - profile.reserve
        )
        self.job.enters(self, place)
        question = messages.Enter(*self.me, iteration, place, size, not in_reserve)
        reply = yield from self.ask(question)
        self.program.spawn(self.follow(iteration))
        if isinstance(reply, messages.Go):
            self.job.goes(self)
            if (yield from self.function(iteration, in_reserve)):
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
        reply = yield from self.ask(messages.RankDone(*self.me, iteration))
        if not isinstance(reply, messages.Go):
            return False
        yield from self.mishap("done")
        if self.interrupted():
            return False
        self.others_go_on = False
        yield from self.mishap("about to confirm")
        if self.interrupted():
            return False
        yield from self.leave_while_it_confirms(iteration)
        reply = yield from self.ask(messages.Confirm(*self.me, iteration))
        if isinstance(reply, messages.Over):
            self.job.over[self.process] = self.group, iteration
            raise Ended("over")
        return False

    def heal(self, iteration: int) -> Thread:
        self.others_go_on = True
        yield self.program.until(self.interrupted)
        yield from self.mishap("interrupted", survives=False)
        yield from self.ask(messages.AnswerLastCall(*self.me, iteration))
        for doing in ("aborting", "finalizing", "checking its health"):
            yield self.program.sleep(self.sim.random.uniform(0.0, 0.3))
            yield from self.mishap(doing, survives=False)
        reply = yield from self.ask(messages.Ready(*self.me, iteration))
        if not isinstance(reply, messages.Gathered):
            raise Violation(f"{self.process} met the others and received {reply}")
        yield from self.meet(reply.met)

    def meet(self, met: Met) -> Thread:
        """Take the place in the next world."""
        self.job.gathered(self.group, met)
        world = self.assigned(met.world_size, met.terminated)
        self.place = world.index(self.place) if self.place in world else None
        self.size, self.iteration = len(world), met.iteration
        yield from self.mishap("met")

    def assigned(self, size: int, terminated: tuple[int, ...]) -> list[int]:
        """Return the places of the last world that are in the next one, in their new order."""
        living = [place for place in range(size) if place not in terminated]
        if self.job.profile.gaps:
            movers = [place for place in living if place >= len(living)]
            living = [
                movers.pop(0) if place in terminated else place for place in range(len(living))
            ]
        if len(living) % 2 and len(living) > self.job.profile.least:
            living.pop()
        return living

    def interrupted(self) -> bool:
        """Return whether the thread that follows has received the end of the iteration."""
        return self._interrupted.get(self.iteration, False)

    # ------------------------------------------------------------------------- mishaps

    def mishap(self, step: str, *, survives: bool = True, may_leave: bool = True) -> Thread:
        """Inject a mishap, or none, as the seed decides."""
        self.doing = step
        chance = self.sim.random
        if self.is_calm() or chance.random() >= self.job.profile.mishap:
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
            "stop long",
            "hang",
        ]
        kinds += (["raise"] * 6 if survives and may_leave else []) + ["leave"] * may_leave
        if self.job.profile.replacement:
            kinds += ["die", "die with others", "stop for dead", "stop for dead"]
            kinds += ["leave"] * may_leave
        kind = chance.choice(kinds)
        self.job.note(f"{self.process}: {kind} while {step}")
        if kind == "raise":
            yield from self.report()
        elif kind == "leave":
            yield from self.leave("BASE_EXCEPTION")
        elif kind == "die":
            self.die()
            yield self.program.until(lambda: False)
        elif kind == "die with others":  # all ranks, or two
            others = self.job.living(self)
            self.die()
            for other in others if chance.random() < 0.3 else others[:1]:
                self.sim.after(chance.choice([0.0, chance.uniform(0.0, 1.0)]), other.die)
            yield self.program.until(lambda: False)
        elif kind == "stop for dead":  # its agent starts another process while it is stopped
            self.doomed = True
            self.program.paused_until = self.sim.now + chance.uniform(0.0, 40.0)
            self.job.agent.on_end(self)
            yield self.program.sleep(0.0)
        elif kind == "die soon":
            self.sim.after(chance.uniform(0.0, 0.02), self.die)
        elif kind == "cut":  # now or during the next request; reconnects within the grace
            again = chance.uniform(0.0, GRACE * 0.8)
            delay = chance.choice([0.0, chance.uniform(0.0, 4 * self.job.profile.delay)])
            self.sim.after(delay, lambda: self.client.cut(again * chance.random(), again))
        elif kind == "lose session":
            self.doomed = True
            self.client.cut(0.0, chance.uniform(GRACE, 3.0))
        elif kind == "begin session":  # before the server has noticed that the old one is over
            back = chance.uniform(0.0, 3.0)
            noticed = back + chance.uniform(2 * self.job.profile.delay, SILENCE)
            self.client.cut(noticed, back, fresh=True)
        elif kind == "silent":
            self.doomed = True
            noticed = chance.choice([SILENCE, chance.uniform(0.0, SILENCE)])
            self.client.cut(noticed, chance.choice([None, chance.uniform(0.0, 20.0)]))
            self.sim.after(chance.choice([HANGS, SILENCE + HANGS]), self.die_if_cut)
        elif kind == "stop":
            self.program.paused_until = self.sim.now + chance.uniform(0.0, 8.0)
        elif kind == "stop long":  # for its watcher to see, and mostly for itself as well
            self.program.paused_until = self.sim.now + chance.uniform(OVERDUE, HANGS)
            self.tell_overdue()
            if survives and may_leave:
                yield self.program.sleep(0.0)
                yield from self.report("SOFT_TIMEOUT")
        elif kind == "hang":
            yield from self.hang()

    def is_calm(self) -> bool:
        """Return whether this process has no mishaps any more."""
        calm_after = self.job.profile.calm_after
        return self.iteration >= calm_after or self.job.observer.group > calm_after

    def maybe_cut(self) -> None:
        """Lose the connection while a request or its reply is under way; reconnect in time."""
        chance, profile = self.sim.random, self.job.profile
        if not self.is_calm() and chance.random() < profile.mishap:
            back = chance.uniform(0.0, GRACE * 0.8)
            cut = chance.uniform(0.0, 2 * profile.delay)
            self.sim.after(cut, lambda: self.client.cut(back * chance.random(), back))

    def report(self, kind: str = "EXCEPTION") -> Thread:
        if kind == "SOFT_TIMEOUT":
            number, text = messages.OVERDUE, f"seen by {self.process} itself"
        else:
            self.reports += 1
            number, text = self.reports, f"own {self.process}.{self.reports}"
        yield from self.ask(messages.Report(*self.me, self.iteration, number, kind, text))
        self.answered += kind == "EXCEPTION"

    def leave(self, kind: str, discarded: bool = False) -> Thread:
        text = f"own leave {self.process}"
        self.doomed = True
        wanted = not discarded and self.job.profile.replacement > 0
        replaced = wanted and self.sim.random.random() < 0.7
        question = messages.LeaveGroup(
            *self.me, self.iteration, kind, text, discarded, replaced=replaced
        )
        reply = yield from self.ask(question, f" discarded={discarded} replaced={replaced}")
        if isinstance(reply, messages.Over) and not self.others_go_on:
            raise Ended("left when the call was over")
        if not isinstance(reply, messages.Left):
            raise Violation(f"{self.process} left and received {reply}")
        if self.process not in self.job.observer.ended:
            raise Violation(f"{self.process} received that the others go on without it")
        self.asks_for_another = replaced
        raise Ended("discarded" if discarded else "left")

    def leave_while_it_confirms(self, iteration: int) -> Thread:
        """Perhaps be interrupted by an exception of the script while waiting for the end."""
        chance, profile = self.sim.random, self.job.profile
        if not self.is_calm() and chance.random() < profile.mishap:
            confirm = messages.encode(messages.Confirm(*self.me, iteration))
            self.client.ask(confirm, lambda body: None)
            yield self.program.sleep(chance.uniform(0.0, 4 * profile.delay))
            yield from self.leave("BASE_EXCEPTION")

    def hang(self) -> Thread:
        """Hang until a watcher or the group detects it."""
        self.doomed = True

        def ended_by_watcher() -> None:
            if self.program.alive:
                self.job.report_dead(self, "HARD_TIMEOUT")
                self.sim.after(self.sim.random.uniform(0.0, 5.0), self.die)

        self.tell_overdue()
        self.sim.after(HANGS, ended_by_watcher)
        yield self.program.until(lambda: False)

    def tell_overdue(self) -> None:
        """Let a watcher report, at the soft time-out, that this rank has made no progress."""
        iteration = self.iteration

        def overdue() -> None:
            if self.program.alive and not self.ended:
                self.job.overdue(self, iteration)

        self.sim.after(OVERDUE, overdue)

    def die_if_cut(self) -> None:
        if self.program.alive and not self.ended and not self.client.connected:
            self.die()

    def die(self) -> None:
        """End without a report of its own."""
        if not self.program.alive or self.ended:
            return
        self.job.note(f"{self.process} dies")
        self.lost = self.others_go_on
        self.doomed = True
        self.program.alive = self.client.alive = False
        self.client.cut(self.sim.random.uniform(0.0, self.job.profile.delay), None, closed=True)
        if self.job.profile.watched:
            self.job.report_dead(self, "TERMINATED")
        self.job.agent.on_end(self)


class Ended(Exception):
    """The end of a rank's flow."""
