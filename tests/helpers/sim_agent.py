"""One simulated agent: the real node with its real threads, and a main thread that has workers.

What is simulated is what an agent does with a node: it asks for seats, starts workers and stops
them, reports their failures, and leaves when it is told to. It ends when its node has given up, and
is then started again, as a scheduler would.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sim_host import Host
from sim_kernel import Program
from sim_threads import Thread, Threads

from regrow.rendezvous._driver import Driver
from regrow.rendezvous._errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from regrow.rendezvous._member import Member
from regrow.rendezvous._news import Judged, NodesWaiting, RoundClosed, RoundEnded, Seated

GATHER = 0.5
"""Seconds for which arrivals are gathered before workers are stopped for them."""


class SimPort:
    """Stands for a port that a node holds."""

    port = 1

    def close(self) -> None:
        """See `PortReservation.close`."""


class Node(Member):
    """An agent's node; its ids are numbered, and not random."""

    def __init__(self, agent: Agent, driver: Driver) -> None:
        settings, clock = agent.job.profile.settings, lambda: agent.host.clock
        super().__init__(driver, settings, agent.host.name, None, clock, agent.threading)
        self._agent = agent

    def _new_id(self) -> str:
        host = self._agent.host
        host.lives += 1
        id = f"{host.name}/{host.lives}"
        self._agent.history.lives[id] = self._agent
        return id


class Agent(Program):
    """One life of the agent's process."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host, self.job = host, host.job
        self.history = self.job.history
        self.threading = Threads(self)
        self.driver: Driver
        self.node: Node | None = None
        self.stopped_for = 0.0
        """Seconds for which it is to be stopped as soon as it has heard something."""
        self.lease = host.clock
        self._ended = 0
        """The last round that it knows to be over."""
        self._waiting = NodesWaiting(0, 0)
        self._closed = self._sigterm = self._interruptible = False
        Thread(self, self._run).start()

    @property
    def id(self) -> str:
        """Of its node."""
        return self.node.id if self.node else ""

    @property
    def epoch(self) -> int:
        """Which life of the job it is in."""
        return self.job.place.epoch(self.driver)

    def die(self) -> None:
        """Be killed; the kernel closes what it had open."""
        self.kill()
        self.job.place.reset(self)

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and later SIGCONT."""
        until = self.sim.now + seconds
        self.paused_until = max(until, self.paused_until)
        self.host.trouble(until)

    def heard(self) -> None:
        """Something has arrived, at which it may have no time to look."""
        seconds, self.stopped_for = self.stopped_for, 0.0
        if seconds and self.job.faults:
            self.stop(seconds)

    def terminate(self) -> None:
        """SIGTERM: stop the workers with their grace, then leave."""
        self.when_awake(lambda: Thread(self, self._terminated).start())

    def _terminated(self) -> None:
        self._sigterm = True
        self.host.trouble(self.sim.now)
        self.notify()
        if self._interruptible and self.node is not None:
            self.node.interrupt()

    # --- the main thread

    def _run(self) -> None:
        how = ""
        try:
            self.driver = self.job.place.connect(self)
            self.node = Node(self, self.driver)
            self.node.touch.subscribe(self._told)
            self.node.touch.keep_lease(self._renewed)
            self._work(self.node)
        except (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousGracefulExitError,
        ) as error:
            self.history.note(f"{self.host.name} ends: {error}")
            how = str(error).partition(" closed: ")[2]
            if how:
                self.history.endings.add(how)
        if self.node is not None:
            with suppress(RendezvousError):
                why = "SIGTERM" if self._sigterm else "it is done"
                self.node.leave(why, self.job.profile.bounds.lease)
            self.node.end(linger=False)
        self._finish(for_good=bool(how))

    def _finish(self, for_good: bool) -> None:
        self.die()
        self.host.guardian.kill(self.host.guardian.runs, within=0.3)
        if not for_good:
            self.sim.after(self.sim.random.uniform(1, 5), self.host.start)

    def _work(self, node: Node) -> None:
        while not self._sigterm:
            over, seat = self._ended, self._meet(node)
            self.history.seated(self.epoch, seat, over)
            self._run_workers(node, seat.round)

    def _run_workers(self, node: Node, round: int) -> None:
        guardian, profile = self.host.guardian, self.job.profile
        self.wait(self.sleep(self.sim.random.uniform(0.02, profile.start)))
        # Workers are started only with a lease that lives, and for a round that goes on.
        self._wait_until(lambda: self._must_stop(round) or self.host.clock < self.lease)
        if not self._must_stop(round):
            guardian.start(self, round, self.lease)
            self._wait_until(lambda: self._must_stop(round) or not guardian.round)
        if not guardian.round and not self._must_stop(round):
            self._report(node)
        if self._sigterm:
            node.leaving("SIGTERM")
        if guardian.round:
            guardian.stop(profile.grace)
            self._wait_until(lambda: not guardian.round)

    def _meet(self, node: Node) -> Seated:
        self._interruptible = True
        node.begin()
        seat, _ = node.meet()
        self._interruptible = False
        return seat

    def _report(self, node: Node) -> None:
        self._interruptible = True
        judged = node.judge(f"report of {node.id}")
        if judged is not None and judged.failures > self.job.profile.max_restarts:
            node.close("its workers failed for good", f"report {node.id}")
        self._interruptible = False

    def _must_stop(self, round: int) -> bool:
        over = self._ended >= round or self._waiting.round == round
        return over or self._sigterm or self._closed

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self.wait(self.until(ready))

    # --- what the node tells, in its own threads

    def _told(self, news: object) -> None:
        match news:
            case RoundEnded(round) | Judged(round):
                alone = isinstance(news, RoundEnded) and news.id == self.id
                self.history.told_over(self.epoch, self.id, round, alone=alone)
                self._ended = max(self._ended, round)
            case NodesWaiting():
                self.machine.after(GATHER, lambda: self.when_awake(lambda: self._make_room(news)))
            case RoundClosed():
                self._closed = True
        self.notify()

    def _make_room(self, news: NodesWaiting) -> None:
        view = self.node.touch.view if self.node else None
        if view is not None and view.waiting:
            self._waiting = news
            self.notify()

    def _renewed(self, lease: float) -> None:
        self.lease = lease
        self.host.guardian.renew(lease)
        self.notify()
