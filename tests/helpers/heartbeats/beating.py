"""Workers that send heartbeats through a store's server, in virtual time.

The rules of a worker (`beats`) and the service are the real ones. The store's client and the
network are a model. Messages take time, and connections break and return. Unanswered questions are
sent again. A session that is away for too long expires. A test can stop, kill, delay or restart a
process, and the server may lose its memory.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

from regrow.heartbeat import HeartbeatFailure, beats
from regrow.heartbeat import messages as messages
from regrow.heartbeat.merge import Beat, Broken, ExchangeFailed, Outcome, WorkersLeft
from regrow.heartbeat.service import HeartbeatService
from regrow.heartbeat.store_exchange import EARLY, MOST_EARLY
from regrow.store import Answer

GRACE = 0.5
"""Seconds for which a session outlives its connection."""
LATENCY = (0.001, 0.02)
"""Seconds that a message takes, at least and at most."""


class Session:
    """A worker's session with the server."""

    def __init__(self) -> None:
        self.up = True
        self.over = False
        self.epoch = 0
        """Number of its connections so far; messages on an older connection are lost."""


class Process:
    """A worker's process."""

    def __init__(self, world: World, plan: beats.HeartbeatPlan, incarnation: int) -> None:
        self.world = world
        self.plan = plan
        self.incarnation = incarnation
        self.session = Session()
        self.asked: dict[int, bytes] = {}
        """Questions without an answer, by id."""
        self.beat_id = self.follow_id = 0
        self.seen = 0
        self.step = 0
        self.stopped = self.dead = False
        self.failure: HeartbeatFailure | None = None
        self.failed_at = 0.0
        self.ended = False
        self.messages: Counter[type] = Counter()
        self.answers: Counter[type] = Counter()
        self.late: list[Callable[[], None]] = []
        """Calls that wait until the stopped process continues."""
        self.alarm = 0
        """Number of the current timer; older timers have no effect."""
        token = world.random.randint(1, 65535) if plan.rank == 0 else 0
        self.state, actions = beats.begin(plan, token, world.now)
        self.do(actions)

    @property
    def running(self) -> bool:
        """Whether the process still sends heartbeats."""
        return not (self.dead or self.ended or self.failure)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call in the process now; in a stopped process, when it continues."""
        if self.stopped:
            self.late.append(call)
        elif not self.dead:
            call()

    def do(self, actions: tuple[beats.Action, ...]) -> None:
        for action in actions:
            match action:
                case beats.TryExchange(timeout, final):
                    self.exchange(timeout, final)
                case beats.Sleep(until):
                    self.set_alarm(until, lambda: self.happen(beats.Woke(self.world.now)))
                case beats.Listen():
                    self.follow()
                case beats.Fail(failure):
                    self.failure, self.failed_at = failure, self.world.now
                    self.world.close(self)
        if self.state.over and not self.failure:
            self.ended = True
            self.world.close(self)

    def happen(self, event: beats.Event) -> None:
        if self.running:
            self.state, actions = beats.step(self.state, event)
            self.do(actions)

    def on_outcome(self, outcome: Outcome) -> None:
        self.alarm += 1
        self.happen(beats.Result(outcome, self.world.now))

    def set_alarm(self, at: float, call: Callable[[], None]) -> None:
        self.alarm += 1
        mine = self.alarm
        self.world.at(at, lambda: self.run(lambda: call() if self.alarm == mine else None))

    def stop(self) -> None:
        """Let the worker leave the heartbeats."""
        if not self.beat_id:
            self.run(lambda: self.happen(beats.LeaveRequest(self.world.now)))

    # ----------------------------------------------------------- its store's client

    def exchange(self, timeout: float, final: bool) -> None:
        wait = timeout - min(EARLY * timeout, MOST_EARLY)
        beat = Beat(
            self.plan.rank,
            self.state.token,
            self.incarnation,
            bool(self.state.beats),
            self.step,
            leaving=self.state.leaving,
            final=final,
        )
        question = messages.BeatQuestion("group", self.plan.size, beat, self.seen, wait)
        self.beat_id = self.ask(messages.encode(question))
        self.set_alarm(self.world.now + timeout, self.give_up)

    def follow(self) -> None:
        follow = messages.FollowGroup("group", self.plan.rank, self.incarnation)
        self.follow_id = self.ask(messages.encode(follow))

    def ask(self, body: bytes) -> int:
        id = next(self.world.ids)
        self.asked[id] = body
        self.messages[type(messages.decode_question(body))] += 1
        self.world.send(self, id)
        return id

    def give_up(self) -> None:
        self.asked.pop(self.beat_id, None)
        self.world.cancel(self, self.beat_id)
        self.beat_id = 0
        self.on_outcome(ExchangeFailed("no answer in time"))

    def answered(self, id: int, body: bytes) -> None:
        if self.asked.pop(id, None) is None:
            return
        answer = messages.decode_answer(body)
        self.answers[type(answer)] += 1
        if id == self.follow_id:
            if isinstance(answer, WorkersLeft | Broken):
                self.happen(beats.Result(answer, self.world.now))
            else:
                self.follow_id = 0
            return
        assert id == self.beat_id
        self.beat_id = 0
        match answer:
            case messages.InStep(number, agreed):
                self.seen = number
                self.on_outcome(agreed)
                if not self.follow_id and self.running:
                    self.follow()
            case WorkersLeft() | Broken():
                self.on_outcome(answer)
            case messages.Missing(ranks):
                self.on_outcome(ExchangeFailed("the store says so", ranks))
            case _:
                raise AssertionError(answer)


class World:
    """Workers, the network and the server.

    Args:
        size: number of workers.
        seed: of the delays.
        plan: plan of all workers; each worker's rank and the size are added.
    """

    def __init__(self, size: int, seed: int = 0, **plan: float) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.ids = count(1)
        self.service = HeartbeatService()
        self.size = size
        self.procs: list[Process] = []
        self._plan = {"period": 1.0, "timeout": 1.0, "failures": 3, "start_timeout": 6.0, **plan}
        self._serial = count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._due_at: float | None = None

    def plan(self, rank: int, size: int | None = None, **other: object) -> beats.HeartbeatPlan:
        return beats.HeartbeatPlan(rank, size or self.size, **{**self._plan, **other})  # type: ignore[arg-type]

    def start(self, rank: int, size: int | None = None, **other: object) -> Process:
        """Start a worker's process."""
        process = Process(self, self.plan(rank, size, **other), self.random.randint(1, 2**62))
        self.procs.append(process)
        return process

    def start_all(self) -> list[Process]:
        return [self.start(rank) for rank in range(self.size)]

    # ------------------------------------------------------------------------ time

    def at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._serial), call))

    def run(self, seconds: float) -> None:
        """Advance the time by `seconds`."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until

    def run_until(self, condition: Callable[[], bool], seconds: float = 1000.0) -> None:
        """Advance the time until a condition is true."""
        until = self.now + seconds
        while not condition():
            assert self._queue, "nothing will happen any more"
            assert self._queue[0][0] <= until, "it never was so"
            self.now, _, call = heapq.heappop(self._queue)
            call()

    # ----------------------------------------------------------------- the network

    def delay(self) -> float:
        return self.random.uniform(*LATENCY)

    def send(self, process: Process, id: int) -> None:
        session, epoch = process.session, process.session.epoch
        body = process.asked[id]

        def arrive() -> None:
            if session.up and session.epoch == epoch:
                self._send_answers(self.service.asked(session, id, body, self.now))

        self.at(self.now + self.delay(), arrive)

    def cancel(self, process: Process, id: int) -> None:
        session, epoch = process.session, process.session.epoch

        def arrive() -> None:
            if session.up and session.epoch == epoch:
                self.service.cancelled(session, id)

        self.at(self.now + self.delay(), arrive)

    def _send_answers(self, answers: list[Answer]) -> None:
        for session, id, body in answers:
            assert isinstance(session, Session)
            epoch = session.epoch
            owner = next((p for p in self.procs if p.session is session), None)
            if owner is None:
                continue

            def arrive(
                owner: Process = owner,
                session: Session = session,
                epoch: int = epoch,
                id: int = id,
                body: bytes = body,
            ) -> None:
                if session.up and session.epoch == epoch:
                    owner.run(lambda: owner.answered(id, body))

            self.at(self.now + self.delay(), arrive)
        self._plan_due()

    def _plan_due(self) -> None:
        at = self.service.deadline
        if at is not None and (self._due_at is None or at < self._due_at):
            self._due_at = at
            self.at(at, self._due)

    def _due(self) -> None:
        self._due_at = None
        at = self.service.deadline
        if at is not None and at <= self.now:
            self._send_answers(self.service.due(self.now))
        self._plan_due()

    # ------------------------------------------------------------------- accidents

    def drop(self, process: Process, seconds: float) -> None:
        """Break a connection, and restore it after `seconds`."""
        session = process.session
        if not session.up or process.dead:
            return
        session.up = False
        session.epoch += 1
        self._send_answers(self.service.suspended(session, self.now))
        over = self.now + GRACE
        back = self.now + seconds
        self.at(over, lambda: self._grace_over(process, session, closed=False))
        self.at(back, lambda: process.run(lambda: self._back(process, session)))

    def _back(self, process: Process, session: Session) -> None:
        if session is not process.session or session.up or not process.running:
            return
        if session.over:
            process.session = Session()
            process.asked.pop(process.follow_id, None)
            process.follow_id = 0
        else:
            session.up = True
            self._send_answers(self.service.resumed(session, self.now))
        for id in list(process.asked):
            self.send(process, id)

    def _grace_over(self, process: Process, session: Session, closed: bool) -> None:
        if not session.up and not session.over:
            session.over = True
            self._send_answers(
                self.service.ended(session, "its connection broke", closed, self.now)
            )

    def stop(self, process: Process, seconds: float | None = None) -> None:
        """Stop a process, for good or for `seconds`."""
        process.stopped = True
        if seconds is not None:
            self.at(self.now + seconds, lambda: self._cont(process))

    def _cont(self, process: Process) -> None:
        process.stopped = False
        late, process.late = process.late, []
        for call in late:
            process.run(call)

    def kill(self, process: Process) -> None:
        """Kill a process; the kernel closes its connection."""
        process.dead = True
        session = process.session
        if session.up:
            session.up = False
            self._send_answers(self.service.suspended(session, self.now))
        self.at(self.now + GRACE, lambda: self._grace_over(process, session, closed=True))

    def close(self, process: Process) -> None:
        """Close a process's session with the store."""
        session = process.session
        if session.up:
            session.up, session.over = False, True
            self._send_answers(
                self.service.ended(session, "it closed its connection", True, self.now)
            )

    def restart_server(self, seconds: float) -> None:
        """Stop the server and delete its data; a new server starts after `seconds`."""
        self.service, self._due_at = HeartbeatService(), None
        for process in self.procs:
            session = process.session
            if session.up:
                session.up = False
            session.over = True
            session.epoch += 1

            def back(process: Process = process, session: Session = session) -> None:
                process.run(lambda: self._back(process, session))

            self.at(self.now + seconds, back)
