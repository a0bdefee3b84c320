"""One simulated agent: what it hears, what it does about it, and its threads.

It decides what it hears with the functions that the real handler decides with (`_waiting`,
`_driver`), and it has the same threads: one beats and renews the lease, one watches the time, one
follows the rounds, one starts and stops workers and asks for seats. It reaches the rounds by the
real drivers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sim_host import Host
from sim_kernel import Program

from regrow.rendezvous._driver import Driver, View
from regrow.rendezvous._errors import RendezvousConnectionError
from regrow.rendezvous._news import (
    Close,
    Event,
    Failed,
    Heard,
    Join,
    Judged,
    Leave,
    Leaving,
    Node,
    NodesWaiting,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._waiting import Outcome, Reborn, TimedOut, Told, Waiting, judge, tidings

BEAT_ANSWERED_WITHIN = 5.0
"""Seconds after which a beat is given up."""


class Agent(Program):
    """One life of the agent's process."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host, self.job = host, host.job
        self.bounds = self.job.profile.bounds
        self.history = self.job.history
        self.token = 0
        self.view: View | None = None
        self.told = Told()
        self.over = False
        """The agent has ended by itself."""
        self.lost = False
        self.answered = self.beaten = self.lease = host.clock
        self.why = "it asked for a new round"
        self._waiting_nodes = 0
        self._sigterm: bool = False
        self.id = ""
        self.driver: Driver
        self._thread(self._main)

    @property
    def epoch(self) -> int:
        """Which life of the job it is in."""
        return self.job.place.epoch(self.driver)

    def die(self) -> None:
        """Be killed; the kernel closes what it had open."""
        self.kill()
        self.job.place.reset(self)

    def terminate(self) -> None:
        """SIGTERM: stop the workers with their grace, then leave."""
        self.when_awake(self._terminated)

    def _terminated(self) -> None:
        self._sigterm = True
        self.host.trouble(self.sim.now)
        self.notify()

    def _begin_life(self) -> None:
        self.host.lives += 1
        self.id = f"{self.host.name}/{self.host.lives}"
        self.history.lives[self.id] = self
        self.token, self.view, self.told = 0, None, Told()
        self.answered = self.beaten = self.host.clock
        self.lost = False
        self._thread(partial(self._follow, self.id))

    def _thread(self, call: Callable[[], None]) -> None:
        def run() -> None:
            try:
                call()
            except RendezvousConnectionError as error:
                self.history.note(f"{self.id} gives up: {error}")
                self._finish()

        self.start(run)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Block until something holds, or for so many seconds."""
        self.wait(self.until(ready, timeout))

    def wait_for(self, seconds: float) -> None:
        """Block for so many seconds."""
        self.wait(self.sleep(seconds))

    def _finish(self, for_good: bool = False) -> None:
        """End by itself; unless `for_good`, a scheduler starts it again."""
        if not self.over:
            self.over = True
            self.die()
            self.host.guardian.kill(self.host.guardian.runs, within=0.3)
            if not for_good:
                self.sim.after(self.sim.random.uniform(1, 5), self.host.start)

    # --- the main thread

    def _main(self) -> None:
        guardian = self.host.guardian
        self.driver = self.job.place.connect(self)
        self._begin_life()
        self._thread(self._beat)
        self._thread(self._watch_time)
        while True:
            round = self._meet()
            if not round:
                return
            self.wait_for(self.sim.random.uniform(0.02, self.job.profile.start))
            # Workers are started only with a lease that lives, and for a round that goes on.
            self.wait_until(lambda: self._stop_wanted() or self.host.clock < self.lease)
            if not self._stop_wanted():
                guardian.start(self, round, self.lease)
                self.wait_until(lambda: self._stop_wanted() or not guardian.round)
            failed = not guardian.round and not self._stop_wanted()
            if self._terminating():
                self._leave(round)
                return
            if failed:
                charged = self._report(round)
                if charged and charged.failures > self.job.profile.max_restarts:
                    closing = Close(self.id, "its workers failed for good", f"report {self.id}")
                    self._call(closing)
            elif guardian.round:
                if self._waiting_nodes:
                    self.why = "nodes wait"
                guardian.stop(self.job.profile.grace)
                self.wait_until(lambda: not guardian.round)
            if self._terminating():
                self._leave(round)
                return

    def _stop_wanted(self) -> bool:
        return self.told.ended is not None or self._waiting_nodes > 0 or self._over()

    def _over(self) -> bool:
        return self._sigterm or self.told.closed is not None

    def _meet(self) -> int:
        """Ask for a seat until there is one; returns the round, 0 if there will be none."""
        self.told, self._waiting_nodes = Told(), 0
        while not self._sigterm:
            waiting, outcome = Waiting(self.token, 1e9), None
            said = self._call(Join(self._node(), self.token, self.why))
            waiting, outcome = judge(waiting, said, self.host.clock)
            while outcome is None:
                ready = partial(self._heard_enough, waiting)
                self.wait_until(ready)
                if self._terminating():
                    break
                outcome = self._news(waiting)
            match outcome:
                case Seated(round=round) as seat:
                    self.history.seated(self.epoch, seat)
                    self.token, self.told = round, Told(round)
                    self.beaten = self.host.clock
                    self.view = self.view or said
                    self._hear(self.id, self.view)
                    self.notify()
                    return round
                case RoundEnded(round):
                    self.token = round
                    self.history.told_over(self.epoch, self.id, round)
                case RoundClosed() as closed:
                    self.history.endings.add(closed)
                    self._call(Leave(self.id))
                    self._finish(for_good=True)
                    return 0
                case Reborn():
                    self._begin_life()
                case None | TimedOut():
                    pass
        self._leave(0)
        return 0

    def _heard_enough(self, waiting: Waiting) -> bool:
        return self._sigterm or self._news(waiting) is not None

    def _terminating(self) -> bool:
        return self._sigterm

    def _news(self, waiting: Waiting) -> Outcome | None:
        if self.lost:
            return TimedOut()
        return None if self.view is None else judge(waiting, self.view, self.host.clock)[1]

    def _node(self) -> Node:
        return Node(self.id, self.host.name, port=1 + self.host.lives)

    def _report(self, round: int) -> Judged | None:
        """Report a failure, and wait for the verdict; None if there will be none."""
        id = self.id
        while True:
            said = self._call(Failed(id, round, f"report of {id}"))
            while True:
                if said.judged is not None and said.judged.round >= round:
                    return said.judged if said.judged.round == round else None
                if isinstance(said.news, RoundClosed | Refused) or said.news is None:
                    return None
                version = said.version
                self.wait_until(
                    lambda v=version: (
                        self.lost  # type: ignore[misc]
                        or self._sigterm
                        or (self.view is not None and self.view.version > v)
                    )
                )
                if self._sigterm:
                    return None
                if self.lost or self.view is None:
                    break
                said = self.view

    def _leave(self, round: int) -> None:
        guardian = self.host.guardian
        if round:
            self._thread(partial(self._say, Leaving(self.id, round, "SIGTERM")))
        if guardian.round:
            guardian.stop(self.job.profile.grace)
            self.wait_until(lambda: not guardian.round)
        with suppress(RendezvousConnectionError):
            self.driver.submit(Leave(self.id, 0), self.bounds.lease)
        self._finish()

    def _call(self, event: Event) -> View:
        """Submit an event; end if it is not answered in time."""
        said = self.driver.submit(event, self.bounds.lease + 10.0)
        self.answered, self.lost = self.host.clock, False
        if not isinstance(event, Close):
            self._hear(self.id, said)
        return said

    def _say(self, event: Event) -> None:
        with suppress(RendezvousConnectionError):
            self.driver.submit(event, self.bounds.lease)

    # --- the two other threads

    def _follow(self, id: str) -> None:
        troubled, answered = 0.0, 0
        while True:
            self.wait_until(lambda: self.id != id or self.view is not None)
            if self.id != id:
                return
            try:
                view = self.driver.follow(id, self.view, 20.0)
                if self.id != id:
                    return
                if view is not None:
                    self._hear(id, view)
                    match view.news:
                        case RoundEnded(round, by) if self.token == round > answered and by != id:
                            self.driver.submit(Heard(id, round), self.bounds.lease)
                            answered = round
                troubled = 0.0
            except RendezvousConnectionError:
                troubled = troubled or self.host.clock
                if self.host.clock - troubled >= self.bounds.lease:
                    self._lose(id)
                self.wait_for(self.bounds.keep_alive / 4)

    def _beat(self) -> None:
        bounds = self.bounds
        while True:
            id, token, sent = self.id, self.token, self.host.clock
            pause = bounds.keep_alive
            try:
                holds = self.driver.beat(id, token, BEAT_ANSWERED_WITHIN)
            except RendezvousConnectionError:
                pause /= 4
            else:
                self._renew(id, sent, holds)
                if not holds and token:
                    self._hear(id, self.driver.peek(id))
            self.wait_until(
                lambda i=id, t=token: (self.id, self.token) != (i, t),  # type: ignore[misc]
                max(sent + pause - self.host.clock, 0.001),
            )

    def _watch_time(self) -> None:
        while True:
            left = self.answered + self.bounds.lease - self.host.clock
            if left > 0:
                self.wait_for(left)
            elif self.lost:
                self.wait_until(lambda: not self.lost)
            else:
                self._lose(self.id)

    def _renew(self, id: str, sent: float, holds: bool) -> None:
        if self.id != id:
            return
        if sent > self.beaten + self.bounds.lease:
            self._lose(id)
        self.beaten = sent
        self.answered, self.lost = max(self.answered, sent), False
        if holds:
            self.lease = max(self.lease, sent + self.bounds.lease)
            self.host.guardian.renew(self.lease)
        self.notify()

    def _lose(self, id: str) -> None:
        if self.id != id or self.lost:
            return
        self.lost = True
        if self.told.round and self.told.ended is None:
            lost = RoundEnded(self.told.round, id, "it has lost touch with the others")
            self.told = self.told._replace(ended=lost)
        self.notify()

    def _hear(self, id: str, view: View) -> None:
        if self.id != id or (self.view is not None and view.version < self.view.version):
            return
        self.view = view
        self.told, news = tidings(self.told, view, id)
        for item in news:
            match item:
                case RoundEnded(round) | Judged(round):
                    self.history.told_over(self.epoch, id, round)
                case NodesWaiting():
                    self.machine.after(0.5, lambda r=self.told.round: self._make_room(r))  # type: ignore[misc]
                case RoundClosed():
                    pass
        self.notify()

    def _make_room(self, round: int) -> None:
        def still() -> None:
            view = self.view
            if view is not None and view.waiting and self.told.round == round:
                self._waiting_nodes = view.waiting
                self.notify()

        self.when_awake(still)
